"""
Callers that watch a clock, in a process of their own.

    python -m perf.callers watch|push OPTIONS      prints one line of JSON

``watch`` reads streams whose events say when an engine sent them; the difference to now is what
the way through the proxy has taken. ``push`` sends large bodies and waits for the answers.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import httptools
import uvloop

from perf.engines import STAMP

_HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: proxy\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n"
)
_DONE = b"data: [DONE]\n\n"
_PATIENCE = 60.0


def request_with(body: bytes) -> bytes:
    return _HEAD % len(body) + body


class Watcher(asyncio.Protocol):
    """One stream: when each of its events came, in milliseconds."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._last = 0
        self._is_whole = False
        self.ended = asyncio.Event()
        self.delays: list[float] = []
        self.first = 0.0
        self.worst_gap = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an instance of it under uvloop.
        self._transport = cast(asyncio.Transport, transport)
        self._began = time.monotonic_ns()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic_ns()
        self._parser.feed_data(data)

    def on_body(self, content: bytes) -> None:
        content = self._rest + content
        end = content.rfind(b"\n\n") + 2 if b"\n\n" in content else 0
        for stamp in STAMP.finditer(content, 0, end):
            self._count(int(stamp[1]))
        self._is_whole = content.endswith(_DONE)
        self._rest = content[end:]

    def _count(self, sent: int) -> None:
        now = self._now
        self.delays.append((now - sent) / 1e6)
        # The first event has no token in it, which matters to nobody.
        if len(self.delays) == 2:
            self.first = (now - self._began) / 1e6
        elif len(self.delays) > 2:
            self.worst_gap = max(self.worst_gap, (now - self._last) / 1e6)
        self._last = now

    def on_message_complete(self) -> None:
        self.ended.set()
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_whole = self._is_whole and self.ended.is_set()
        self.ended.set()

    def is_good(self, chunks: int) -> bool:
        status = self._parser.get_status_code()
        return status == 200 and self._is_whole and len(self.delays) == chunks + 2


async def watch(
    port: int, request: bytes, count: int, chunks: int, ramp: float, seconds: float = 0.0
) -> dict[str, Any]:
    """``count`` streams at a time, begun over ``ramp`` seconds, and again for ``seconds``."""
    loop = asyncio.get_running_loop()
    watchers: list[Watcher] = []
    end = loop.time() + seconds

    async def read_one() -> None:
        watcher = Watcher(request)
        watchers.append(watcher)
        await loop.create_connection(lambda: watcher, "127.0.0.1", port)
        async with asyncio.timeout(_PATIENCE):
            await watcher.ended.wait()

    async def one(delay: float) -> None:
        await asyncio.sleep(delay)
        while True:
            await read_one()
            if loop.time() >= end:
                return

    await asyncio.gather(*(one(ramp * i / count) for i in range(count)), return_exceptions=True)
    return _seen(watchers, count, chunks)


def _seen(watchers: Sequence[Watcher], count: int, chunks: int) -> dict[str, Any]:
    good = [watcher for watcher in watchers if watcher.is_good(chunks)]
    delays = [delay for watcher in watchers for delay in watcher.delays[1:]]
    return {
        "streams": len(watchers),
        "broken": max(count, len(watchers)) - len(good),
        "events": sum(len(watcher.delays) for watcher in watchers),
        "delay_p50": quantile(delays, 0.50),
        "delay_p99": quantile(delays, 0.99),
        "first_p50": quantile([watcher.first for watcher in good], 0.50),
        "first_p99": quantile([watcher.first for watcher in good], 0.99),
        "gap": quantile([watcher.worst_gap for watcher in good], 0.50),
        "gap_max": max((watcher.worst_gap for watcher in good), default=0.0),
    }


def quantile(values: Sequence[float], share: float) -> float:
    if len(values) < 2:
        return values[0] if values else 0.0
    if share == 0.5:
        return statistics.median(values)
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Pushers:
    """Threads, since the kernel does what there is to do: files go to sockets by sendfile."""

    def __init__(self, port: int, bodies: Sequence[str], seconds: float) -> None:
        self._port = port
        self._bodies = bodies
        self._end = time.monotonic() + seconds
        self._lock = threading.Lock()
        self.bytes = 0
        self.errors: list[str] = []

    def run(self, count: int) -> None:
        threads = [threading.Thread(target=self._push, args=(turn,)) for turn in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _push(self, turn: int) -> None:
        while time.monotonic() < self._end and not self.errors:
            path = Path(self._bodies[turn % len(self._bodies)])
            turn += 1
            try:
                status = self._send(path)
            except OSError as exc:
                status = str(exc)
            with self._lock:
                self.bytes += path.stat().st_size
                if status != "200":
                    self.errors.append(status)

    def _send(self, path: Path) -> str:
        address = ("127.0.0.1", self._port)
        with path.open("rb") as file, socket.create_connection(address, _PATIENCE) as sock:
            sock.sendall(_HEAD % path.stat().st_size)
            sock.sendfile(file)
            return sock.recv(64 << 10)[9:12].decode()


def push(port: int, bodies: Sequence[str], count: int, seconds: float) -> dict[str, Any]:
    pushers = Pushers(port, bodies, seconds)
    pushers.run(count)
    return {"pushed_mb": pushers.bytes / 1e6, "errors": pushers.errors}


def main(kind: str, options: dict[str, Any]) -> None:
    if kind == "watch":
        request = request_with(Path(options.pop("body")).read_bytes())
        result = uvloop.run(watch(request=request, **options))
    else:
        result = push(**options)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
