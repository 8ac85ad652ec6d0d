"""
``ConnectionPool``: keep-alive HTTP/1.1 to the engines, as an httpx transport.

Theory of operation. Three objects share the work:

    Origin       one address: its idle connections (a stack), and callers waiting for one
    Connection   one socket: writes a request, feeds the answer to the parser; one at a time
    Incoming     one answer on its way from the parser to its reader

A connection goes idle -> exchange -> idle ... -> closed. The exchange ends when the answer's last
byte has been parsed, not when it has been read: what is unread waits in Incoming, and the
connection goes back at once. It goes back only if the engine keeps it open and the whole request
has been written. Closing an answer before its end closes the socket, which is what stops the
engine's work.

Bodies are passed on in the pieces that the socket gave. There is no task, lock or timer for a
piece: silence is watched by one timer for each answer, which is moved only when it fires.
"""

from __future__ import annotations

import asyncio
import collections
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import cast
from urllib.parse import unquote

import httptools
import httpx

_MOST_HEAD = 64 << 10
_MOST_FIELDS = 128
_MOST_UNREAD = 256 << 10
_GRACE = 0.005
_UNIX = "http+unix"
_CLOSED = "the pool is closed"

Fields = Sequence[tuple[bytes, bytes]]
Body = Sequence[bytes | memoryview] | AsyncIterator[bytes]
"""Buffers, which can be written at once and again, or pieces as they are to stand on the wire."""
Timeouts = Mapping[str, float | None]
"""As in httpx's ``extensions["timeout"]``: connect, read, write, pool, in seconds."""


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
        fields, timeouts = request.headers.raw, request.extensions.get("timeout", {})
        body = await _body_of(request)
        incoming = await self.send(request.method, request.url, fields, body, timeouts)
        return httpx.Response(
            incoming.status,
            headers=incoming.fields,
            stream=incoming,
            extensions={"http_version": b"HTTP/1.1"},
        )

    async def send(
        self, method: str, url: httpx.URL, fields: Fields, body: Body, timeouts: Timeouts
    ) -> Incoming:
        """
        The same without the objects around it: an answer whose head is there.

        A body in buffers needs its length among the ``fields``.
        """
        origin = self._origin(url)
        head = _head_of(method, url, fields)
        connection = await origin.take(timeouts)
        if connection.was_used and not isinstance(body, AsyncIterator):
            try:
                return await connection.exchange(method, head, body, timeouts)
            except _Unanswered:
                connection = await origin.take(timeouts, fresh=True)
        try:
            return await connection.exchange(method, head, body, timeouts)
        except _Unanswered as exc:
            raise exc.reason from None

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

    def _origin(self, url: httpx.URL) -> Origin:
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

    async def take(self, timeouts: Timeouts, *, fresh: bool = False) -> Connection:
        """
        A connection for one exchange, a new one if it must be ``fresh``.

        Raises ConnectError, ConnectTimeout, PoolTimeout.
        """
        if self._pool.is_closed:
            raise httpx.ConnectError(_CLOSED)
        if self.idle and not fresh:
            self.drop_idle(time.monotonic() - self._pool.keep_alive)
            if self.idle:
                return self.idle.pop()
        limit = self._pool.max_connections
        if limit is not None and self.count >= limit:
            if self.idle:
                self.idle.popleft().abort()
            else:
                # A place that becomes free stays counted: it is the next one's.
                return await self._wait_in_line(timeouts) or await self._connect(timeouts)
        self.count += 1
        return await self._connect(timeouts)

    async def _wait_in_line(self, timeouts: Timeouts) -> Connection | None:
        """Somebody's connection, or None for a place to open one."""
        turn: asyncio.Future[Connection | None] = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        try:
            async with asyncio.timeout(timeouts.get("pool")):
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

    async def _connect(self, timeouts: Timeouts) -> Connection:
        """Opens a connection in a place that is counted already."""
        loop = asyncio.get_running_loop()
        opening = asyncio.ensure_future(self._open(loop, lambda: Connection(self)))
        self._opening.add(opening)
        try:
            async with asyncio.timeout(timeouts.get("connect")):
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
        elif not self._pass_on(connection):
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


