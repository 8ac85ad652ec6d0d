"""
The ASGI callable: what is its own, what it passes on, when it starts and ends.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvloop
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from epd_proxy import Config, ConfigError, EPDProxy, Role
from epd_proxy.upstream import default_transport
from tests.backends import Backends, ask, decoded, image
from tests.driver import CHAT, call, chat, http_scope

TEXT = {"type": "text", "text": "hello"}


async def test_alone_what_is_not_its_own_is_a_json_404() -> None:
    reply = await call(Backends().proxy(), "GET", "/v1/completions")
    assert reply.status == 404
    assert reply.header("content-type") == "application/json"
    assert reply.error["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("POST", "/health", "GET, HEAD"),
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("PUT", "/live", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_is_a_405_that_names_the_right_ones(
    method: str, path: str, allowed: str
) -> None:
    reply = await call(Backends().proxy(), method, path)
    assert (reply.status, reply.header("allow")) == (405, allowed)


@pytest.mark.parametrize(
    ("path", "root_path", "status"),
    [
        ("/api/v1/chat/completions", "/api", 200),
        ("/v1/chat/completions", "/api", 200),
        ("/v1x", "/v1", 404),
        ("/apiv1/chat/completions", "/api", 404),
    ],
)
async def test_a_mount_prefix_is_not_the_engines_business(
    path: str, root_path: str, status: int
) -> None:
    backends = Backends()
    body = httpx.Request("POST", "http://x", json=ask(TEXT)).content
    reply = await call(backends.proxy(), "POST", path, body, root_path=root_path)
    assert reply.status == status
    assert len(backends.decode[0].requests) == (status == 200)


async def test_the_request_id_is_echoed_on_every_answer() -> None:
    proxy = Backends().proxy()
    mine = {"x-request-id": "mine-1"}
    for method, path in (("POST", CHAT), ("GET", "/live"), ("GET", "/nowhere")):
        assert (await call(proxy, method, path, headers=mine)).header("x-request-id") == "mine-1"
    made = {(await call(proxy, "GET", "/live")).header("x-request-id") for _ in range(3)}
    assert len(made) == 3


async def test_a_websocket_is_refused_cleanly() -> None:
    with pytest.raises(WebSocketDisconnect), TestClient(Backends().proxy()).websocket_connect(CHAT):
        pass


async def test_a_bug_of_ours_is_a_500_without_a_traceback(caplog: Any) -> None:
    def bug(request: httpx.Request) -> httpx.Response:
        raise ZeroDivisionError("secret")

    proxy = EPDProxy(config=Config(decode="http://d"), transport=httpx.MockTransport(bug))
    reply = await chat(proxy, ask(TEXT))
    assert (reply.status, reply.error["type"]) == (500, "internal_error")
    assert b"secret" not in reply.body
    assert "ZeroDivisionError: secret" in caplog.text


async def test_a_failed_engine_is_one_line_in_the_log_and_a_callers_mistake_none(
    caplog: Any,
) -> None:
    backends = Backends()
    backends.decode[0].answers(httpx.ConnectError("refused"))
    await chat(backends.proxy(), ask(TEXT), {"x-request-id": "r1"})
    await chat(backends.proxy(), b"no json")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "request r1: 502 the decode server could not be reached"
        " (http://d0:8000: ConnectError refused)"
    )


async def test_logging_requests_writes_a_line_for_each(caplog: Any) -> None:
    caplog.set_level(logging.INFO, "epd_proxy")
    backends = Backends()
    await chat(backends.proxy(), ask(TEXT))
    assert caplog.records == []
    proxy = backends.proxy(log_requests=True)
    await chat(proxy, ask(TEXT), {"x-request-id": "r1"})
    await chat(proxy, b"no json", {"x-request-id": "r2"})
    await call(proxy, "GET", "/nowhere", headers={"x-request-id": "r3"})
    first, second, third = (record.getMessage() for record in caplog.records)
    assert third.startswith("request r3: GET '/nowhere' 404 ")
    assert first.startswith("request r1: POST '/v1/chat/completions' 200 ")
    assert " decode=http://d0:8000,200," in first
    assert second.startswith("request r2: POST '/v1/chat/completions' 400 ")


async def test_a_caller_who_leaves_in_the_body_gets_no_answer_and_is_no_error(caplog: Any) -> None:
    caplog.set_level(logging.INFO, "epd_proxy")

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError("there is nobody to answer")

    proxy = Backends().proxy(log_requests=True)
    await proxy(http_scope("POST", CHAT, {"x-request-id": "r1"}), receive, send)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "unanswered" in record.getMessage()


async def test_a_body_over_the_limit_is_a_413() -> None:
    backends = Backends()
    reply = await chat(backends.proxy(max_body_size=10), ask(TEXT))
    assert (reply.status, reply.error["code"]) == (413, 413)
    assert backends.decode[0].requests == []


# Around an inner app


async def inner(scope: Scope, receive: Receive, send: Send) -> None:
    response = PlainTextResponse(f"inner {scope['method']} {scope['path']}")
    await response(scope, receive, send)


def around(app: ASGIApp, backends: Backends, **options: Any) -> EPDProxy:
    config = Config(encode="http://e0:8000", decode="http://d0:8000")
    return EPDProxy(app, config=config, transport=backends.transport, **options)


async def test_as_a_middleware_it_takes_chat_requests_alone() -> None:
    backends = Backends()
    proxy = around(inner, backends)
    assert (await chat(proxy, ask(image()))).body == decoded().content
    for method, path in (("GET", CHAT), ("GET", "/health"), ("POST", "/x"), ("GET", "/v1/models")):
        reply = await call(proxy, method, path)
        assert reply.body.decode() == f"inner {method} {path}"


async def test_as_a_middleware_it_takes_the_paths_it_was_told() -> None:
    proxy = around(inner, Backends(), paths=iter(["/live"]))
    assert (await call(proxy, "GET", "/live")).json() == {"proxy": "healthy"}
    assert (await call(proxy, "GET", "/health")).body == b"inner GET /health"
    assert (await chat(proxy, ask(TEXT))).status == 200


def test_a_path_it_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="/liv"):
        around(inner, Backends(), paths=["/liv"])


async def hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


async def echo(websocket: WebSocket) -> None:
    await websocket.accept()
    await websocket.send_text("hi")
    await websocket.close()


def test_as_starlettes_middleware_it_passes_on_websockets_and_lifespan() -> None:
    events: list[str] = []

    async def lifespan(app: Starlette) -> Any:
        events.append("up")
        yield
        events.append("down")

    backends = Backends()
    app = Starlette(
        routes=[Route("/hello", hello), WebSocketRoute("/ws", echo)],
        middleware=[
            Middleware(
                EPDProxy, config=Config(decode="http://d0:8000"), transport=backends.transport
            )
        ],
        lifespan=asynccontextmanager(lifespan),
    )
    with TestClient(app) as client:
        assert events == ["up"]
        assert client.get("/hello").text == "hello"
        assert client.post(CHAT, json=ask(TEXT)).content == decoded().content
        with client.websocket_connect("/ws") as websocket:
            assert websocket.receive_text() == "hi"
    assert events == ["up", "down"]


def test_mounted_where_no_lifespan_reaches_it_it_starts_by_itself() -> None:
    backends = Backends()
    app = Starlette(routes=[Route("/hello", hello), Mount("/llm", app=backends.proxy())])
    with TestClient(app) as client:
        assert client.post("/llm" + CHAT, json=ask(image())).content == decoded().content
        assert client.get("/llm/live").status_code == 200
        assert client.get("/llm/nowhere").json()["error"]["code"] == 404
        assert client.get("/hello").text == "hello"


def test_inside_fastapi_it_is_mounted_or_a_middleware() -> None:
    backends = Backends()
    app = FastAPI()
    app.mount("/llm", backends.proxy())
    app.add_middleware(
        EPDProxy, config=Config(decode="http://d0:8000"), transport=backends.transport
    )

    @app.get("/hello")
    async def greet() -> str:
        return "hello"

    with TestClient(app) as client:
        assert client.post("/llm" + CHAT, json=ask(image())).content == decoded().content
        assert client.post(CHAT, json=ask(TEXT)).content == decoded().content
        assert client.get("/hello").json() == "hello"


# Start and end


class Tracked(EPDProxy):
    """Counts the transports that were made and closed."""

    made = 0
    closed = 0

    def _start(self) -> Any:
        runtime = super()._start()
        self.made += 1
        close = runtime.upstream.aclose

        async def aclose() -> None:
            self.closed += 1
            await close()

        runtime.upstream.aclose = aclose  # type: ignore[method-assign]
        return runtime


def tracked(**options: Any) -> Tracked:
    return Tracked(config=Config(decode="http://127.0.0.1:1"), **options)


async def test_fifty_first_requests_at_once_start_it_once() -> None:
    proxy = tracked()
    replies = await asyncio.gather(*(call(proxy, "GET", "/live") for _ in range(50)))
    assert {reply.status for reply in replies} == {200}
    assert proxy.made == 1
    await proxy.aclose()
    assert proxy.closed == 1


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_one_app_on_two_event_loops_starts_once_for_each(factory: Any) -> None:
    proxy = tracked()

    async def visit() -> None:
        await call(proxy, "GET", "/live")
        await call(proxy, "GET", "/live")

    for _ in range(2):
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(visit())
            runner.run(proxy.aclose())
    assert (proxy.made, proxy.closed) == (2, 2)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_loop_that_has_gone_is_forgotten() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)
        port = listener.getsockname()[1]
        proxy = EPDProxy(config=Config(decode=f"http://127.0.0.1:{port}"))

        def answer() -> None:
            with listener.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

        for _ in range(3):
            thread = threading.Thread(target=answer)
            thread.start()
            # Its connection is kept alive, and the loop ends without a word to the proxy.
            with asyncio.Runner() as runner:
                assert runner.run(chat(proxy, ask(TEXT))).status == 200
            assert len(proxy._runtimes) == 1
            thread.join(5)
        for runtime in proxy._runtimes.values():
            runtime.keeper.detach()
        proxy._runtimes.clear()
        gc.collect()


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_nobody_watches_the_fleet_for_a_loop_that_has_gone() -> None:
    proxy = EPDProxy(config=Config(decode="http://127.0.0.1:1"))
    for _ in range(5):
        with asyncio.Runner() as runner:
            runner.run(call(proxy, "GET", "/live"))
            assert len(proxy.registry.watchers) == 1


async def test_as_a_context_it_starts_and_ends_where_it_is_told() -> None:
    async with tracked() as proxy:
        assert proxy.made == 1
        await call(proxy, "GET", "/live")
    assert (proxy.made, proxy.closed) == (1, 1)
    await proxy.aclose()
    assert proxy.closed == 1


def test_its_lifespan_serves_a_host_that_mounts_it() -> None:
    proxy = tracked()
    app = Starlette(routes=[Mount("/llm", app=proxy)], lifespan=proxy.lifespan)
    with TestClient(app):
        assert proxy.made == 1
    assert proxy.closed == 1


def test_alone_it_starts_and_ends_with_the_servers_lifespan() -> None:
    proxy = tracked()
    with TestClient(proxy) as client:
        assert proxy.made == 1
        assert client.get("/live").status_code == 200
    assert (proxy.made, proxy.closed) == (1, 1)


def test_around_an_app_it_ends_with_the_apps_lifespan() -> None:
    proxy = Tracked(Starlette(routes=[]), config=Config(decode="http://127.0.0.1:1"))
    with TestClient(proxy) as client:
        client.post(CHAT, json=ask(TEXT))
        assert (proxy.made, proxy.closed) == (1, 0)
    assert proxy.closed == 1


async def test_a_transport_of_the_hosts_stays_the_hosts() -> None:
    transport = default_transport(Config(decode="http://d"))
    proxy = tracked(transport=transport)
    async with proxy:
        pass
    assert proxy.closed == 0
    await transport.aclose()


def test_two_proxies_in_one_process_know_nothing_of_each_other() -> None:
    first, second = Backends().proxy(), Backends(decode=3).proxy()
    first.registry.remove(first.registry.ready(Role.DECODE)[0])
    assert len(second.registry.ready(Role.DECODE)) == 3
