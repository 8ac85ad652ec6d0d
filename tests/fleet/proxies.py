"""
``epd-proxy serve`` as processes, its admin API, and one connection to each of its workers.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any, Self
from urllib.parse import quote, urlsplit

import h11

from tests.driver import CHAT
from tests.processes import Process

KEY = "fleet-key"
LIMIT = 10
"""Seconds after which something has hung."""

UNMEASURED = {"COVERAGE_PROCESS_START": "", "COVERAGE_PROCESS_CONFIG": ""}
"""The environment of processes that have much to do: coverage would make them half as fast."""


async def until(holds: Callable[[], Awaitable[object]], within: float = LIMIT) -> float:
    """Asks again and again, for what nobody tells of: the seconds that it took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not await holds():
        assert loop.time() - began < within, f"it did not come about within {within:g} s"
        await asyncio.sleep(0.01)
    return loop.time() - began


class Line:
    """A connection that stays: whichever worker has accepted it answers all that is asked."""

    def __init__(
        self, url: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.url = url
        self._reader = reader
        self._writer = writer
        self._parser = h11.Connection(h11.CLIENT)

    @classmethod
    async def to(cls, url: str) -> Self:
        address = urlsplit(url)
        return cls(url, *await asyncio.open_connection(address.hostname, address.port))

    async def send(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body. Raises ConnectionError if the connection has been closed."""
        headers = [("host", "proxy"), ("content-length", str(len(body))), ("x-api-key", KEY)]
        request = h11.Request(method=method, target=path, headers=headers)
        for part in (request, h11.Data(body), h11.EndOfMessage()):
            self._writer.write(self._parser.send(part) or b"")
        status, content = 0, bytearray()
        while not isinstance(event := self._parser.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                content += event.data
            elif isinstance(event, h11.ConnectionClosed):
                raise ConnectionResetError
            elif event is h11.NEED_DATA:
                data = await self._reader.read(65536)
                if not data:
                    raise ConnectionResetError
                self._parser.receive_data(data)
        if self._parser.our_state is h11.DONE and self._parser.their_state is h11.DONE:
            self._parser.start_next_cycle()
        return status, bytes(content)

    async def ask(self, method: str, path: str, value: Any = None) -> tuple[int, Any]:
        """The same with JSON both ways."""
        body = b"" if value is None else json.dumps(value).encode()
        status, content = await self.send(method, path, body)
        return status, json.loads(content)

    async def chat(self, body: bytes) -> int:
        status, _ = await self.send("POST", CHAT, body)
        return status

    async def register(self, kind: str, url: str, **more: Any) -> tuple[int, Any]:
        return await self.ask("POST", "/instances", {"role": kind, "url": url, **more})

    async def remove(self, url: str) -> tuple[int, Any]:
        return await self.ask("DELETE", f"/instances?url={quote(url)}")

    async def drain(self, url: str) -> tuple[int, Any]:
        """Answered when the work that runs has ended."""
        return await self.ask("POST", f"/instances/drain?url={quote(url)}")

    async def undrain(self, url: str) -> tuple[int, Any]:
        return await self.ask("DELETE", f"/instances/drain?url={quote(url)}")

    async def state(self, url: str) -> str:
        """``live``, ``evicted`` or ``draining``; nothing if it is not there."""
        _, kinds = await self.ask("GET", "/instances")
        found = [state for kind in kinds.values() for state, urls in kind.items() if url in urls]
        return found[0] if found else ""

    async def close(self) -> None:
        self._writer.transport.abort()
        await asyncio.sleep(0)


@asynccontextmanager
async def line(url: str) -> AsyncIterator[Line]:
    found = await Line.to(url)
    try:
        yield found
    finally:
        await found.close()


async def all_say(lines: Iterable[Line], url: str, *states: str, within: float = 1.0) -> float:
    """Until everybody says one of these states of an instance: how long it took."""
    found = list(lines)

    async def holds() -> bool:
        said = await asyncio.gather(*(one.state(url) for one in found))
        return set(said) <= set(states)

    return await until(holds, within)


class Served:
    """A proxy that runs: its process, its address, and the pids of those that serve."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.url = ""
        self.pids: list[int] = []
        self.is_over = False

    async def start(self, workers: int) -> None:
        """Until all of them serve."""
        for _ in range(workers):
            await self.printed("Application startup complete")
        output = self.process.output
        self.pids += map(int, re.findall(r"Started server process \[(\d+)\]", output))
        pattern = r"running on (http://\S+)"
        self.url = (re.search(pattern, output) or await self.printed(pattern))[1]
        await until(self.listens)

    async def listens(self) -> bool:
        """Whether connections are taken; a worker says that it has started a little earlier."""
        try:
            async with line(self.url):
                return True
        except ConnectionRefusedError:
            return False

    async def printed(self, pattern: str) -> re.Match[str]:
        """What it prints from now on."""
        return await asyncio.to_thread(self.process.wait_for, pattern)

    async def ended(self) -> int:
        status = await asyncio.to_thread(self.process.wait)
        self.is_over = True
        return status

    async def end(self) -> None:
        """Politely, and if that does not do, not."""
        if self.is_over:
            return
        self.process.signal(signal.SIGTERM)
        ended = asyncio.create_task(self.ended())
        done, _ = await asyncio.wait([ended], timeout=5)
        if not done:
            # Only those of which it has told itself.
            for pid in self.pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(self.process.stop)
        await ended

    @asynccontextmanager
    async def lines(self) -> AsyncIterator[list[Line]]:
        """One connection to each worker: while the others are stopped, only it can accept."""
        async with AsyncExitStack() as stack:
            found = []
            for pid in self.pids:
                with _stopped(set(self.pids) - {pid}):
                    one = await stack.enter_async_context(line(self.url))
                    assert (await one.send("GET", "/live"))[0] == 200
                found.append(one)
            yield found


@contextmanager
def _stopped(pids: Iterable[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def serve(*args: str, workers: int = 1, busy: bool = False) -> AsyncIterator[Served]:
    """A proxy that has started, all its workers; ``ADMIN_API_KEY`` is set."""
    words = ["serve", "--port", "0", "--workers", str(workers), "--graceful-timeout", "1", *args]
    process = Process(*words, env={"ADMIN_API_KEY": KEY, **(UNMEASURED if busy else {})})
    served = Served(process)
    try:
        await served.start(workers)
        yield served
    finally:
        await served.end()


def flags(**urls: Iterable[str]) -> list[str]:
    """``--encode URL ...`` and so on."""
    return [word for role, found in urls.items() for url in found for word in (f"--{role}", url)]
