"""
Does anything stay behind? Minutes of good and bad endings, then a look at memory and sockets.

    python -m perf.soak [--seconds N] [--callers N] [--seed N]

``epd-proxy serve`` runs as a process of its own; engines and callers share this one. Engines
answer, refuse, fail, break off and fall silent; callers stream and do not, leave at any moment in
any way, send nonsense and send megabytes. After a warm-up, which has seen the largest load, and
again at the end, everybody is well and quiet: then there must be as many sockets as before the
first request, no work in progress, and no more memory than a margin above the warm-up's. Else, or
if an answer is none that could be, the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, NamedTuple
from urllib.parse import quote

from perf.bodies import KB, MB, Shape, body_of
from perf.engines import Engine, Settings, State
from perf.processes import Cores, Process, memory_bytes, running

MARGIN = 8 * MB
"""What the resident memory may have grown by since the warm-up."""

ENGINES = {"encode": 2, "prefill": 2, "decode": 3}
_BIG_AT_ONCE = 4
_PATIENCE = 20.0
_KEY = "soak"
_FLAGS = {
    "encode-timeout": 0.5,
    "prefill-timeout": 0.5,
    "first-byte-timeout": 0.5,
    "idle-timeout": 0.5,
    "body-timeout": 0.5,
    "stream-guard": 0.5,
    "keep-alive": 0.5,
    "probe-interval": 2,
    "drain-timeout": 2,
    "graceful-timeout": 2,
}

# -- engines -------------------------------------------------------------------------------------

MOODS = {
    "well": 84,
    "refuses": 3,
    "is full": 2,
    "fails": 3,
    "resets": 2,
    "closes": 1,
    "breaks off": 2,
    "falls silent": 1,
    "errs in the stream": 2,
}
"""What an engine does with a call, by how often."""

_ERROR = b'{"error":{"message":"so it is","type":"Error","param":null,"code":%d}}'
_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Moody(Engine):
    """A connection to an engine that does not always answer; ``moods`` is empty: it does."""

    def __init__(
        self,
        role: str,
        state: State,
        moods: dict[str, int],
        rng: random.Random,
        open_: set[asyncio.Transport],
    ) -> None:
        super().__init__(role, state)
        self._open = open_
        self._moods = moods
        self._rng = rng

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._open.add(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self._transport)

    def _answer_chat(self) -> None:
        moods = self._moods or {"well": 1}
        (mood,) = self._rng.choices(list(moods), list(moods.values()))
        if mood == "well":
            super()._answer_chat()
        elif mood == "resets":
            _reset(self._transport)
        elif mood == "closes":
            self._transport.close()
        elif mood == "breaks off":
            self._transport.write(_STREAM + _chunk(_TOKEN) * 3)
            self._transport.close()
        elif mood == "errs in the stream":
            event = b"data: " + _ERROR % 500 + b"\n\n"
            self._transport.write(_STREAM + _chunk(event) + b"0\r\n\r\n")
        elif mood != "falls silent":
            self._refuse({"refuses": 400, "is full": 503, "fails": 500}[mood])

    def _refuse(self, status: int) -> None:
        body = _ERROR % status
        head = f"HTTP/1.1 {status} So\r\ncontent-type: application/json\r\n"
        self._transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)


def _reset(transport: asyncio.BaseTransport) -> None:
    """Closes with an RST."""
    sock = transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert isinstance(transport, asyncio.WriteTransport)
    transport.abort()


# -- callers -------------------------------------------------------------------------------------

TEXT = body_of(Shape())
BODIES = (
    TEXT,
    body_of(Shape(stream=True)),
    body_of(Shape(1, 20 * KB)),
    body_of(Shape(3, 20 * KB, stream=True)),
)
BIG = (body_of(Shape(1, 3 * MB)), body_of(Shape(2, MB, stream=True)))
NONSENSE = (
    b"{",
    b"[]",
    b'{"messages": 5}',
    b'{"messages": [{"content": [{"type": "image_url"}]}]}',
)

HABITS = {
    "stays": 70,
    "leaves": 12,
    "leaves in the body": 3,
    "stalls in the body": 1,
    "reads late": 4,
    "talks nonsense": 5,
    "is big": 3,
    "asks for other paths": 2,
}
"""What a caller does with a connection, by how often."""

ANSWERS = {200, 400, 404, 405, 408, 500, 502, 503, 504}
"""All that may be answered to them."""


class Callers:
    """So many at once, one request after another, until they are told to stop."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self._port = port
        self._rng = rng
        self._big = asyncio.Semaphore(_BIG_AT_ONCE)
        self.statuses: Counter[str] = Counter()
        self.habits: Counter[str] = Counter()
        self.strange: list[str] = []

    @property
    def total(self) -> int:
        return sum(self.habits.values())

    async def keep_asking(self, number: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(number):
                group.create_task(self._keep_asking(end))

    async def keep_asking_the_most(self, seconds: float) -> None:
        """As many megabytes at once as there will ever be, again and again."""
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(_BIG_AT_ONCE):
                group.create_task(self._keep_asking(end, {"is big": 1}))

    async def _keep_asking(self, end: float, habits: Mapping[str, int] = HABITS) -> None:
        while time.monotonic() < end:
            (habit,) = self._rng.choices(list(habits), list(habits.values()))
            await self._ask(habit)

    async def _ask(self, habit: str) -> None:
        self.habits[habit] += 1
        async with asyncio.timeout(_PATIENCE):
            if habit == "is big":
                async with self._big:
                    await self.stay(self._rng.choice(BIG))
            elif habit == "talks nonsense":
                await self.stay(self._rng.choice(NONSENSE))
            elif habit == "asks for other paths":
                path = self._rng.choice(("/health", "/v1/models", "/nowhere"))
                await self.stay(b"", f"GET {path}")
            elif habit == "stays":
                await self.stay(self._rng.choice(BODIES))
            elif habit == "reads late":
                await self.stay(self._rng.choice(BODIES), late=self._rng.random() * 0.3)
            elif habit == "leaves":
                await self._leave(self._rng.choice(BODIES), whole=True)
            elif habit == "leaves in the body":
                await self._leave(self._rng.choice(BODIES), whole=False)
            else:
                await self.stay(self._rng.choice(BODIES), missing=10)

    async def stay(
        self,
        body: bytes,
        line: str = "POST /v1/chat/completions",
        *,
        late: float = 0.0,
        missing: int = 0,
    ) -> None:
        reader, writer = await self._send(body, line, len(body) - missing)
        if late:
            await asyncio.sleep(late)
        raw = await _all_of(reader)
        writer.transport.abort()
        self._judge(raw, line)

    async def _leave(self, body: bytes, *, whole: bool) -> None:
        length = len(body) if whole else self._rng.randrange(len(body))
        _, writer = await self._send(body, "POST /v1/chat/completions", length)
        await asyncio.sleep(self._rng.choice((0.001, 0.003, 0.01, 0.1)) * self._rng.random())
        way = self._rng.choice(("fin", "rst", "half"))
        if way == "rst":
            _reset(writer.transport)
            return
        if way == "half" and not writer.is_closing():
            with suppress(OSError):
                writer.write_eof()
            await asyncio.sleep(0.05)
        writer.close()

    async def _send(
        self, body: bytes, line: str, length: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = f"{line} HTTP/1.1\r\nhost: soak\r\nconnection: close\r\ncontent-length: {len(body)}"
        writer.write(head.encode() + b"\r\ncontent-type: application/json\r\n\r\n" + body[:length])
        with suppress(ConnectionError):
            await writer.drain()
        return reader, writer

    def _judge(self, raw: bytes, line: str) -> None:
        status = int(raw[9:12]) if raw.startswith(b"HTTP/1.1 ") else 0
        if not status:
            self.statuses["none"] += 1
            # Only answers that have begun may be cut.
            self._wonder(line, raw)
        elif status not in ANSWERS:
            self._wonder(line, raw)
        elif _is_whole(raw):
            self.statuses[str(status)] += 1
        else:
            self.statuses[f"{status}, cut"] += 1
            if status != 200:
                self._wonder(line, raw)

    def _wonder(self, line: str, raw: bytes) -> None:
        self.strange.append(f"{line}: {raw[:300]!r}")


async def _all_of(reader: asyncio.StreamReader) -> bytes:
    found = bytearray()
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            found += data
    return bytes(found)


def _is_whole(raw: bytes) -> bool:
    head, _, body = raw.partition(b"\r\n\r\n")
    length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    return len(body) == int(length[1]) if length else body.endswith(b"0\r\n\r\n")


# -- the proxy -----------------------------------------------------------------------------------


class Measured(NamedTuple):
    memory: int
    sockets: int

    def __str__(self) -> str:
        return f"{self.memory / MB:.1f} MB, {self.sockets} sockets"


class Proxy:
    """The process under test."""

    def __init__(self, process: Process, port: int) -> None:
        self._process = process
        self.port = port

    @property
    def sockets(self) -> int:
        directory = f"/proc/{self._process.pid}/fd"
        found = 0
        for name in os.listdir(directory):
            with suppress(FileNotFoundError):
                found += os.readlink(f"{directory}/{name}").startswith("socket:")
        return found

    @property
    def memory(self) -> int:
        return memory_bytes(self._process.pid, "VmRSS")

    async def quiet(self, sockets: int) -> Measured:
        """Once no more than so many sockets are left, or after some patience."""
        seen = self.sockets

        def is_quiet() -> bool:
            nonlocal seen
            seen = self.sockets
            return seen <= sockets

        await _until(is_quiet)
        # Not counted again: the next probe may have opened one meanwhile.
        return Measured(self.memory, seen)

    async def ask(self, line: str) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        fields = f"host: soak\r\nx-api-key: {_KEY}\r\nconnection: close\r\ncontent-length: 0"
        writer.write(f"{line} HTTP/1.1\r\n{fields}\r\n\r\n".encode())
        raw = await _all_of(reader)
        writer.transport.abort()
        return int(raw[9:12] or 0), raw.partition(b"\r\n\r\n")[2]

    async def busy(self, urls: Sequence[str]) -> list[str]:
        """The engines for which there is work in progress, of callers who have all gone."""
        found = []
        for url in urls:
            path = f"/instances/drain?url={quote(url)}"
            status, body = await self.ask(f"POST {path}")
            if status != 200 or json.loads(body)["load"]:
                found.append(f"{url}: {body.decode(errors='replace')}")
            await self.ask(f"DELETE {path}")
        return found


async def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE
    while not holds() and time.monotonic() < end:  # noqa: ASYNC110 - /proc tells nobody
        await asyncio.sleep(0.05)


async def _started(process: Process, log: Log) -> Proxy:
    await _until(lambda: bool(log.port) or process.poll() is not None)
    if log.port is None:
        raise RuntimeError(f"the proxy did not start: {log.text}")
    return Proxy(process, log.port)


class Log:
    """What the proxy says, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def text(self) -> str:
        return self._path.read_text(errors="replace")

    @property
    def port(self) -> int | None:
        found = re.search(r"running on http://[^:]+:(\d+)", self.text)
        return int(found[1]) if found else None

    def open(self) -> IO[bytes]:
        return self._path.open("wb")


# -- the whole of it -----------------------------------------------------------------------------


def _command(urls: Mapping[str, Sequence[str]]) -> list[str]:
    flags = [(role, url) for role, found in urls.items() for url in found]
    flags += [(flag, str(value)) for flag, value in _FLAGS.items()]
    words = [word for flag, value in flags for word in (f"--{flag}", value)]
    return [sys.executable, "-m", "epd_proxy", "serve", "--port", "0", *words]


class Soak:
    """One run; ``wrong`` is what it has found."""

    def __init__(self, seconds: float, callers: int, seed: int) -> None:
        self._seconds = seconds
        self._number = callers
        self._rng = random.Random(seed)
        self._moods: dict[str, int] = {}
        self._servers: list[asyncio.Server] = []
        self._open: set[asyncio.Transport] = set()
        self.wrong: list[str] = []

    async def run(self, log: Log) -> int:
        """The exit status."""
        urls = await self._engines()
        with ExitStack() as stack:
            output = stack.enter_context(log.open())
            process = stack.enter_context(
                running(
                    _command(urls),
                    Cores.of_this_machine().proxy,
                    stdout=output,
                    stderr=output,
                    env={"ADMIN_API_KEY": _KEY},
                )
            )
            proxy = await _started(process, log)
            await self._measure(proxy, [url for found in urls.values() for url in found])
        await self._close()
        _, bug, text = log.text.partition("Traceback")
        if bug:
            self.wrong.append(f"the log holds a traceback: {text[:2000]}")
        for reason in self.wrong:
            print(f"WRONG: {reason}")
        return 1 if self.wrong else 0

    async def _engines(self) -> dict[str, list[str]]:
        loop, state = asyncio.get_running_loop(), State(Settings(chunks=8, gap=0.003))
        urls: dict[str, list[str]] = {role: [] for role in ENGINES}
        for role, count in ENGINES.items():
            for _ in range(count):
                engine = partial(Moody, role, state, self._moods, self._rng, self._open)
                server = await loop.create_server(engine, "127.0.0.1", 0, backlog=1000)
                self._servers.append(server)
                urls[role].append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        return urls

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for transport in self._open:
            transport.abort()
        await asyncio.sleep(0.1)

    async def _measure(self, proxy: Proxy, urls: Sequence[str]) -> None:
        began = Measured(proxy.memory, proxy.sockets)
        print(f"started: {began}")
        callers = Callers(proxy.port, self._rng)
        # What the allocator keeps for the next body grows until it has seen the worst.
        async with asyncio.TaskGroup() as group:
            group.create_task(self._mixed(callers, self._seconds / 3))
            group.create_task(callers.keep_asking_the_most(self._seconds / 3))
        warm, number = await proxy.quiet(began.sockets), callers.total
        print(f"after the warm-up, {number} connections: {warm}")
        await self._mixed(callers, self._seconds * 2 / 3)
        end = await proxy.quiet(began.sockets)
        print(f"at the end, {callers.total} connections: {end}")
        print(f"callers: {_listed(callers.habits)}")
        print(f"answers: {_listed(callers.statuses)}")
        grown, more = end.memory - warm.memory, callers.total - number
        each = grown / more
        print(f"memory: {grown / MB:+.1f} MB since the warm-up, {each:+.0f} bytes a connection")
        if grown > MARGIN:
            self.wrong.append(f"that is more than {MARGIN / MB:g} MB")
        for moment, measured in (("after the warm-up", warm), ("at the end", end)):
            if measured.sockets > began.sockets:
                reason = f"there were {measured.sockets} sockets, {began.sockets} before"
                self.wrong.append(f"{moment} {reason}")
        self.wrong += callers.strange[:5]
        self.wrong += await proxy.busy(urls)
        await self._check_well(proxy)

    async def _mixed(self, callers: Callers, seconds: float) -> None:
        self._moods.update(MOODS)
        await callers.keep_asking(self._number, seconds)
        self._moods.clear()

    async def _check_well(self, proxy: Proxy) -> None:
        """It serves as on the first day."""
        after = Callers(proxy.port, self._rng)
        for body in (*BODIES, *BIG):
            await after.stay(body)
        if after.statuses != {"200": len(BODIES) + len(BIG)}:
            self.wrong.append(f"afterwards it answered {_listed(after.statuses)}")


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def main(args: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.soak", description="Does anything stay behind?"
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="default: 300")
    parser.add_argument("--callers", type=int, default=32, help="at once (default: 32)")
    parser.add_argument("--seed", type=int, default=6, help="of all that is left to chance")
    options = parser.parse_args(args)
    with TemporaryDirectory(prefix="epd-proxy-soak-") as directory:
        soak = Soak(options.seconds, options.callers, options.seed)
        return asyncio.run(soak.run(Log(Path(directory) / "log")))


if __name__ == "__main__":
    sys.exit(main())
