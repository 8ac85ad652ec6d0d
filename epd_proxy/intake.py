"""
uvicorn's HTTP/1.1 with a short way in and out, and the word that a caller has left.

uvicorn copies a large body four times: socket to ``bytes``, the parser's slice of them, the
request's ``bytearray``, ``bytes`` of that. Here one that is large, of known length and not all
there with its head goes from the socket into the very ``bytes`` that the app gets, in one
``http.request``. One that takes longer is announced by empty ones, so that an app can tell slow
from dead. Meanwhile the transport has another protocol, ``_Body``; the parser does not see what
comes past it, so the next request gets a new one.

The app finds a ``Caller`` in its scope, which has a small body, takes a whole answer, and knows
when the connection has ended or is half closed. What ASGI wants for each takes several times as
long: a message with a copy of the body, two messages and two writes, a task that waits for one.

All else is left to uvicorn: bodies in chunks, pipelining, ``Expect``, keep-alive, shutdown, answers
before the body has come. What is used of it, the same from 0.32.1 to 0.54: ``parser``, ``headers``,
``flow``, ``loop``, ``pipeline``, ``cycle`` and ``on_message_complete`` of the protocol; what the
cycle is made of, ``body``, ``more_body``, ``response_started``, ``response_complete`` and
``disconnected``; ``STATUS_LINE``.

CPU time of a request to a bare app: with 1 MB, uvicorn 890 us, this 610, this with ``keep_memory``
290 (uvicorn with it 490); with 700 bytes, uvicorn 70, this 60.
"""

from __future__ import annotations

import asyncio
import ctypes
from typing import TYPE_CHECKING, Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from epd_proxy.asgi import CALLER, Caller
from epd_proxy.errors import RawHeaders

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_KEPT = 32 << 20
_PIECE = 64 << 10

# A `bytes` that is written to before anyone else has it, as C code makes one. Unlike a `bytearray`
# it is not zeroed first: that saves 60 us a MB, and a length that is only claimed takes no memory.
_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_address_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(
    ("PyBytes_AsString", ctypes.pythonapi)
)
_view_of = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_WRITABLE = 0x200

_BODILESS = frozenset({204, 304})


def keep_memory() -> None:
    """
    Lets glibc keep what a body leaves behind for the next one. Elsewhere it does nothing.

    Otherwise the pages go back to the system after each body and come again one fault at a time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            mallopt(parameter, _KEPT)


class IntakeProtocol(HttpToolsProtocol):
    """For ``uvicorn.run(http=...)``."""

    smallest: ClassVar[int] = 64 << 10
    """Bytes from which a body takes the short way."""
    largest: ClassVar[int] = 256 << 20
    """Bytes up to which it does. Memory is taken as they come, not because they are announced."""

    interval: ClassVar[float] = 1.0
    """Seconds after which the app gets an empty message if the body has gone on."""

    _seen: RequestResponseCycle | None = None
    _callers: tuple[Caller, ...] = ()
    """Of the requests that wait for their answers: more than one where they are pipelined."""

    def data_received(self, data: bytes | memoryview) -> None:
        super().data_received(data)  # type: ignore[arg-type]  # the parser takes any buffer
        cycle = self.cycle
        if cycle is not self._seen:
            # A head has come. The app's task has been made, but has not run.
            waiting = self._callers if self._seen and not self._seen.response_complete else ()
            self._seen = cycle
            caller = _Caller(self)
            self._callers = (*waiting, caller)
            scope: dict[str, Any] = cycle.scope  # type: ignore[assignment]
            scope[CALLER] = caller
            if cycle.more_body:
                self._take(cycle)

    def eof_received(self) -> None:
        """Half a close is a whole one, also where the answer is stuck half-way to the caller."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            # uvicorn learns of it a moment later, and would complain of half an answer.
            self.cycle.disconnected = True
            self._leave()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._leave()

    def _leave(self) -> None:
        callers, self._callers = self._callers, ()
        for caller in callers:
            caller.leave()

    def _take(self, cycle: RequestResponseCycle) -> None:
        # The parser has checked that it is a number, and that there are no chunks beside it.
        length = int(dict(self.headers).get(b"content-length", 0))
        if self.smallest <= length <= self.largest and not self.pipeline:
            # The app's first `receive` goes on reading.
            self.flow.pause_reading()
            self.transport.set_protocol(_Body(self, cycle, length))

    def body_complete(self) -> None:
        """The body has come past the parser, which still waits for it."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.on_message_complete()


class _Caller(Caller):
    """Who waits for the answer to one request."""

    __slots__ = ("_protocol",)

    def __init__(self, protocol: IntakeProtocol) -> None:
        super().__init__(protocol.loop)
        self._protocol = protocol

    def body(self) -> bytes | None:
        cycle = self._protocol.cycle
        if cycle.scope.get(CALLER) is not self or cycle.more_body or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        cycle.flow.resume_reading()
        return body

    def answer(self, status: int, headers: RawHeaders, body: bytes) -> bool:
        protocol = self._protocol
        cycle = protocol.cycle
        lines = b"".join([b"%b: %b\r\n" % field for field in headers])
        if (
            # Others wait behind it, it has nobody any more, or it has begun in another way.
            cycle.scope.get(CALLER) is not self
            or cycle.disconnected
            or cycle.response_started
            or cycle.flow.write_paused
            # Something else is to go out with it.
            or cycle.default_headers
            or cycle.access_log
            or not cycle.keep_alive
            # Not with this body.
            or cycle.scope["method"] == "HEAD"
            or status in _BODILESS
        ):
            return False
        if not lines.count(b"\r") == lines.count(b"\n") == len(headers):
            raise ValueError("a header holds a line break")
        head = b"%b%b\r\n" % (STATUS_LINE[status], lines)
        if len(body) <= _PIECE:
            protocol.transport.write(head + body)
        else:
            protocol.transport.writelines((head, body))
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        cycle.on_response()
        return True


class _Body(asyncio.BufferedProtocol):
    """A body on its way from the socket to the app."""

    def __init__(self, protocol: IntakeProtocol, cycle: RequestResponseCycle, length: int) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self._content: bytes = _new_bytes(None, length)
        self._view: memoryview = _view_of(_address_of(self._content), length, _WRITABLE)
        # What came with the head is not for the app yet.
        self._parsed = self.filled = len(cycle.body)
        self._view[: self.filled] = cycle.body
        cycle.body = bytearray()
        cycle.message_event.clear()
        self._next_message = protocol.loop.time() + protocol.interval

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self.filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self.filled += nbytes
        if self._cycle.response_complete:
            self._give_back()
        elif self.filled == len(self._view):
            self._protocol.transport.set_protocol(self._protocol)
            # `receive` makes `bytes` of it, which of bytes is no copy.
            self._cycle.body = self._content  # type: ignore[assignment]
            self._forget()
            self._protocol.body_complete()
        elif (now := self._protocol.loop.time()) >= self._next_message:
            self._next_message = now + self._protocol.interval
            self._cycle.message_event.set()

    def _give_back(self) -> None:
        """The app has answered already: the rest is for uvicorn to throw away."""
        self._protocol.transport.set_protocol(self._protocol)
        for start in range(self._parsed, self.filled, _PIECE):
            self._protocol.data_received(self._view[start : min(start + _PIECE, self.filled)])
        self._forget()

    def _forget(self) -> None:
        # uvloop remembers the last buffered protocol.
        self._content, self._view = b"", memoryview(b"")

    def eof_received(self) -> None:
        self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()
