from __future__ import annotations

import asyncio
import ctypes
import hashlib
import random
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trustme
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from epd_proxy import asgi, intake
from epd_proxy.intake import IntakeProtocol

LIMIT = 10
"""Seconds after which a test has hung."""

SMALLEST = IntakeProtocol.smallest
LARGE = 1 << 20


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": request.param}


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def request(body: bytes, *fields: str, version: str = "1.1", method: str = "POST") -> bytes:
    head = [f"{method} / HTTP/{version}", "host: a", f"content-length: {len(body)}", *fields]
    return "\r\n".join([*head, "", ""]).encode() + body


class Reader:
    """An app that reads the body, in how many messages too, and answers with its digest."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.has_left = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, count = b"", 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.has_left.set()
                return
            assert isinstance(message["body"], bytes)
            body += message["body"]
            count += 1
            if not message["more_body"]:
                break
        self.counts.append(count)
        await answer(send, digest(body))


def digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


async def answer(send: Send, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    await send(start((b"content-length", b"%d" % len(body)), *headers))
    await send({"type": "http.response.body", "body": body})


def start(*headers: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": list(headers)}


class Server:
    """Connections of our protocol, in their order."""

    def __init__(
        self, app: ASGIApp, protocol: type[IntakeProtocol], options: dict[str, Any]
    ) -> None:
        self._config = uvicorn.Config(app, http=protocol, log_config=None, ws="none", **options)
        self._config.load()
        self._protocol = protocol
        self._state = ServerState()
        self.connections: list[IntakeProtocol] = []
        self.port = 0

    def accept(self) -> IntakeProtocol:
        connection = self._protocol(self._config, self._state, {})
        self.connections.append(connection)
        return connection

    def filled(self) -> int:
        """How much of its body has come past the parser, on the last connection."""
        protocol = self.connections[-1].transport.get_protocol()
        return getattr(protocol, "filled", 0)

    def has_head(self) -> bool:
        return bool(self.connections) and self.connections[-1].cycle is not None

    def is_between_bodies(self) -> bool:
        connection = self.connections[-1]
        return connection.transport.get_protocol() is connection

    async def over(self) -> None:
        await until(lambda: not self._state.connections and not self._state.tasks)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - neither uvicorn nor a socket sets an event
        await asyncio.sleep(0)


@asynccontextmanager
async def serving(
    app: ASGIApp,
    *,
    protocol: type[IntakeProtocol] = IntakeProtocol,
    context: ssl.SSLContext | None = None,
    **options: Any,
) -> AsyncIterator[Server]:
    """A server that a test is done with within LIMIT, and whose connections have all ended."""
    server = Server(app, protocol, options)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(LIMIT):
        listener = await loop.create_server(server.accept, "127.0.0.1", 0, ssl=context)
        server.port = listener.sockets[0].getsockname()[1]
        try:
            yield server
            await server.over()
        finally:
            listener.close()


class Caller:
    """A connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    async def answer(self) -> bytes:
        """The body of the next answer."""
        head = await self.head()
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        length = head.partition(b"content-length: ")[2].split(b"\r\n")[0]
        return await self.reader.readexactly(int(length))

    async def end(self) -> bytes:
        """What comes until the server closes."""
        return await self.reader.read()


@asynccontextmanager
async def calling(server: Server, context: ssl.SSLContext | None = None) -> AsyncIterator[Caller]:
    host = "localhost" if context else None
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", server.port, ssl=context, server_hostname=host
    )
    try:
        yield Caller(reader, writer)
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


@pytest.mark.parametrize(
    "size", [0, 1, 700, SMALLEST - 1, SMALLEST, SMALLEST + 1, LARGE, 5 * LARGE + 3]
)
async def test_a_body_arrives_as_it_was_sent(size: int) -> None:
    async with serving(Reader()) as server, calling(server) as caller:
        await caller.send(request(noise(size)))
        assert await caller.answer() == digest(noise(size))


@pytest.mark.parametrize("part", [0, 1, 20_000, SMALLEST + 1])
async def test_a_large_body_is_one_message_whatever_of_it_came_with_the_head(part: int) -> None:
    app, body = Reader(), noise(LARGE)
    async with serving(app) as server, calling(server) as caller:
        await caller.send(request(body)[: part - LARGE])
        await until(lambda: server.has_head() and not server.is_between_bodies())
        await caller.send(body[part:])
        assert await caller.answer() == digest(body)
        assert app.counts == [1]


