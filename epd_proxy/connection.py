"""
One HTTP/1.1 connection to an engine: a request out, its answer in, one at a time.

``Connection`` is the socket, ``Incoming`` one answer on its way from the parser to its reader. An
exchange ends when the answer's last byte has been parsed, not when it has been read: what is unread
waits in ``Incoming``, and the connection goes home to its pool at once. Closing an answer before
its end closes the socket, which is what stops the engine's work.

Bodies are passed on in the pieces that the socket gave. There is no task, lock or timer for a
piece, nor for a call: silence is watched by one timer a connection, which outlives the exchanges
and is moved only when it fires.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias, cast

import httptools
import httpx

_MOST_HEAD = 64 << 10
_MOST_FIELDS = 128
_MOST_UNREAD = 256 << 10
_GRACE = 0.005

Fields: TypeAlias = list[tuple[bytes, bytes]]
Body: TypeAlias = Sequence[bytes | memoryview] | AsyncIterator[bytes]
"""Buffers, which can be written at once and again, or pieces as they are to stand on the wire."""


class Limits(NamedTuple):
    """How long each step of an exchange may take, in seconds; None: for ever."""

    connect: float | None = None
    pool: float | None = None
    """Until a connection is free."""
    write: float | None = None
    """Until the engine takes a piece of the request."""
    head: float | None = None
    """Until the head of the answer."""
    idle: float | None = None
    """Between two of its bytes."""

    @classmethod
    def of(cls, timeouts: Mapping[str, float | None]) -> Limits:
        """From httpx's ``extensions["timeout"]``."""
        get = timeouts.get
        return cls(get("connect"), get("pool"), get("write"), get("read"), get("read"))


class Home(Protocol):
    """Where a connection belongs between exchanges."""

    def give_back(self, connection: Connection) -> None:
        """After an exchange, if the connection can serve another."""
        ...

    def lost(self, connection: Connection) -> None:
        """The connection is closed, by whomever."""
        ...


class Unanswered(Exception):
    """The connection ended before the first byte of an answer."""

    def __init__(self, reason: httpx.TransportError) -> None:
        self.reason = reason


