"""
One HTTP exchange on top of ASGI: read the body with a cap, answer once, know what has been sent.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from epd_proxy.errors import BodyTimeout, BodyTooLarge, ProxyError, RawHeaders, RequestError
from epd_proxy.inflate import Inflater

_NUMBER = re.compile(r"[0-9]{0,9}\.?[0-9]{1,9}(?:[eE][+-]?[0-9]{1,3})?", re.ASCII)
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def local_path(scope: Scope) -> str:
    """
    The path below the place where the app is mounted.

    ``path`` holds ``root_path`` as its beginning, or, from some hosts, does not; the prefix goes
    only where a segment ends.
    """
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    rest = path.removeprefix(root)
    return rest if rest.startswith("/") else path


class Step(NamedTuple):
    """One call to an engine: for logs, and for hosts that look at ``scope["epd_proxy.trace"]``."""

    stage: str
    url: str
    seconds: float
    """From the call's first byte to the answer's last."""
    status: int
    """0 if the engine gave no answer."""


class Patience:
    """
    Cancels tasks that have not got on for ``seconds``, or a quarter more; 0: none.

    One timer for all of them, and none while there are none: a timer for each request would cost
    more than reading its body.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._since: dict[asyncio.Task[Any], float] = {}
        self._over: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def renew(self, task: asyncio.Task[Any]) -> None:
        """The task got on."""
        if self.seconds:
            loop = task.get_loop()
            self._since[task] = loop.time()
            if self._timer is None:
                self._timer = loop.call_later(self.seconds / 4, self._look, loop)

    def end(self, task: asyncio.Task[Any]) -> bool:
        """The task need not get on any more; whether it had been cancelled, by nobody else too."""
        self._since.pop(task, None)
        if task not in self._over:
            return False
        self._over.discard(task)
        return not task.uncancel()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        oldest = loop.time() - self.seconds
        for task, since in list(self._since.items()):
            if since <= oldest:
                del self._since[task]
                self._over.add(task)
                task.cancel()
        waiting = bool(self._since)
        self._timer = loop.call_later(self.seconds / 4, self._look, loop) if waiting else None


CALLER = "epd_proxy.caller"
"""Where in a scope a host puts a ``Caller``, if it can."""


