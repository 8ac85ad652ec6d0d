"""
Encode, prefill and decode engines that cost next to nothing and whose answers can be checked.

    python -m perf.engines ROLE=COUNT ...

prints the ports, ``{"encode": [...]}``, as a line of JSON, then obeys lines of JSON on standard
input, each answered by one on standard output, until that closes:

    {"do": "reset", SETTING: VALUE, ...}   settings to their defaults but for these, counters to 0
    {"do": "report"}                       {"counts": {ROLE: N}, "kept": {ROLE: [REQUEST, ...]}}

A request is read into a buffer of its connection, which is kept for the next one, and looked at no
more than its answer needs: an encoder must find images and uuids, decode whether to stream.
So that mistakes show, an image's grid is derived from its last bytes (``grid_of``), and every event
of a stream says when it was sent, by the clock that all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import random
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import uvloop

ROLES = ("encode", "prefill", "decode")

_ROOM = 64 << 10
# Larger buffers are not kept, or a few hundred connections would hold gigabytes.
_KEPT = 8 << 20
_TAG = 16
_EDGE = 4 << 10
_STREAM = re.compile(rb'"stream": ?true')
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass
class Settings:
    chunks: int = 64
    """Events of a stream that carry a token."""
    gap: float = 0.0
    """Seconds between them; 0: back to back, each with a write of its own."""
    keep: bool = False
    """Keep requests for the report."""
    old_reports: bool = False
    """Encoders report as before vLLM 0.33: a list, with tensors to be made by the proxy."""


@dataclass
class State:
    settings: Settings = field(default_factory=Settings)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ROLES, 0))
    kept: dict[str, list[Any]] = field(default_factory=lambda: {role: [] for role in ROLES})


# -- answers -------------------------------------------------------------------------------------


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _response(content: bytes) -> bytes:
    head = "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def _completion(text: str, reason: str, **more: object) -> bytes:
    message = {"role": "assistant", "content": text}
    return _compact(
        {
            "id": "chatcmpl-perf",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": {"prompt_tokens": 12, "completion_tokens": 90, "total_tokens": 102},
            **more,
        }
    )


KV_HANDLE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill-0",
    "remote_request_id": "chatcmpl-prefill",
    "remote_block_ids": [list(range(1, 9))],
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
DECODED = _completion("A picture of 一只 cat. " * 22, "stop")
MODELS = _compact({"object": "list", "data": [{"id": "m", "object": "model"}]})
_DECODED = _response(DECODED)
_PREFILLED = _response(_completion("A", "length", kv_transfer_params=KV_HANDLE))
_OTHER = {b"/v1/models": _response(MODELS)}


def grid_of(tag: bytes) -> list[int]:
    """The grid of an image whose URL ends so."""
    digest = zlib.crc32(tag[-_TAG:])
    return [1, 2 + digest % 50, 2 + (digest >> 16) % 50]


def _strings(body: bytearray, end: int) -> Iterator[tuple[int, int]]:
    """
    Where the quoted strings are, for bodies without escapes, which encode requests are.

    A search for one byte runs at the speed of memory; one for a word would cost more than the
    rest of an encoder.
    """
    start = body.find(34, 0, end)
    while start >= 0:
        stop = body.find(34, start + 1, end)
        yield start + 1, stop
        start = body.find(34, stop + 1, end)


def _images(body: bytearray, end: int) -> tuple[list[bytes], list[str]]:
    """The ends of the images' URLs, and the images' uuids."""
    tags, uuids = [], []
    found = _strings(body, end)
    for start, stop in found:
        if body.startswith(b"data:", start, stop):
            tags.append(bytes(body[stop - _TAG : stop]))
        elif body[start:stop] == b"uuid":
            start, stop = next(found)
            uuids.append(body[start:stop].decode())
    return tags, uuids


def _encoded(body: bytearray, end: int, old: bool) -> bytes:
    tags, uuids = _images(body, end)
    if len(tags) != len(uuids):
        uuids = [f"own-{tag.hex()}" for tag in tags]
    reports: dict[str, Any] = {}
    for index, (tag, uuid) in enumerate(zip(tags, uuids, strict=True)):
        report = {
            "metadata": {"image_grid_thw": [grid_of(tag)]},
            "modality": "image",
            "item_indices": [index],
            "peer_host": "127.0.0.1",
            "peer_port": 5500,
            "size_bytes": 401408,
        }
        reports.setdefault(uuid, report)
    if old:
        items = [
            {"mm_hash": uuid, "image_grid_thw": [grid_of(tag)]}
            for tag, uuid in zip(tags, uuids, strict=True)
        ]
        reports = {"ec_items": items}
    return _response(_completion("", "stop", ec_transfer_params=reports))


# -- streams -------------------------------------------------------------------------------------

STAMP = re.compile(rb'"at":"(\d{20})"')
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def _event(delta: str, reason: str) -> bytes:
    return (
        'data: {"id":"chatcmpl-perf","object":"chat.completion.chunk","created":1,"model":"m",'
        f'"choices":[{{"index":0,"delta":{delta},"finish_reason":{reason}}}],"at":"%020d"}}\n\n'
    ).encode()


_FIRST = _event('{"role":"assistant","content":""}', "null")
_TOKEN = _event('{"content":" token"}', "null")
_LAST = _event("{}", '"stop"')
_DONE = b"data: [DONE]\n\n"


def _chunk(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


def _stamped(event: bytes) -> bytes:
    return _chunk(event % time.monotonic_ns())


def streamed(chunks: int) -> bytes:
    """A whole stream as a caller sees it, its stamps zero."""
    return b"".join(event % 0 for event in (_FIRST, *[_TOKEN] * chunks, _LAST)) + _DONE


class Stream:
    """Writes one stream, event by event."""

    def __init__(self, transport: asyncio.Transport, settings: Settings) -> None:
        self._transport = transport
        self._left = settings.chunks
        self._gap = settings.gap
        self._loop = asyncio.get_running_loop()
        # Streams that were opened together must not tick together.
        self._due = self._loop.time() - self._gap * random.random()
        transport.write(_STREAM_HEAD + _stamped(_FIRST))
        self._wait()

    def _wait(self) -> None:
        if self._gap:
            self._due += self._gap
            self._loop.call_at(self._due, self._write)
        else:
            self._loop.call_soon(self._write)

    def _write(self) -> None:
        if self._transport.is_closing():
            return
        if not self._left:
            self._transport.write(_stamped(_LAST) + _chunk(_DONE) + b"0\r\n\r\n")
            return
        self._left -= 1
        self._transport.write(_stamped(_TOKEN))
        self._wait()


# -- connections ---------------------------------------------------------------------------------


class Engine(asyncio.BufferedProtocol):
    """One connection to an engine: requests with a content-length, one at a time."""

    def __init__(self, role: str, state: State) -> None:
        self._role = role
        self._state = state
        self._buffer = bytearray(_ROOM)
        self._restart()

    def _restart(self) -> None:
        self._have = self._start = self._need = 0
        if len(self._buffer) > _KEPT:
            self._buffer = bytearray(_ROOM)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an instance of it under uvloop.
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[self._have :]

    def buffer_updated(self, nbytes: int) -> None:
        self._have += nbytes
        if not self._need:
            self._read_head()
        if self._need and self._have >= self._need:
            self._answer()
            self._restart()

    def _read_head(self) -> None:
        start = self._buffer.find(b"\r\n\r\n", 0, self._have) + 4
        if start < 4:
            if len(self._buffer) - self._have < 1024:
                self._transport.abort()
            return
        self._start = start
        length = _LENGTH.search(self._buffer, 0, start)
        self._need = start + (int(length[1]) if length else 0)
        if length is None and self._buffer.startswith(b"POST "):
            self._transport.write(b"HTTP/1.1 411 Length Required\r\ncontent-length: 0\r\n\r\n")
            self._transport.close()
        if self._need >= len(self._buffer):
            larger = bytearray(self._need + _ROOM)
            larger[: self._have] = memoryview(self._buffer)[: self._have]
            self._buffer = larger

    def _answer(self) -> None:
        path = bytes(self._buffer[: self._buffer.find(b"\r\n")]).split(b" ")[1]
        if path.startswith(b"/v1/chat/completions"):
            self._answer_chat()
        else:
            self._transport.write(_OTHER.get(path) or _response(b"{}"))

    def _answer_chat(self) -> None:
        settings = self._state.settings
        self._state.counts[self._role] += 1
        if settings.keep:
            body = self._buffer[self._start : self._need]
            self._state.kept[self._role].append(json.loads(body))
        if self._role == "encode":
            answer = _encoded(self._buffer, self._need, settings.old_reports)
            self._transport.write(answer)
        elif self._role == "prefill":
            self._transport.write(_PREFILLED)
        elif self._wants_stream():
            Stream(self._transport, settings)
        else:
            self._transport.write(_DECODED)

    def _wants_stream(self) -> bool:
        start, end = self._start, self._need
        if end - start < 2 * _EDGE:
            return _STREAM.search(self._buffer, start, end) is not None
        # Before the messages or after them.
        places = ((start, start + _EDGE), (end - _EDGE, end))
        return any(_STREAM.search(self._buffer, *place) for place in places)


# -- the process ---------------------------------------------------------------------------------


def _obey(state: State, command: dict[str, Any]) -> dict[str, Any]:
    if command.pop("do") == "report":
        return {"counts": state.counts, "kept": state.kept}
    fresh = State(Settings(**command))
    state.__dict__.update({f.name: getattr(fresh, f.name) for f in dataclasses.fields(fresh)})
    return {}


def _say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _listener(state: State, done: asyncio.Event) -> Callable[[], None]:
    def listen() -> None:
        line = sys.stdin.buffer.readline()
        if line:
            _say(_obey(state, json.loads(line)))
        else:
            done.set()

    return listen


async def serve(wanted: dict[str, int]) -> None:
    loop, state, done = asyncio.get_running_loop(), State(), asyncio.Event()
    ports: dict[str, list[int]] = {role: [] for role in wanted}
    servers = []
    for role, count in wanted.items():
        engine = functools.partial(Engine, role, state)
        for _ in range(count):
            server = await loop.create_server(engine, "127.0.0.1", 0, backlog=4096)
            servers.append(server)
            ports[role].append(server.sockets[0].getsockname()[1])
    loop.add_reader(sys.stdin.fileno(), _listener(state, done))
    _say(ports)
    # It closes when the rig ends, however that ends.
    await done.wait()


if __name__ == "__main__":
    uvloop.run(serve({role: int(n) for role, _, n in (a.partition("=") for a in sys.argv[1:])}))