class Connection(asyncio.Protocol):
    """One socket."""

    __slots__ = (
        "_feed",
        "_home",
        "_incoming",
        "_is_written",
        "_may_write",
        "_parser",
        "_transport",
        "_watcher",
        "_watches_for",
        "idle_since",
        "is_closed",
        "loop",
        "was_used",
    )

    def __init__(self, home: Home) -> None:
        self._home = home
        self.loop = asyncio.get_running_loop()
        self._parser = parser = httptools.HttpResponseParser(self)
        # Beside chunks a length is not believed, RFC 9112, section 6.3.
        parser.set_dangerous_leniencies(lenient_chunked_length=True)
        self._feed = parser.feed_data
        self._incoming: Incoming | None = None
        self._transport: asyncio.Transport
        self._may_write: asyncio.Future[None] | None = None
        self._is_written = True
        self._watcher: asyncio.TimerHandle | None = None
        self._watches_for = 0.0
        self.is_closed = False
        self.was_used = False
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods, not the base class.
        self._transport = cast(asyncio.Transport, transport)

    async def exchange(
        self, head: bytes, body: Body, limits: Limits, *, is_head: bool = False
    ) -> Incoming:
        """
        Writes a request and waits for the head of the answer.

        ``is_head``: the request is a HEAD, whose answer has no body.
        """
        if self.is_closed:
            raise Unanswered(httpx.ReadError("closed before it was used again"))
        incoming = self._incoming = Incoming(self, limits, is_head)
        try:
            if isinstance(body, (list, tuple)):
                self._transport.writelines((head, *body))
            else:
                assert isinstance(body, AsyncIterator)
                self._is_written = False
                await self._write_pieces(head, body, incoming, limits.write)
            while not incoming.has_head:
                await incoming.more()
        except BaseException:
            await incoming.aclose()
            raise
        return incoming

    async def _write_pieces(
        self, head: bytes, pieces: AsyncIterator[bytes], incoming: Incoming, limit: float | None
    ) -> None:
        """As fast as the engine takes them, until it answers."""
        self._transport.write(head)
        async for piece in pieces:
            if incoming.is_settled:
                return
            self._transport.write(piece)
            if self._may_write is not None:
                try:
                    async with asyncio.timeout(limit):
                        await self._may_write
                except TimeoutError:
                    raise httpx.WriteTimeout("the request was not taken in time") from None
        self._is_written = True

    def pause_writing(self) -> None:
        self._may_write = self.loop.create_future()

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
            if not incoming.has_head:
                incoming.head_size += len(data)
            self._feed(data)
            if not incoming.has_head and incoming.head_size > _MOST_HEAD:
                raise httptools.HttpParserError("head too large")
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            if not incoming.is_complete:
                incoming.fail(httpx.RemoteProtocolError(f"no HTTP: {exc}"))
                self.abort()
                return
            incoming.keeps_open = False
        if self._may_write is not None and incoming.has_head:
            # An answer before the end of the request: nobody reads the rest.
            self.resume_writing()
        if incoming.is_complete:
            self._end_exchange(incoming)
        elif incoming.unread > _MOST_UNREAD:
            incoming.hold_back()
        incoming.wake()

    # From the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        incoming = self._incoming
        assert incoming is not None
        if incoming.has_head:
            # A trailer, or more than was asked for.
            return
        name = name.lower()
        if name == b"transfer-encoding" and value.rstrip(b" ").lower() != b"chunked":
            # What the parser does not take for chunks (with a tab behind it, too) is refused.
            raise httptools.HttpParserError("unknown transfer coding")
        incoming.fields.append((name, value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        incoming = self._incoming
        assert incoming is not None
        if not incoming.is_complete:
            incoming.begin(self._parser.get_status_code())

    def on_body(self, piece: bytes) -> None:
        incoming = self._incoming
        assert incoming is not None
        incoming.put(piece)

    def on_message_begin(self) -> None:
        incoming = self._incoming
        assert incoming is not None
        if incoming.is_complete:
            # More than was asked for.
            incoming.keeps_open = False

    def on_message_complete(self) -> None:
        incoming = self._incoming
        assert incoming is not None
        if not incoming.is_interim and not incoming.is_complete:
            incoming.is_complete = True
            incoming.keeps_open = self._parser.should_keep_alive()

    def _end_exchange(self, incoming: Incoming) -> None:
        self._incoming = None
        self.was_used = True
        written = self._is_written and not self._transport.get_write_buffer_size()
        if incoming.keeps_open and written and not self.is_closed:
            self._home.give_back(self)
        else:
            self.abort()

    def watch(self, deadline: float) -> None:
        """Wakes up at ``deadline``, or did so before, to see whether the engine is silent."""
        if self._watcher is None or deadline < self._watches_for:
            if self._watcher is not None:
                self._watcher.cancel()
            self._watches_for = deadline
            self._watcher = self.loop.call_at(deadline, self._look)

    def _look(self) -> None:
        self._watcher = None
        if self._incoming is not None and (deadline := self._incoming.silent_until()) is not None:
            self.watch(deadline)

    def eof_received(self) -> None:
        # Not later, when all that is left of a request has been written to nobody.
        self.connection_lost(None)
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._close()
        self.resume_writing()
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            incoming.lost(exc)
            incoming.wake()

    def abort(self) -> None:
        """Closes the socket at once."""
        self._close()
        self._transport.abort()

    def _close(self) -> None:
        self.is_closed = True
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        self._home.lost(self)


class Incoming(httpx.AsyncByteStream):
    """
    An answer on its way from its connection to its reader.

    ``status`` and ``fields`` (names in lower case) are there once ``has_head``; the body is read by
    iterating.
    """

    __slots__ = (
        "_connection",
        "_deadline",
        "_error",
        "_is_late",
        "_is_paused",
        "_limits",
        "_pieces",
        "_waiter",
        "fields",
        "has_head",
        "head_size",
        "is_complete",
        "is_head",
        "is_interim",
        "keeps_open",
        "status",
        "unread",
    )

    def __init__(self, connection: Connection, limits: Limits, is_head: bool) -> None:
        self._connection = connection
        self._limits = limits
        self._deadline = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self._pieces: list[bytes] = []
        self.unread = 0
        """Bytes of the body that nobody has taken."""
        self._is_late = False
        self._is_paused = False
        self._error: Exception | None = None
        self.is_head = is_head
        self.is_interim = False
        self.head_size = 0
        """Bytes in which the head was, some of which may be the body's."""
        self.status = 0
        self.fields: Fields = []
        self.has_head = False
        self.is_complete = False
        self.keeps_open = False

    # From the connection

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing more to say to the engine."""
        return self.has_head or self._error is not None

    def begin(self, status: int) -> None:
        """The head is there. Raises HttpParserError if it is none that can be read."""
        if status < 100:
            raise httptools.HttpParserError("no status")
        fields = self.fields
        if len(fields) > _MOST_FIELDS or (
            self.head_size > _MOST_HEAD and sum(map(_length, fields)) > _MOST_HEAD
        ):
            raise httptools.HttpParserError("head too large")
        self.is_interim = status < 200
        if self.is_interim:
            self.fields = []
            return
        self.status = status
        self.has_head = True
        if self.is_head:
            self.is_complete = True
            # Not kept open: a body that should not be there could not be told from an answer.

    def put(self, piece: bytes) -> None:
        """A piece of the body."""
        if self.is_complete:
            self.keeps_open = False
            return
        self._pieces.append(piece)
        self.unread += len(piece)

    def hold_back(self) -> None:
        """Where the reader does not keep pace, neither shall the engine."""
        self._is_paused = True
        self._connection.pause_reading()

    def lost(self, exc: Exception | None) -> None:
        """The connection is gone, which for some answers is the end."""
        if self.has_head and exc is None and not _has_length(self.fields):
            self.is_complete = True
        elif not self.head_size:
            reason = httpx.ReadError(str(exc)) if exc else httpx.RemoteProtocolError("no answer")
            self.fail(Unanswered(reason))
        else:
            self.fail(httpx.ReadError(str(exc)) if exc else httpx.RemoteProtocolError("cut short"))

    def fail(self, error: Exception) -> None:
        if self._error is None and not self.is_complete:
            self._error = error
            self.wake()

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def silent_until(self) -> float | None:
        """When to look again; None if nobody waits, or if the engine was silent for too long."""
        if self._waiter is None or self._waiter.done() or not self._deadline:
            return None
        now = self._connection.loop.time()
        if now < self._deadline:
            self._is_late = False
            return self._deadline
        if not self._is_late:
            # Something may have come while the loop was busy: it has not been read yet.
            self._is_late = True
            return now + _GRACE
        self.fail(httpx.ReadTimeout("silence"))
        self._connection.abort()
        return None

    # From the reader

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self._pieces:
            if self.is_complete:
                raise StopAsyncIteration
            await self.more()
        return self.take()

    def take(self) -> bytes:
        """What has come of the body and was not read yet; perhaps nothing."""
        pieces = self._pieces
        if not pieces:
            return b""
        self._pieces, self.unread = [], 0
        if self._is_paused:
            self._is_paused = False
            self._connection.resume_reading()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def more(self) -> asyncio.Future[None]:
        """To await until something has come. Raises httpx's exceptions, and Unanswered."""
        if self._error is not None:
            raise self._error
        connection, limits = self._connection, self._limits
        waiter = self._waiter = connection.loop.create_future()
        silence = limits.idle if self.has_head else limits.head
        if silence is None:
            self._deadline = 0.0
        else:
            self._deadline = deadline = connection.loop.time() + silence
            connection.watch(deadline)
        return waiter

    async def aclose(self) -> None:
        if not self.is_complete and self._error is None:
            self.fail(httpx.ReadError("the answer was closed"))
            self._connection.abort()


def _length(field: tuple[bytes, bytes]) -> int:
    return len(field[0]) + len(field[1])


def _has_length(fields: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the end of a body shows before the connection's end."""
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in fields)
