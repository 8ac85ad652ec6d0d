"""
Both ends of a wire: servers that do what a test says, and connections without a socket.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import h11
import httpx

from epd_proxy.connection import Body, Connection, Fields, Incoming, Limits
from epd_proxy.pool import ConnectionPool, Opener, head_of

LIMIT = 10
"""Seconds after which a test has hung."""

EMPTY = "<ConnectionPool 0 connections, 0 idle, 0 waiting>"

Script = Callable[["Peer"], Awaitable[None]]
"""What a server does with one connection; it ends when the caller closes."""


@dataclass
class Request:
    """What a caller asked, in h11's reading of it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


class Peer(asyncio.Protocol):
    """The server's side of one connection."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._changed = asyncio.Event()
        self._may_write = asyncio.Event()
        self.transport: asyncio.Transport
        self.received = bytearray()
        self.count = 0
        self.is_gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._may_write.set()
        self._server.welcome(self)

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.count += len(data)
        self._changed.set()

    def eof_received(self) -> None:
        self.is_gone = True
        self._changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_gone = True
        self._changed.set()
        self._may_write.set()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Until something holds that a byte or an end can bring about."""
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    async def gone(self) -> None:
        await self.until(lambda: self.is_gone)

    async def request(self) -> Request:
        """The next whole request. Raises EOFError if the caller closes instead."""
        parser = h11.Connection(h11.SERVER)
        head, body = None, bytearray()
        while not isinstance(event := parser.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                await self.until(lambda: bool(self.received) or self.is_gone)
                if not self.received:
                    raise EOFError
                parser.receive_data(bytes(self.received))
                self.received.clear()
        self.received[:0] = parser.trailing_data[0]
        assert head is not None
        headers = {name.decode(): value.decode() for name, value in head.headers}
        return Request(head.method.decode(), head.target.decode(), headers, bytes(body))

    def send(self, data: bytes) -> None:
        self.transport.write(data)

    async def drain(self) -> None:
        await self._may_write.wait()

    def close(self) -> None:
        self.transport.close()

    def reset(self) -> None:
        """Closes with an RST."""
        linger = struct.pack("ii", 1, 0)
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.transport.abort()


class Server:
    """A listener and the connections that it has had, in their order."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._tasks: list[asyncio.Task[None]] = []
        self._arrived = asyncio.Event()
        self.peers: list[Peer] = []
        self.url = ""

    def welcome(self, peer: Peer) -> None:
        self.peers.append(peer)
        self._tasks.append(asyncio.ensure_future(self._serve(peer)))
        self._arrived.set()

    async def _serve(self, peer: Peer) -> None:
        try:
            await self._script(peer)
        except EOFError:
            peer.close()

    async def peer(self, number: int) -> Peer:
        """The connection of that number, from 0, once it is there."""
        while len(self.peers) <= number:
            self._arrived.clear()
            await self._arrived.wait()
        return self.peers[number]

    async def all_gone(self) -> None:
        """Until every connection has been closed by the caller, or has been closed here."""
        for peer in self.peers:
            peer.transport.resume_reading()
            await peer.gone()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        done = await asyncio.gather(*self._tasks, return_exceptions=True)
        for peer in self.peers:
            peer.transport.abort()
        for result in done:
            if isinstance(result, Exception):
                raise result


@asynccontextmanager
async def serving(
    script: Script, *, path: str | None = None, context: ssl.SSLContext | None = None
) -> AsyncIterator[Server]:
    """
    A server on a port, or on a socket's path. A test is over within LIMIT.

    At the end every connection must be closed, or the test hangs, which is a failure.
    """
    server = Server(script)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(LIMIT):
        if path is None:
            listener = await loop.create_server(
                lambda: Peer(server), "127.0.0.1", 0, ssl=context, backlog=500
            )
            port = listener.sockets[0].getsockname()[1]
            server.url = f"https://localhost:{port}/" if context else f"http://127.0.0.1:{port}/"
        else:
            listener = await loop.create_unix_server(lambda: Peer(server), path)
        try:
            yield server
            await server.all_gone()
        finally:
            listener.close()
            await server.stop()


@asynccontextmanager
async def calling(pool: ConnectionPool) -> AsyncIterator[httpx.AsyncClient]:
    """A plain client, which leaves nothing in its pool."""
    async with httpx.AsyncClient(transport=pool, timeout=LIMIT) as client:
        yield client
    assert repr(pool) == EMPTY


async def sent(
    pool: ConnectionPool,
    method: str,
    url: httpx.URL,
    fields: Fields,
    body: Body,
    timeouts: Mapping[str, float | None],
) -> Incoming:
    """An answer whose head is there."""
    head = head_of(method, url, fields)
    return await pool.send(
        pool.origin(url), head, body, Limits.of(timeouts), is_head=method == "HEAD"
    )


async def settled(count: Callable[[], int]) -> int:
    """A number once it has stood still for as long as loopback could need."""
    same, last = 0, -1
    while same < 20:
        await asyncio.sleep(0.005)
        same, last = (same + 1, last) if count() == last else (0, count())
    return last


class Wire(asyncio.Transport):
    """A transport without a socket: tells what was done to it."""

    def __init__(self, connection: Connection, script: Sequence[bytes] | None) -> None:
        super().__init__()
        self._script = script
        self.connection = connection
        self.written = bytearray()
        self.is_aborted = False
        self.was_kept = False
        self.is_slow = False
        connection.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data
        if self.is_slow:
            self.connection.pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.written += b"".join(list_of_data)
        if self._script is not None:
            asyncio.get_running_loop().call_soon(self._play, self._script)

    def _play(self, script: Sequence[bytes]) -> None:
        for piece in script:
            if not self.is_aborted:
                self.connection.data_received(piece)
        self.was_kept = self.connection.was_used and not self.is_aborted
        self.end()

    def end(self, exc: Exception | None = None) -> None:
        """What happens when the other side has closed."""
        if not self.is_aborted:
            self.connection.connection_lost(exc)

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        if not self.is_aborted:
            self.is_aborted = True
            asyncio.get_running_loop().call_soon(self.connection.connection_lost, None)


class WiredPool(ConnectionPool):
    """
    A pool whose connections have no sockets: ``wires``, in the order of their opening.

    Each answers with the ``script``, in its pieces, and closes; None: a test moves it by hand.
    """

    def __init__(
        self,
        script: Sequence[bytes] | None = None,
        *,
        max_connections: int | None = None,
        keep_alive: float = 60,
    ) -> None:
        super().__init__(keep_alive=keep_alive, max_connections=max_connections)
        self._script = script
        self.is_slow = False
        self.wires: list[Wire] = []

    def _opener(self, scheme: str, host: str, port: int | None) -> Opener:
        async def connect(
            _: asyncio.AbstractEventLoop, factory: Callable[[], Connection]
        ) -> tuple[asyncio.BaseTransport, Connection]:
            wire = Wire(factory(), self._script)
            wire.is_slow = self.is_slow
            self.wires.append(wire)
            return wire, wire.connection

        return connect


@asynccontextmanager
async def wiring(pool: WiredPool) -> AsyncIterator[WiredPool]:
    """The pool for the time of a test, which is over within LIMIT and leaves nothing."""
    async with asyncio.timeout(LIMIT):
        yield pool
        await pool.aclose()
    assert repr(pool) == EMPTY


async def turns(holds: Callable[[], bool]) -> None:
    """Turns of the event loop, until something holds that they bring about."""
    while not holds():  # noqa: ASYNC110 - the pool's own steps set no event
        await asyncio.sleep(0)


async def wired(pool: WiredPool, number: int) -> Wire:
    """The wire of that number, once it has a request."""
    await turns(lambda: len(pool.wires) > number and bool(pool.wires[number].written))
    return pool.wires[number]