class Connection(asyncio.Protocol):
    """One socket."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._incoming: Incoming | None = None
        self._transport: asyncio.Transport
        self._may_write: asyncio.Future[None] | None = None
        self._is_written = True
        self.is_closed = False
        self.was_used = False
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods, not the base class.
        self._transport = cast(asyncio.Transport, transport)

    async def exchange(self, method: str, head: bytes, body: Body, timeouts: Timeouts) -> Incoming:
        """Writes a request and waits for the head of the answer."""
        if self.is_closed:
            raise _Unanswered(httpx.ReadError("closed before it was used again"))
        silence = timeouts.get("read")
        incoming = self._incoming = Incoming(self, is_head=method == "HEAD", silence=silence)
        try:
            if isinstance(body, AsyncIterator):
                self._is_written = False
                await self._write_pieces(head, body, incoming)
            else:
                self._transport.writelines([head, *body])
            await incoming.head()
        except BaseException:
            await incoming.aclose()
            raise
        return incoming

    async def _write_pieces(
        self, head: bytes, pieces: AsyncIterator[bytes], incoming: Incoming
    ) -> None:
        """As fast as the engine takes them, until it answers."""
        self._transport.write(head)
        async for piece in pieces:
            if incoming.is_settled:
                return
            self._transport.write(piece)
            if self._may_write is not None:
                await self._may_write
        self._is_written = True

    def pause_writing(self) -> None:
        self._may_write = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._may_write is not None and not self._may_write.done():
            self._may_write.set_result(None)
        self._may_write = None

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self.is_closed:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        incoming = self._incoming
        if incoming is None:
            # Nobody asked: whatever it is, the next answer must not be it.
            self.abort()
            return
        try:
            incoming.feed(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            if not incoming.is_complete:
                incoming.fail(httpx.RemoteProtocolError(f"no HTTP: {exc}"))
                self.abort()
                return
            incoming.keeps_open = False
        if incoming.has_head:
            # An answer before the end of the request: nobody reads the rest.
            self.resume_writing()
        if incoming.is_complete:
            self._end_exchange(incoming)
        incoming.wake()

    def _end_exchange(self, incoming: Incoming) -> None:
        self._incoming = None
        self.was_used = True
        written = self._is_written and not self._transport.get_write_buffer_size()
        if incoming.keeps_open and written and not self.is_closed:
            self._origin.give_back(self)
        else:
            self.abort()

    def eof_received(self) -> None:
        # Not later, when all that is left of a request has been written to nobody.
        self.connection_lost(None)
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self._origin.lost(self)
        self.resume_writing()
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            incoming.lost(exc)
            incoming.wake()

    def abort(self) -> None:
        """Closes the socket at once."""
        self.is_closed = True
        self._origin.lost(self)
        self._transport.abort()


class Incoming(httpx.AsyncByteStream):
    """
    An answer, and the callbacks of its parser.

    ``status`` and ``fields`` are there once ``has_head``; the body is read by iterating.
    """

    def __init__(self, connection: Connection, *, is_head: bool, silence: float | None) -> None:
        self._connection = connection
        self._is_head = is_head
        self._silence = silence
        self._deadline = 0.0
        self._watcher: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._pieces: list[bytes] = []
        self._unread = 0
        self._head_size = 0
        self._fields_size = 0
        self._is_late = False
        self._is_paused = False
        self._is_interim = False
        self._error: Exception | None = None
        self._parser = httptools.HttpResponseParser(self)
        # Beside chunks a length is not believed, RFC 9112, section 6.3.
        self._parser.set_dangerous_leniencies(lenient_chunked_length=True)
        self.status = 0
        self.fields: list[tuple[bytes, bytes]] = []
        self.has_head = False
        self.is_complete = False
        self.keeps_open = False

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing more to say to the engine."""
        return self.has_head or self._error is not None

    # From the connection

    def feed(self, data: bytes) -> None:
        if not self.has_head:
            self._head_size += len(data)
        self._parser.feed_data(data)
        if not self.has_head and self._head_size > _MOST_HEAD:
            raise httptools.HttpParserError("head too large")
        if self._unread > _MOST_UNREAD and not (self._is_paused or self.is_complete):
            self._is_paused = True
            self._connection.pause_reading()

    def lost(self, exc: Exception | None) -> None:
        """The connection is gone, which for some answers is the end."""
        if self.has_head and exc is None and not _has_length(self.fields):
            self.is_complete = True
        elif not self._head_size:
            reason = httpx.ReadError(str(exc)) if exc else httpx.RemoteProtocolError("no answer")
            self.fail(_Unanswered(reason))
        else:
            self.fail(httpx.ReadError(str(exc)) if exc else httpx.RemoteProtocolError("cut short"))

    def fail(self, error: Exception) -> None:
        if self._error is None and not self.is_complete:
            self._error = error
            self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # From the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.has_head:
            # A trailer, or more than was asked for.
            return
        if name.lower() == b"transfer-encoding" and value.rstrip(b" ").lower() != b"chunked":
            # What the parser does not take for chunks (with a tab behind it, too) is refused.
            raise httptools.HttpParserError("unknown transfer coding")
        value = value.strip(b" \t")
        self.fields.append((name, value))
        self._fields_size += len(name) + len(value)
        if len(self.fields) > _MOST_FIELDS or self._fields_size > _MOST_HEAD:
            raise httptools.HttpParserError("head too large")

    def on_headers_complete(self) -> None:
        if self.is_complete:
            return
        status = self._parser.get_status_code()
        if status < 100:
            raise httptools.HttpParserError("no status")
        self._is_interim = 100 <= status < 200
        if self._is_interim:
            self.fields = []
            return
        self.status = status
        self.has_head = True
        if self._is_head:
            self.is_complete = True
            # Not kept open: a body that should not be there could not be told from an answer.

    def on_body(self, piece: bytes) -> None:
        if self.is_complete:
            self.keeps_open = False
            return
        self._pieces.append(piece)
        self._unread += len(piece)

    def on_message_begin(self) -> None:
        if self.is_complete:
            # More than was asked for.
            self.keeps_open = False

    def on_message_complete(self) -> None:
        if not self._is_interim and not self.is_complete:
            self.is_complete = True
            self.keeps_open = self._parser.should_keep_alive()

    # From the reader

    async def head(self) -> None:
        """Until the head is there. Raises httpx's exceptions, and _Unanswered."""
        while not self.has_head:
            if self._error is not None:
                raise self._error
            await self._wait()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self._pieces:
            if self.is_complete:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            await self._wait()
        return self._take()

    def _take(self) -> bytes:
        pieces, self._pieces, self._unread = self._pieces, [], 0
        if self._is_paused:
            self._is_paused = False
            self._connection.resume_reading()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def aclose(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        if not self.is_complete and self._error is None:
            self.fail(httpx.ReadError("the answer was closed"))
            self._connection.abort()

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        if self._silence is not None:
            self._deadline = loop.time() + self._silence
            if self._watcher is None:
                self._watcher = loop.call_at(self._deadline, self._watch)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _watch(self) -> None:
        self._watcher = None
        if self._waiter is None or self._waiter.done():
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._deadline:
            self._is_late = False
            self._watcher = loop.call_at(self._deadline, self._watch)
        elif not self._is_late:
            # Something may have come while the loop was busy: it has not been read yet.
            self._is_late = True
            self._watcher = loop.call_later(_GRACE, self._watch)
        else:
            self.fail(httpx.ReadTimeout("silence"))
            self._connection.abort()


class _Unanswered(Exception):
    """The connection ended before the first byte of an answer."""

    def __init__(self, reason: httpx.TransportError) -> None:
        self.reason = reason


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


def _head_of(method: str, url: httpx.URL, fields: Fields) -> bytes:
    lines = [b"%b %b HTTP/1.1" % (method.encode(), url.raw_path)]
    lines += [b"%b: %b" % field for field in fields]
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


def _has_length(fields: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the end of a body shows before the connection's end."""
    return any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in fields)
