"""
Scripted engines that live: they stop and start again at one address, answer their probes as told,
and know what was sent to them after they should have been left alone.

``python -m tests.fleet.engines ROLE`` runs one as a process, which can be killed.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import socket
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.driver import CHAT
from tests.faults.engines import (
    COMPLETION,
    CONTENT,
    DEFAULTS,
    DONE,
    ROLE,
    STOP,
    STREAM,
    Act,
    Call,
    Engine,
    answers,
    chunk,
    pause,
    plays,
)
from tests.wire import Peer, Server

LIMIT = 25
"""Seconds after which a test has hung."""

NAME = "x-engine"
"""The field in which a decode engine says its address; the proxy passes it on."""


class Living(Engine):
    """
    One engine at an address that stays its own.

    From ``seal`` to ``unseal`` nothing must be sent to it. What was sent earlier may be read later,
    so bytes are counted as they arrive in the kernel: what begins behind the count is ``late``.
    """

    def __init__(self, role: str, answer: Act | None = None) -> None:
        super().__init__(answer or DEFAULTS[role])
        self.role = role
        self.health: Act = answers(200)
        self.probes = 0
        self.late: list[str] = []
        self._probed = asyncio.Event()
        self._port = 0
        self._socket: socket.socket | None = None
        self._sockets: dict[Peer, socket.socket] = {}
        self._sealed: dict[Peer, int] | None = None
        self._forbidden: dict[Peer, list[range]] = {}
        self._accepting: set[asyncio.Task[object]] = set()

    async def start(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", self._port), backlog=500)
        self._socket.setblocking(False)
        self._port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        asyncio.get_running_loop().add_reader(self._socket, self._accept)

    async def stop(self) -> None:
        """As when the process is killed: its connections break."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        await asyncio.gather(*self._accepting)
        await Server.stop(self)
        self._tasks.clear()
        self.peers.clear()
        self._sockets.clear()

    async def probed(self, number: int) -> None:
        """Until so many ``GET /health`` have come."""
        while self.probes < number:
            self._probed.clear()
            await self._probed.wait()

    def seal(self) -> None:
        """From now on nothing more may be sent to it."""
        self._accept()
        self._sealed = {peer: self._arrived_from(peer) for peer in self._sockets}

    def unseal(self) -> None:
        assert self._sealed is not None
        self._accept()
        for peer in self._sockets:
            begin, end = self._sealed.get(peer, 0), self._arrived_from(peer)
            self._forbidden.setdefault(peer, []).append(range(begin, end))
        self._sealed = None

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(BlockingIOError):
            while self._socket is not None:
                sock, _ = self._socket.accept()
                sock.setblocking(False)
                self._take(loop, sock)

    def _take(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        peer = Peer(self)
        self._sockets[peer] = sock
        task = loop.create_task(loop.connect_accepted_socket(lambda: peer, sock))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    def _arrived_from(self, peer: Peer) -> int:
        """All bytes that have come so far, those too that nobody has read."""
        sock = self._sockets[peer]
        if sock.fileno() < 0:
            return peer.count
        unread = array.array("i", [0])
        fcntl.ioctl(sock, termios.FIONREAD, unread)
        return peer.count + unread[0]

    def _is_late(self, peer: Peer, begin: int) -> bool:
        if self._sealed is not None and begin >= self._sealed.get(peer, 0):
            return True
        return any(begin in forbidden for forbidden in self._forbidden.get(peer, ()))

    async def _converse(self, peer: Peer) -> None:
        while True:
            begin = peer.count - len(peer.received)
            request = await peer.request()
            if self._is_late(peer, begin):
                self.late.append(f"{request.method} {request.target}")
            call = Call(request, peer)
            if request.target == CHAT:
                self.calls.append(call)
                self._called.set()
                await (self._next.popleft() if self._next else self.answer)(call)
            else:
                self.probes += 1
                self._probed.set()
                await self.health(call)


@asynccontextmanager
async def living(*engines: Living) -> AsyncIterator[None]:
    """
    The engines while they run; they may be stopped and started meanwhile.

    What is done with them is over within LIMIT.
    """
    try:
        for engine in engines:
            await engine.start()
        async with asyncio.timeout(LIMIT):
            yield
    finally:
        for engine in engines:
            await engine.stop()


def slowly(role: str, seconds: float, pieces: int = 4) -> Act:
    """A good answer that takes its time; a stream says something as soon as it is asked."""

    async def decode(call: Call) -> None:
        field = f"{NAME}: {call.headers['host']}"
        if call.json.get("stream"):
            opening = STREAM.removesuffix(b"\r\n") + f"{field}\r\n\r\n".encode()
            middle: list[bytes | Act] = [chunk(CONTENT), pause(seconds / pieces)] * pieces
            steps: list[bytes | Act] = [
                opening,
                chunk(ROLE),
                *middle,
                chunk(STOP),
                chunk(DONE),
                b"0\r\n\r\n",
            ]
            await plays(*steps)(call)
        else:
            await asyncio.sleep(seconds)
            await answers(200, COMPLETION, field)(call)

    async def other(call: Call) -> None:
        await asyncio.sleep(seconds)
        await DEFAULTS[role](call)

    return decode if role == "decode" else other


async def main(role: str, seconds: float) -> None:
    engine = Living(role, slowly(role, seconds))
    await engine.start()
    print(engine.url, flush=True)  # noqa: T201 - its parent reads it
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
