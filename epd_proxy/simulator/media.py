"""
Raw media: the bytes behind a URL, and what an image, video or audio processor measures in them.

Nothing is fetched and nothing is decoded. The bytes of an http URL are its own text, and only
the first bytes of a file are looked at: a picture must begin like one, and a PNG tells its size.
"""

from __future__ import annotations

import base64
import hashlib
import math

from epd_proxy.simulator.body import Json
from epd_proxy.simulator.errors import EngineError

_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_HEAD = 24
_JPEG_OR_GIF = (b"\xff\xd8\xff", b"GIF87a", b"GIF89a")
# The side of the square that becomes one token.
_TOKEN_SIDE = 28


def fetch(url: str, modality: str) -> bytes:
    scheme = url.partition(":")[0].lower()
    if scheme in ("http", "https"):
        return url.encode()
    if scheme == "file":
        raise EngineError("Cannot load local files without `--allowed-local-media-path`.")
    if scheme != "data":
        raise EngineError("The URL must be either a HTTP, data or file URL.")
    content = _from_data_url(url)
    if not content or (modality == "image" and not _is_image(content)):
        raise EngineError(f"Failed to load {modality}: cannot identify {modality} file")
    return content


def from_base64(data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        raise EngineError("Non-base64 digit found") from None


def measure(modality: str, content: bytes) -> Json:
    """Metadata of raw media: of a PNG by its size, else made up from the bytes."""
    first, second = hashlib.sha256(content).digest()[:2]
    if modality == "audio":
        return {"audio_num_tokens": [1 + first]}
    height, width = 1 + first % 8, 1 + second % 8
    if content.startswith(_PNG):
        width, height = (math.ceil(side / _TOKEN_SIDE) for side in _png_size(content))
    grid = [1, 2 * height, 2 * width]
    if modality == "image":
        return {"image_grid_thw": grid}
    return {"video_grid_thw": grid, "second_per_grid_ts": [1.0]}


def _from_data_url(url: str) -> bytes:
    head, comma, data = url.partition(",")
    if not comma:
        raise EngineError(f"Invalid data URL {url[:32]!r}: missing ',' separator.")
    if not head.endswith(";base64"):
        message = "Only base64 data URLs are supported for now."
        raise EngineError(message, "NotImplementedError", 501)
    return from_base64(data)


def _is_image(content: bytes) -> bool:
    if content.startswith(_PNG):
        return len(content) >= _PNG_HEAD and 0 not in _png_size(content)
    is_webp = content[:4] == b"RIFF" and content[8:12] == b"WEBP"
    return is_webp or content.startswith(_JPEG_OR_GIF)


def _png_size(png: bytes) -> tuple[int, int]:
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