class Caller:
    """
    The caller of a request as the server itself knows it: the short way past ASGI's messages.

    Whether the caller is there still: to learn it from ``receive`` takes a task for each request, a
    twentieth of what a text request costs; and what is half closed, or does not read, shows there
    late or never. A body that has come, an answer that is there as a whole: another twentieth.
    """

    __slots__ = ("_on_leave", "is_gone", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        """Where the request is served: before Python 3.12, to ask for it is a system call."""
        self.is_gone = False
        self._on_leave: Callable[[], None] | None = None

    def body(self) -> bytes | None:
        """The request's body past the host's ``receive``, if all of it has come with the head."""
        return None

    def answer(self, status: int, headers: RawHeaders, body: bytes) -> bool:
        """
        Sends a whole answer, past the host's ``send``; whether it could.

        ``headers`` are complete, with a length that is the body's. Raises ValueError if one of them
        would end where another line begins.
        """
        return False

    def leave(self) -> None:
        self.is_gone = True
        if self._on_leave is not None:
            self._on_leave()

    def watch(self, on_leave: Callable[[], None]) -> None:
        self._on_leave = on_leave
        if self.is_gone:
            on_leave()

    def cancel(self) -> None:
        self._on_leave = None


def current_task(loop: asyncio.AbstractEventLoop | None = None) -> asyncio.Task[Any]:
    task = asyncio.current_task(loop)
    assert task is not None
    return task


class Exchange:
    """
    A request and its answer.

    ``is_started`` tells whether the answer's head is out. From then on a failure can only be shown
    by breaking the connection.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self._caller: Caller | None = scope.get(CALLER)
        self.headers: RawHeaders = scope["headers"]
        self.known: dict[bytes, bytes] = dict(self.headers)
        """The headers by name, the last of each."""
        self.request_id = _request_id(self.known.get(b"x-request-id", b""))
        self.status = 0
        self.sent = 0
        """Bytes of the answer's body that have gone."""
        self.stage: str | None = None
        """The role that was called last."""
        self.is_degraded = False
        """Whether engines have to encode for themselves what encoders should have."""
        self.is_gone = False
        self._task: asyncio.Task[Any] | None = None
        self.trace: list[Step] = scope.setdefault("epd_proxy.trace", [])

    def header(self, name: bytes) -> str:
        """One of the caller's headers, the last of that name; empty if there is none."""
        return self.known.get(name, b"").decode("latin-1")

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The one that runs."""
        return self._caller.loop if self._caller is not None else asyncio.get_running_loop()

    @property
    def is_started(self) -> bool:
        return self.status != 0

    @property
    def needs_length(self) -> bool:
        """Whether the caller cannot read an answer in chunks."""
        return self.scope.get("http_version") == "1.0"

    def time_limit(self) -> float | None:
        """
        ``x-request-timeout``: the seconds that the caller gives the whole request.

        Raises RequestError (400) if it is no such number.
        """
        given = self.header(b"x-request-timeout")
        if not given:
            return None
        seconds = float(given) if _NUMBER.fullmatch(given) else 0.0
        if not 0 < seconds < math.inf:
            raise RequestError("x-request-timeout must be a number of seconds above 0")
        return seconds

    async def read(self, limit: int, patience: Patience) -> bytes:
        """
        The whole body, inflated.

        Raises BodyTooLarge (413) as soon as more than ``limit`` bytes are known to come,
        BodyTimeout (408), UnsupportedEncoding (415), and ClientDisconnect if the caller leaves.
        """
        declared = self.known.get(b"content-length", b"")
        # More digits than that Python would not even read.
        if declared.isdigit() and (len(declared) > 20 or int(declared) > limit):
            raise _too_large(limit)
        inflater = None
        if b"content-encoding" in self.known:
            # A coding on a line of its own counts as well as one behind a comma.
            codings = [value for name, value in self.headers if name == b"content-encoding"]
            inflater = Inflater(b",".join(codings).decode("latin-1"), limit)
        task = self._task = current_task(self.loop)
        whole = self._caller.body() if self._caller is not None and inflater is None else None
        if whole is not None:
            if len(whole) > limit:
                raise _too_large(limit)
            return whole
        try:
            body = await self._collect(limit, inflater, patience, task)
        finally:
            if patience.end(task):
                reason = f"the request body did not go on for {patience.seconds:g} s"
                raise BodyTimeout(reason) from None
        if inflater is not None:
            inflater.finish()
        return body

    async def _collect(
        self, limit: int, inflater: Inflater | None, patience: Patience, task: asyncio.Task[Any]
    ) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while True:
            patience.renew(task)
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.is_gone = True
                raise ClientDisconnect
            chunk = message.get("body", b"")
            if inflater is not None:
                # A small piece can hold a lot, which would hold up everybody else's tokens.
                chunk = await asyncio.to_thread(inflater.feed, chunk)
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            if chunk:
                chunks.append(chunk)
            if not message.get("more_body", False):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def watch(self) -> Caller | asyncio.Task[None]:
        """
        Cancels the current task when the caller leaves. Only once the body has been read.

        Whoever called this cancels what it returns when the answer is out.
        """
        task = self._task or current_task()
        caller = self._caller
        if caller is None:
            return task.get_loop().create_task(self._wait_for_the_end(task))
        caller.watch(lambda: self._left(task))
        return caller

    async def _wait_for_the_end(self, task: asyncio.Task[Any]) -> None:
        # Whatever else comes, comes from a host that does not tell.
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._left(task)

    def _left(self, task: asyncio.Task[Any]) -> None:
        self.is_gone = True
        task.cancel()

    async def start(self, status: int, headers: RawHeaders) -> None:
        """Sends the head, with the request id in it."""
        self.status = status
        headers = self._completed(headers)
        try:
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
        except OSError:
            raise self._nobody() from None

    async def write(self, body: bytes, more: bool) -> None:
        try:
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except OSError:
            raise self._nobody() from None
        self.sent += len(body)

    def _nobody(self) -> ClientDisconnect:
        """Some hosts tell by an OSError that nobody is there any more."""
        self.is_gone = True
        return ClientDisconnect()

    def _completed(self, headers: RawHeaders) -> RawHeaders:
        own = [(b"x-request-id", self.request_id.encode())]
        if self.is_degraded:
            own.append((b"x-epd-degraded", b"encode"))
        return headers + own

    async def answer(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """Sends a whole answer; ``headers`` tell its length."""
        caller = self._caller
        if caller is not None and caller.answer(status, self._completed(headers), body):
            self.status = status
            self.sent = len(body)
        else:
            await self.start(status, headers)
            await self.write(body, False)

    async def respond(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """Sends a whole answer."""
        await self.answer(status, [*headers, (b"content-length", b"%d" % len(body))], body)

    async def fail(self, error: ProxyError, *, expose_topology: bool = False) -> None:
        headers, body = error.answer(self.request_id, expose_topology=expose_topology)
        await self.respond(error.status, headers, body)


def _request_id(given: bytes) -> str:
    """The caller's id where it is safe to repeat in headers and logs, else a new one."""
    if given and _REQUEST_ID.fullmatch(given):
        return given.decode()
    return f"{random.getrandbits(128):032x}"


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is larger than {limit} bytes")