@pytest.mark.parametrize("cut", [3, 40, -LARGE - 2, -LARGE + 1, -LARGE // 2, -2, -1])
async def test_a_request_may_be_cut_anywhere(cut: int) -> None:
    data = request(noise(LARGE))
    got = 0 if cut < -LARGE or cut > 0 else LARGE + cut
    async with serving(Reader()) as server, calling(server) as caller:
        await caller.send(data[:cut])
        await until(lambda: bool(server.connections) and server.filled() == got)
        await caller.send(data[cut:])
        assert await caller.answer() == digest(noise(LARGE))


async def test_a_body_that_takes_its_time_shows_that_it_goes_on() -> None:
    class Impatient(IntakeProtocol):
        interval = 0

    goes_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert await receive() == {"type": "http.request", "body": b"", "more_body": True}
        goes_on.set()
        await Reader()(scope, receive, send)

    async with serving(app, protocol=Impatient) as server, calling(server) as caller:
        data = request(noise(LARGE))
        await caller.send(data[:-LARGE])
        await until(lambda: server.has_head() and not server.is_between_bodies())
        await caller.send(data[-LARGE:-1])
        await goes_on.wait()
        await caller.send(data[-1:])
        assert await caller.answer() == digest(noise(LARGE))


async def test_requests_that_follow_at_once_get_their_answers_in_order() -> None:
    bodies = [noise(size) for size in (LARGE, 10, LARGE + 1, 3 * LARGE, SMALLEST, 0)]
    async with serving(Reader()) as server, calling(server) as caller:
        caller.writer.write(b"".join(map(request, bodies)))
        for body in bodies:
            assert await caller.answer() == digest(body)


async def test_a_connection_is_used_again_after_a_large_body() -> None:
    app = Reader()
    async with serving(app) as server, calling(server) as caller:
        for size in (LARGE, 10, LARGE + 1):
            await caller.send(request(noise(size)))
            assert await caller.answer() == digest(noise(size))
        assert len(server.connections) == 1
        assert app.counts == [1, 1, 1]


@pytest.mark.parametrize("leave", ["close", "write_eof", "abort"])
async def test_a_caller_that_leaves_within_its_body_is_a_disconnect(leave: str) -> None:
    app = Reader()
    async with serving(app) as server, calling(server) as caller:
        await caller.send(request(noise(LARGE))[:-1000])
        await until(lambda: bool(server.connections) and server.filled() == LARGE - 1000)
        whose = caller.writer.transport if leave == "abort" else caller.writer
        getattr(whose, leave)()
        await app.has_left.wait()
        assert app.counts == []


async def test_a_body_nobody_asks_for_is_not_read_and_thrown_away_after_the_answer() -> None:
    may_answer = asyncio.Event()

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await may_answer.wait()
        await answer(send, b"no")

    async with serving(refuse) as server, calling(server) as caller:
        await caller.send(request(noise(LARGE))[:-LARGE])
        await until(lambda: server.has_head() and not server.is_between_bodies())
        caller.writer.write(noise(LARGE) + request(b"next"))
        assert not server.connections[0].transport.is_reading()
        assert server.filled() == 0
        may_answer.set()
        assert [await caller.answer(), await caller.answer()] == [b"no", b"no"]
        assert server.is_between_bodies()


@pytest.mark.parametrize("rest", [1, LARGE // 2])
async def test_the_rest_of_a_body_is_thrown_away_when_the_answer_comes_early(rest: int) -> None:
    async def answer_early(scope: Scope, receive: Receive, send: Send) -> None:
        reading = asyncio.ensure_future(receive())
        await until(lambda: server.filled() == LARGE - rest or reading.done())
        await answer(send, b"enough")
        await reading

    async with serving(answer_early) as server, calling(server) as caller:
        data = request(noise(LARGE))
        await caller.send(data[:-rest])
        assert await caller.answer() == b"enough"
        await caller.send(data[-rest:] + request(b"next"))
        assert await caller.answer() == b"enough"
        assert server.is_between_bodies()


async def test_an_early_answer_that_closes_ends_the_connection() -> None:
    async def answer_early(scope: Scope, receive: Receive, send: Send) -> None:
        reading = asyncio.ensure_future(receive())
        await until(lambda: server.filled() == 1000)
        await answer(send, b"enough", (b"connection", b"close"))
        assert (await reading)["type"] == "http.disconnect"

    async with serving(answer_early) as server, calling(server) as caller:
        await caller.send(request(noise(LARGE))[: 1000 - LARGE])
        assert (await caller.end()).endswith(b"\r\n\r\nenough")


async def test_an_app_that_fails_within_a_body_is_a_500() -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("on purpose")

    async with serving(fail) as server, calling(server) as caller:
        await caller.send(request(noise(LARGE))[:-LARGE])
        assert (await caller.end()).startswith(b"HTTP/1.1 500 ")


async def test_an_answer_may_be_written_and_read_slowly_while_the_body_comes() -> None:
    piece, times = noise(SMALLEST), 200

    async def both(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start((b"content-length", b"%d" % (times * SMALLEST))))
        for _ in range(times):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        body = await receive()
        await send({"type": "http.response.body"})
        assert digest(body["body"]) == digest(noise(LARGE))

    async with serving(both) as server, calling(server) as caller:
        data = request(noise(LARGE))
        await caller.send(data[: 1000 - LARGE])
        await until(lambda: server.has_head() and server.connections[0].flow.write_paused)
        assert await caller.answer() == piece * times
        await caller.send(data[1000 - LARGE :])
        await until(server.is_between_bodies)


async def test_a_body_in_chunks_is_left_to_uvicorn() -> None:
    body = noise(LARGE)
    async with serving(Reader()) as server, calling(server) as caller:
        await caller.send(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        for begin in range(0, LARGE, 100_000):
            chunk = body[begin : begin + 100_000]
            await caller.send(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            assert server.is_between_bodies()
        await caller.send(b"0\r\n\r\n")
        assert await caller.answer() == digest(body)


async def test_a_body_over_the_limit_is_left_to_uvicorn() -> None:
    class Limited(IntakeProtocol):
        largest = LARGE - 1

    app = Reader()
    async with serving(app, protocol=Limited) as server, calling(server) as caller:
        data = request(noise(LARGE))
        await caller.send(data[:-LARGE])
        await until(server.has_head)
        assert server.is_between_bodies()
        await caller.send(data[-LARGE:])
        assert await caller.answer() == digest(noise(LARGE))


async def test_a_large_body_behind_a_request_that_still_runs_is_left_to_uvicorn() -> None:
    is_next = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await is_next.wait()
        await Reader()(scope, receive, send)

    async with serving(app) as server, calling(server) as caller:
        caller.writer.write(request(b"first") + request(noise(LARGE)))
        await until(lambda: bool(server.connections) and bool(server.connections[0].pipeline))
        assert server.is_between_bodies()
        is_next.set()
        assert await caller.answer() == digest(b"first")
        assert await caller.answer() == digest(noise(LARGE))


async def test_a_request_that_asks_for_another_protocol_has_no_body() -> None:
    async with serving(Reader()) as server, calling(server) as caller:
        data = request(noise(LARGE), "connection: upgrade", "upgrade: other")
        await caller.send(data[:-LARGE])
        assert await caller.answer() == digest(b"")
        assert server.is_between_bodies()


async def test_a_caller_that_waits_for_100_continue_gets_it() -> None:
    async with serving(Reader()) as server, calling(server) as caller:
        data = request(noise(LARGE), "expect: 100-continue")
        await caller.send(data[:-LARGE])
        assert await caller.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await caller.send(data[-LARGE:])
        assert await caller.answer() == digest(noise(LARGE))


@pytest.mark.parametrize("size", [10, LARGE])
async def test_a_caller_of_http_1_0_gets_its_answer_and_the_end(size: int) -> None:
    async with serving(Reader()) as server, calling(server) as caller:
        await caller.send(request(noise(size), version="1.0"))
        assert await caller.answer() == digest(noise(size))
        assert await caller.end() == b""


async def test_a_request_that_asks_to_close_gets_its_answer_and_the_end() -> None:
    async with serving(Reader()) as server, calling(server) as caller:
        await caller.send(request(noise(LARGE), "connection: close"))
        assert await caller.answer() == digest(noise(LARGE))
        assert await caller.end() == b""


async def test_nonsense_after_a_large_body_is_refused() -> None:
    async with serving(Reader()) as server, calling(server) as caller:
        await caller.send(request(noise(LARGE)))
        assert await caller.answer() == digest(noise(LARGE))
        await caller.send(b"nonsense\r\n\r\n")
        assert (await caller.end()).startswith(b"HTTP/1.1 400 ")


async def test_a_shutdown_waits_for_the_body_and_closes_after_the_answer() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    app, body = Reader(), noise(LARGE)
    options: dict[str, Any] = {"log_config": None, "lifespan": "off"}
    server = uvicorn.Server(uvicorn.Config(app, http=IntakeProtocol, **options))
    async with asyncio.timeout(LIMIT):
        running = asyncio.ensure_future(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(request(body)[:-1000])
        await until(lambda: bool(server.server_state.tasks))
        server.should_exit = True
        (connection,) = server.server_state.connections
        await until(lambda: not getattr(connection, "cycle").keep_alive)  # noqa: B009
        writer.write(body[-1000:])
        caller = Caller(reader, writer)
        assert await caller.answer() == digest(body)
        assert await caller.end() == b""
        writer.close()
        await running


async def test_a_large_body_arrives_over_tls() -> None:
    authority = trustme.CA()
    theirs, ours = ssl.create_default_context(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(ours)
    authority.configure_trust(theirs)
    app = Reader()
    async with serving(app, context=ours) as server, calling(server, theirs) as caller:
        data = request(noise(LARGE))
        await caller.send(data[:-LARGE])
        await until(lambda: server.has_head() and not server.is_between_bodies())
        await caller.send(data[-LARGE:] + request(b"next"))
        assert await caller.answer() == digest(noise(LARGE))
        assert await caller.answer() == digest(b"next")
        assert app.counts == [1, 1]


# As `serve` has it: nothing goes out beside what the app says.
BARE: dict[str, Any] = {"server_header": False, "date_header": False, "access_log": False}


class Short:
    """An app that takes bodies and gives answers the short way where there is one."""

    def __init__(self, content: bytes | None = None, status: int = 200, name: bytes = b"x") -> None:
        self.bodies: list[bytes | None] = []
        self.was_short: list[bool] = []
        self._content = content
        self._status = status
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Of several requests that come in one piece, only the last one's caller is told.
        caller: asgi.Caller = scope.get(asgi.CALLER) or asgi.Caller(asyncio.get_running_loop())
        body = caller.body()
        self.bodies.append(body)
        if body is None:
            body, more = b"", True
            while more:
                message = await receive()
                body, more = body + message["body"], message["more_body"]
        content = digest(body) if self._content is None else self._content
        headers = [(b"content-length", b"%d" % len(content)), (self._name, b"y")]
        was_short = caller.answer(self._status, headers, content)
        self.was_short.append(was_short)
        if not was_short:
            await send({**start(*headers), "status": self._status})
            await send({"type": "http.response.body", "body": content})


@pytest.mark.parametrize("size", [0, 1, SMALLEST - 1])
async def test_a_body_that_came_with_its_head_is_there_at_once(size: int) -> None:
    app = Short()
    async with serving(app, **BARE) as server, calling(server) as caller:
        for _ in range(2):
            await caller.send(request(noise(size)))
            assert await caller.answer() == digest(noise(size))
    assert app.bodies == [noise(size)] * 2


async def test_a_body_of_which_some_is_missing_has_to_be_waited_for() -> None:
    app = Short()
    async with serving(app, **BARE) as server, calling(server) as caller:
        await caller.send(request(b"12345")[:-1])
        await until(lambda: app.bodies == [None])
        await caller.send(b"5")
        assert await caller.answer() == digest(b"12345")


async def test_requests_that_follow_at_once_are_read_and_answered_in_order() -> None:
    app = Short()
    bodies = [noise(size) for size in (10, 0, 20, LARGE, 30)]
    async with serving(app, **BARE) as server, calling(server) as caller:
        caller.writer.write(b"".join(map(request, bodies)))
        for body in bodies:
            assert await caller.answer() == digest(body)


async def test_an_answer_before_which_another_request_has_come_is_left_to_uvicorn() -> None:
    may_answer = asyncio.Event()
    app = Short()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await may_answer.wait()
        await app(scope, receive, send)

    async with serving(slow, **BARE) as server, calling(server) as caller:
        await caller.send(request(b"one"))
        await until(server.has_head)
        await caller.send(request(b"two"))
        await until(lambda: len(server.connections[-1].pipeline) == 1)
        may_answer.set()
        assert await caller.answer() == digest(b"one")
        assert await caller.answer() == digest(b"two")
    assert app.bodies == [None, b"two"]
    assert app.was_short == [False, True]


@pytest.mark.parametrize("size", [0, 1, SMALLEST, SMALLEST + 1, LARGE])
async def test_a_whole_answer_arrives_as_it_was_given(size: int) -> None:
    app = Short(noise(size))
    async with serving(app, **BARE) as server, calling(server) as caller:
        for _ in range(2):
            await caller.send(request(b""))
            assert await caller.answer() == noise(size)
    assert app.was_short == [True, True]


@pytest.mark.parametrize(
    ("options", "data"),
    [
        ({}, request(b"")),
        ({**BARE, "access_log": True}, request(b"")),
        (BARE, request(b"", version="1.0")),
        (BARE, request(b"", method="HEAD")),
    ],
)
async def test_an_answer_with_which_more_is_to_be_done_is_left_to_uvicorn(
    options: dict[str, Any], data: bytes
) -> None:
    app = Short(b"content")
    async with serving(app, **options) as server, calling(server) as caller:
        await caller.send(data)
        head = await caller.head()
        assert b"\r\ncontent-length: 7\r\nx: y\r\n" in head
        if not data.startswith(b"HEAD"):
            assert await caller.reader.readexactly(7) == b"content"
    assert app.was_short == [False]


async def test_an_answer_that_has_begun_cannot_be_given_as_a_whole() -> None:
    said: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        caller: asgi.Caller = scope[asgi.CALLER]
        headers = [(b"content-length", b"3")]
        await send(start(*headers))
        said.append(caller.answer(200, headers, b"two"))
        await send({"type": "http.response.body", "body": b"one"})
        said.append(caller.answer(200, headers, b"two"))

    async with serving(app, **BARE) as server, calling(server) as caller:
        for _ in range(2):
            await caller.send(request(b""))
            assert await caller.answer() == b"one"
    assert said == [False] * 4


@pytest.mark.parametrize("app", [Short(), Reader()], ids=["short", "plain"])
async def test_a_whole_answer_to_a_request_that_asks_to_close_is_the_last(app: ASGIApp) -> None:
    async with serving(app, **BARE) as server, calling(server) as caller:
        await caller.send(request(b"one", "connection: close"))
        assert await caller.answer() == digest(b"one")
        assert await caller.end() == b""


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_that_has_no_body_by_its_status_is_left_to_uvicorn(status: int) -> None:
    app = Short(b"", status)
    async with serving(app, **BARE) as server, calling(server) as caller:
        await caller.send(request(b""))
        assert (await caller.head()).startswith(b"HTTP/1.1 %d " % status)
    assert app.was_short == [False]


@pytest.mark.parametrize("name", [b"x: y\r\nset-cookie", b"x\n"])
async def test_a_line_break_in_a_header_of_a_whole_answer_is_a_500(name: bytes) -> None:
    async with serving(Short(b"", name=name), **BARE) as server, calling(server) as caller:
        await caller.send(request(b""))
        assert (await caller.end()).startswith(b"HTTP/1.1 500 ")


async def test_a_caller_who_has_left_gets_no_answer_and_that_is_no_error() -> None:
    has_left = asyncio.Event()
    said: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope[asgi.CALLER].watch(has_left.set)
        await has_left.wait()
        said.append(scope[asgi.CALLER].body())
        said.append(scope[asgi.CALLER].answer(200, [(b"content-length", b"0")], b""))

    async with serving(app, **BARE) as server:
        async with calling(server) as caller:
            await caller.send(request(b""))
            await until(server.has_head)
        await has_left.wait()
        await server.over()
    assert said == [None, False]


async def test_a_stream_is_not_held_back_whatever_it_says() -> None:
    piece = b"data: \r\ncontent-length: 5\r\n\r\n"
    is_read = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        await is_read.wait()
        is_read.clear()
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        await is_read.wait()
        await send({"type": "http.response.body"})

    async with serving(app) as server, calling(server) as caller:
        await caller.send(request(b""))
        assert b"transfer-encoding: chunked" in await caller.head()
        is_read.set()
        assert await caller.reader.readexactly(len(piece) + 6) == b"1d\r\n" + piece + b"\r\n"
        is_read.set()
        assert await caller.reader.readexactly(5) == b"0\r\n\r\n"


@pytest.mark.parametrize("content", [b"", b"cut "])
async def test_an_answer_that_breaks_off_is_what_came_of_it_and_the_end(content: bytes) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start((b"content-length", b"10")))
        if content:
            await send({"type": "http.response.body", "body": content, "more_body": True})
        raise ValueError("on purpose")

    async with serving(app) as server, calling(server) as caller:
        await caller.send(request(b""))
        assert (await caller.end()).endswith(b"content-length: 10\r\n\r\n" + content)


async def test_an_answer_that_breaks_off_after_the_caller_has_left_is_no_error() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start((b"content-length", b"10")))
        await receive()
        assert (await receive())["type"] == "http.disconnect"

        raise ValueError("on purpose")

    async with serving(app) as server, calling(server) as caller:
        await caller.send(request(b""))
        await until(server.has_head)


def test_keeping_memory_does_nothing_where_there_is_no_mallopt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    intake.keep_memory()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    intake.keep_memory()
