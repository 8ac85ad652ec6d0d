"""
Media as callers send it: real PNG, WAV and AVI files in data URLs, made on the spot.
"""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

from epd_proxy.demo import data_url, picture_png

RATE = 16000
"""Samples in a second, which is what the models hear."""


def text(words: str = "Describe.") -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(width: int, height: int, **extra: Any) -> dict[str, Any]:
    return {**image_url(picture(width, height)), **extra}


def image_url(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def picture(width: int, height: int) -> str:
    return data_url(picture_png(width, height))


def frames(width: int, height: int, count: int) -> dict[str, Any]:
    """A video as vLLM takes it frame by frame, a picture each."""
    pictures = (picture_png(width, height) for _ in range(count))
    joined = b",".join(base64.b64encode(each) for each in pictures).decode()
    return video_url("data:video/jpeg;base64," + joined)


def film(width: int, height: int, seconds: int, pitch: float | None = None) -> dict[str, Any]:
    """A video file with a sound track, of its own unless the pitch says otherwise."""
    content = avi(width, height, seconds, pitch or width / 8)
    return video_url("data:video/x-msvideo;base64," + base64_of(content))


def video_url(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def audio_url(samples: int) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{sound(samples)}"}}


def input_audio(samples: int) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": sound(samples), "format": "wav"}}


def sound(samples: int) -> str:
    return base64_of(wav(samples))


def base64_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


def wav(samples: int) -> bytes:
    return _chunk(b"RIFF", b"WAVE", _chunk(b"fmt ", _PCM), _chunk(b"data", _tone(samples, 6)))


def avi(width: int, height: int, seconds: int, pitch: float, fps: int = 4) -> bytes:
    """Each frame a PNG, with the sound that goes with it."""
    frame = picture_png(width, height)
    size = struct.pack("<IiiHH4sIiiII", 40, width, height, 1, 24, b"MPNG", len(frame), 0, 0, 0, 0)
    count = seconds * fps
    movie = _list(
        b"movi",
        *(
            chunk
            for _ in range(count)
            for chunk in (_chunk(b"00dc", frame), _chunk(b"01wb", _tone(RATE // fps, pitch)))
        ),
    )
    head = struct.pack("<14I", 10**6 // fps, 0, 0, 0x10, count, 0, 2, 0, width, height, 0, 0, 0, 0)
    header = _list(
        b"hdrl",
        _chunk(b"avih", head),
        _stream(b"vids", b"MPNG", scale=1, rate=fps, length=count, form=size),
        _stream(b"auds", b"\0" * 4, scale=1, rate=RATE, length=seconds * RATE, form=_PCM),
    )
    return _chunk(b"RIFF", b"AVI ", header, movie, _chunk(b"idx1", _index(movie)))


_PCM = struct.pack("<HHIIHH", 1, 1, RATE, RATE * 2, 2, 16)


def _stream(kind: bytes, codec: bytes, *, scale: int, rate: int, length: int, form: bytes) -> bytes:
    sample_size = 2 if kind == b"auds" else 0
    head = struct.pack(
        "<4s4sIHHIIIIIIII8x",
        *(kind, codec, 0, 0, 0, 0),
        *(scale, rate, 0, length, 0, 0xFFFFFFFF, sample_size),
    )
    return _list(b"strl", _chunk(b"strh", head), _chunk(b"strf", form))


def _index(movie: bytes) -> bytes:
    """Where in the list of frames and sounds each of them starts."""
    entries, at = [], 12
    while at < len(movie):
        name, size = struct.unpack_from("<4sI", movie, at)
        entries.append(struct.pack("<4sIII", name, 0x10, at - 8, size))
        at += 8 + size + size % 2
    return b"".join(entries)


def _list(name: bytes, *chunks: bytes) -> bytes:
    return _chunk(b"LIST", name, *chunks)


def _chunk(name: bytes, *content: bytes) -> bytes:
    joined = b"".join(content)
    return struct.pack("<4sI", name, len(joined)) + joined + b"\0" * (len(joined) % 2)


def _tone(samples: int, pitch: float) -> bytes:
    values = (int(9000 * math.sin(k / pitch)) for k in range(samples))
    return b"".join(struct.pack("<h", value) for value in values)
