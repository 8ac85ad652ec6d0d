"""
``ConnectionPool``: keep-alive connections to any number of engines, as an httpx transport.

An ``Origin`` is one address: its idle connections (a stack), and callers waiting for one. A
connection goes idle -> exchange -> idle ... -> closed; it comes back only if the engine keeps it
open and the whole request has been written.
"""

from __future__ import annotations

import asyncio
import collections
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from urllib.parse import unquote

import httpx

from epd_proxy.connection import Body, Connection, Fields, Incoming, Limits, Unanswered

_UNIX = "http+unix"
_CLOSED = "the pool is closed"


def _never() -> bool:
    return False


class ConnectionPool(httpx.AsyncBaseTransport):
    """
    Connections to any number of origins, of ``http``, ``https`` and ``http+unix://%2Fpath``.
    Hosts are put into lower case by httpx, so write a capital in a path of a socket as ``%41``.

    Parameters:

    * **keep_alive** - seconds for which an idle connection may be used again; 0: never.
    * **max_connections** - to one origin at most; None: no limit. Who finds none waits in line.
    * **ssl_context** - for https; made when it is first needed.

    A request that failed on a connection used before, without a byte of an answer, is sent once
    more on a new one, since the engine may just have closed it. Raises httpx's exceptions.
    """

    def __init__(
        self,
        *,
        keep_alive: float = 2.5,
        max_connections: int | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self.keep_alive = keep_alive
        self.max_connections = max_connections
        self.is_closed = False
        self._ssl_context = ssl_context
        self._origins: dict[tuple[str, str, int | None], Origin] = {}
        self._sweeper: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        idle = sum(len(origin.idle) for origin in self._origins.values())
        count = sum(origin.count for origin in self._origins.values())
        waiting = sum(len(origin.waiting) for origin in self._origins.values())
        return f"<ConnectionPool {count} connections, {idle} idle, {waiting} waiting>"

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        head = head_of(request.method, request.url, request.headers.raw)
        incoming = await self.send(
            self.origin(request.url),
            head,
            await _body_of(request),
            Limits.of(request.extensions.get("timeout", {})),
            is_head=request.method == "HEAD",
        )
        return httpx.Response(
            incoming.status,
            headers=incoming.fields,
            stream=incoming,
            extensions={"http_version": b"HTTP/1.1"},
        )

    async def send(
        self,
        origin: Origin,
        head: bytes,
        body: Body,
        limits: Limits,
        *,
        is_head: bool = False,
        is_gone: Callable[[], bool] = _never,
    ) -> Incoming:
        """
        The same without the objects around it: an answer whose head is there.

        ``head`` is as ``head_of`` writes it; a body in buffers needs its length in it.
        ``is_gone`` is asked just before it is sent, and whether it may be sent no more.
        """
        connection = origin.idle_connection() or await origin.take(limits)
        while True:
            if is_gone():
                origin.give_back(connection)
                raise httpx.ConnectError("the instance has been removed")
            try:
                return await connection.exchange(head, body, limits, is_head=is_head)
            except Unanswered as exc:
                if not connection.was_used or isinstance(body, AsyncIterator):
                    raise exc.reason from None
            connection = await origin.take(limits, fresh=True)

    async def aclose(self) -> None:
        """Closes every connection, those in use too."""
        self.is_closed = True
        for origin in self._origins.values():
            origin.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    def sweep_later(self) -> None:
        """One timer for all idle connections, while there are any."""
        if self._sweeper is None:
            loop = asyncio.get_running_loop()
            self._sweeper = loop.call_later(self.keep_alive, self._sweep)

    def _sweep(self) -> None:
        self._sweeper = None
        oldest = time.monotonic() - self.keep_alive
        for origin in self._origins.values():
            origin.drop_idle(oldest)
        if any(origin.idle for origin in self._origins.values()):
            self.sweep_later()

    def origin(self, url: httpx.URL) -> Origin:
        """Where requests for ``url`` go. Raises UnsupportedProtocol."""
        key = (url.scheme, url.host, url.port)
        origin = self._origins.get(key)
        if origin is None:
            origin = self._origins[key] = Origin(self, self._opener(*key))
        return origin

    def _opener(self, scheme: str, host: str, port: int | None) -> Opener:
        if scheme == _UNIX:
            path = unquote(host)
            return lambda loop, factory: loop.create_unix_connection(factory, path)
        if scheme == "https":
            context = self._ssl_context or httpx.create_ssl_context(trust_env=False)
            self._ssl_context = context
            return lambda loop, factory: loop.create_connection(
                factory, host, port or 443, ssl=context
            )
        if scheme == "http":
            return lambda loop, factory: loop.create_connection(factory, host, port or 80)
        raise httpx.UnsupportedProtocol(f"cannot connect by {scheme!r}")


Opener = Callable[
    [asyncio.AbstractEventLoop, Callable[[], "Connection"]],
    Awaitable[tuple[asyncio.BaseTransport, "Connection"]],
]


class Origin:
    """
    The connections to one address.

    ``idle`` holds the oldest first; the youngest is used first, so that the others can grow old.
    ``count`` is all of them, those being opened too.
    """

    def __init__(self, pool: ConnectionPool, opener: Opener) -> None:
        self._pool = pool
        self._open = opener
        self.count = 0
        self.idle: collections.deque[Connection] = collections.deque()
        self.waiting: collections.deque[asyncio.Future[Connection | None]] = collections.deque()
        self._all: set[Connection] = set()
        self._opening: set[asyncio.Future[tuple[asyncio.BaseTransport, Connection]]] = set()

    def idle_connection(self) -> Connection | None:
        """One that can be used at once."""
        if not self.idle:
            return None
        oldest = time.monotonic() - self._pool.keep_alive
        if self.idle[-1].idle_since < oldest:
            self.drop_idle(oldest)
            return None
        return self.idle.pop()

    async def take(self, limits: Limits, *, fresh: bool = False) -> Connection:
        """
        A connection for one exchange, a new one if it must be ``fresh``.

        Raises ConnectError, ConnectTimeout, PoolTimeout.
        """
        if self._pool.is_closed:
            raise httpx.ConnectError(_CLOSED)
        if not fresh and (idle := self.idle_connection()):
            return idle
        limit = self._pool.max_connections
        if limit is not None and self.count >= limit:
            if self.idle:
                self.idle.popleft().abort()
            else:
                # A place that becomes free stays counted: it is the next one's.
                return await self._wait_in_line(limits) or await self._connect(limits)
        self.count += 1
        return await self._connect(limits)

    async def _wait_in_line(self, limits: Limits) -> Connection | None:
        """Somebody's connection, or None for a place to open one."""
        turn: asyncio.Future[Connection | None] = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        try:
            async with asyncio.timeout(limits.pool):
                return await turn
        except BaseException as exc:
            if turn in self.waiting:
                self.waiting.remove(turn)
            elif not turn.cancelled() and turn.exception() is None:
                # It was our turn just as we gave up.
                connection = turn.result()
                if connection is None:
                    self._free_place()
                else:
                    self.give_back(connection)
            if isinstance(exc, TimeoutError):
                raise httpx.PoolTimeout("no connection became free in time") from None
            raise

    async def _connect(self, limits: Limits) -> Connection:
        """Opens a connection in a place that is counted already."""
        loop = asyncio.get_running_loop()
        opening = asyncio.ensure_future(self._open(loop, lambda: Connection(self)))
        self._opening.add(opening)
        try:
            async with asyncio.timeout(limits.connect):
                _, connection = await opening
        except BaseException as exc:
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                # It was open just as we gave up.
                opening.result()[1].abort()
            self._free_place()
            raise self._reason(exc) from None
        finally:
            self._opening.discard(opening)
        self._all.add(connection)
        return connection

    def _reason(self, exc: BaseException) -> BaseException:
        if isinstance(exc, TimeoutError):
            return httpx.ConnectTimeout("no connection in time")
        if isinstance(exc, OSError):
            return httpx.ConnectError(str(exc))
        task = asyncio.current_task()
        if isinstance(exc, asyncio.CancelledError) and not (task and task.cancelling()):
            # It was not the caller who gave up.
            return httpx.ConnectError(_CLOSED)
        return exc

    def give_back(self, connection: Connection) -> None:
        """After an exchange, if the connection can serve another."""
        if not self._pool.keep_alive or self._pool.is_closed or connection.is_closed:
            connection.abort()
        elif not self.waiting or not self._pass_on(connection):
            connection.idle_since = time.monotonic()
            self.idle.append(connection)
            self._pool.sweep_later()

    def lost(self, connection: Connection) -> None:
        """The connection is closed, by whomever."""
        if connection in self._all:
            self._all.discard(connection)
            if connection in self.idle:
                self.idle.remove(connection)
            self._free_place()

    def _free_place(self) -> None:
        if not self._pass_on(None):
            self.count -= 1

    def _pass_on(self, connection: Connection | None) -> bool:
        """To the next in line, a connection or the place of one; whether there was somebody."""
        while self.waiting:
            turn = self.waiting.popleft()
            if not turn.done():
                turn.set_result(connection)
                return True
        return False

    def drop_idle(self, oldest: float) -> None:
        """Closes what has been idle since before ``oldest``."""
        while self.idle and self.idle[0].idle_since < oldest:
            self.idle.popleft().abort()

    def close(self) -> None:
        waiting, self.waiting = self.waiting, collections.deque()
        for turn in waiting:
            if not turn.done():
                turn.set_exception(httpx.ConnectError(_CLOSED))
        for opening in self._opening:
            opening.cancel()
        for connection in list(self._all):
            connection.abort()


async def _body_of(request: httpx.Request) -> Body:
    stream = request.stream
    buffers: Sequence[bytes | memoryview] | None = getattr(stream, "buffers", None)
    if buffers is not None:
        return buffers
    assert isinstance(stream, httpx.AsyncByteStream)
    if isinstance(stream, httpx.ByteStream):
        return [chunk async for chunk in stream]
    if "transfer-encoding" in request.headers:
        return _chunked(stream)
    return aiter(stream)


async def _chunked(stream: httpx.AsyncByteStream) -> AsyncIterator[bytes]:
    async for piece in stream:
        if piece:
            yield b"%x\r\n%b\r\n" % (len(piece), piece)
    yield b"0\r\n\r\n"


def head_of(method: str, url: httpx.URL, fields: Fields) -> bytes:
    """A request's head as it stands on the wire."""
    lines = [b"%b %b HTTP/1.1" % (method.encode(), url.raw_path)]
    lines += [b"%b: %b" % field for field in fields]
    lines.append(b"\r\n")
    return b"\r\n".join(lines)
