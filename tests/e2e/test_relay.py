"""
Bytes through the proxy over real sockets: engines and proxy under uvicorn, in this process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from epd_proxy import Config, EPDProxy
from epd_proxy.demo import data_url, picture_png
from epd_proxy.servers import serving
from epd_proxy.simulator import Failure, Simulator
from tests.driver import CHAT
from tests.processes import LIMIT

PICTURE = data_url(picture_png(56, 56))


def straddling(prefix: bytes, character: str, suffix: bytes) -> bytes:
    """Text in which a character of several bytes lies across byte 1024, and many more follow."""
    filler = b"x" * (1023 - len(prefix))
    return prefix + filler + character.encode() + "界🌍é".encode() * 500 + suffix


EVENTS = straddling(b'data: {"choices":[{"delta":{"content":"', "界", b'"}}]}\n\ndata: [DONE]\n\n')
ANSWER = straddling(b'{"choices":[{"message":{"content":"', "🌍", b'"}}]}')


@asynccontextmanager
async def proxied(
    app: ASGIApp | None = None, **engines: ASGIApp
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a proxy in front of these engines, one of each role."""
    async with AsyncExitStack() as stack:
        urls = {
            role: await stack.enter_async_context(serving(engine, "127.0.0.1", 0))
            for role, engine in engines.items()
        }
        proxy = EPDProxy(app, config=Config(**urls))  # type: ignore[arg-type]
        url = await stack.enter_async_context(serving(proxy, "127.0.0.1", 0))
        client = httpx.AsyncClient(base_url=url, trust_env=False, timeout=LIMIT)
        yield await stack.enter_async_context(client)


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_whole_job(prefill: bool, stream: bool) -> None:
    encoder = Simulator("encode", model="*")
    decoder = Simulator("decode" if prefill else "prefill_decode", model="*")
    engines = {"encode": encoder, "decode": decoder}
    if prefill:
        engines["prefill"] = Simulator("prefill", model="*")
    content, kind = (
        (EVENTS, "text/event-stream; charset=utf-8")
        if stream
        else (ANSWER, "application/json; x=1")
    )
    decoder.failures += [Failure(500), Failure(200, content, kind)]
    fields = {"seed": 9223372036854775807, "temperature": 0.1, "user": "é🌍", "x": [None, {"y": 1}]}
    parts = [
        {"type": "image_url", "image_url": {"url": PICTURE}},
        {"type": "text", "text": "描述图片🌍"},
    ]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}], "stream": stream}
    async with proxied(**engines) as client:
        answer = await client.post(CHAT, json=body | fields)
    assert answer.status_code == 200
    assert answer.content == content
    assert answer.headers["content-type"] == kind
    # Retried exactly once, and from the start.
    assert [len(engine.received) for engine in engines.values()] == [2] * len(engines)
    for received in decoder.received:
        sent = json.loads(received.body)
        assert {name: sent[name] for name in (*fields, "model", "stream")} == {
            **fields,
            "model": "m",
            "stream": stream,
        }
        media, text = sent["messages"][0]["content"]
        assert media["image_embeds"] == {"image_grid_thw": [1, 4, 4]}
        assert text == parts[1]
        assert PICTURE.encode() not in received.body
    assert all(PICTURE.encode() in received.body for received in encoder.received)


class Gated:
    """A decode engine that waits for a permit before its head, and before each chunk."""

    def __init__(self, chunks: list[bytes]) -> None:
        self.chunks = chunks
        self.called = asyncio.Event()
        self.permits = asyncio.Semaphore(0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        await receive()
        self.called.set()
        await self.permits.acquire()
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for chunk in self.chunks:
            await self.permits.acquire()
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await self.permits.acquire()
        await send({"type": "http.response.body", "body": b""})


async def test_a_stream_is_passed_on_as_it_comes_and_no_head_before_decodes() -> None:
    whole = "界".encode()
    chunks = [
        b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
        b"data: a",
        whole[:1],
        whole[1:],
        b"\n",
        b"\n",
        b": keep-alive\n\n",
        b"\xff",
        b"z" * 200_000,
    ]
    engine = Gated(chunks)
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with proxied(decode=engine) as client, asyncio.timeout(LIMIT):
        asked = asyncio.create_task(
            client.send(client.build_request("POST", CHAT, json=body), stream=True)
        )
        await engine.called.wait()
        assert not asked.done()
        # The head waits for something of value.
        engine.permits.release()
        engine.permits.release()
        answer = await asked
        received = answer.aiter_raw()
        assert await anext(received) == chunks[0]
        for chunk in chunks[1:]:
            engine.permits.release()
            got = b""
            while len(got) < len(chunk):
                got += await anext(received)
            assert got == chunk
        engine.permits.release()
        assert [rest async for rest in received] == []


async def dying(scope: Scope, receive: Receive, send: Send) -> None:
    """Breaks off in the middle of an answer."""
    if scope["type"] == "http":
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: one\n\n", "more_body": True})


async def test_a_stream_that_breaks_off_is_a_broken_transfer(caplog: Any) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    received: list[bytes] = []

    async def keep(chunks: AsyncIterator[bytes]) -> None:
        async for chunk in chunks:
            received.append(chunk)  # noqa: PERF401  # what came before the break counts

    async with (
        proxied(decode=dying) as client,
        client.stream("POST", CHAT, json=body) as answer,
    ):
        assert answer.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            await keep(answer.aiter_raw())
    assert received == [b"data: one\n\n"]
    assert "the decode server broke the connection" in caplog.text


async def test_a_large_body_goes_through_whole() -> None:
    picture = "data:image/png;base64," + "QUJD" * (1 << 20)
    encoder, decoder = Simulator("encode", model="*"), Simulator("prefill_decode", model="*")
    parts = [{"type": "image_url", "image_url": {"url": picture}}]
    body = {"messages": [{"role": "user", "content": parts}]}
    encoder.failures.append(Failure(200, b"{}"))
    decoder.failures.append(Failure(200, b"{}"))
    async with proxied(encode=encoder, decode=decoder) as client:
        assert (await client.post(CHAT, json=body)).status_code == 200
    for engine in (encoder, decoder):
        (received,) = engine.received
        (part,) = json.loads(received.body)["messages"][0]["content"]
        assert part["image_url"]["url"] == picture


async def test_inside_another_app_on_real_sockets() -> None:
    engine = Simulator("prefill_decode", model="*")
    body = {"messages": [{"role": "user", "content": "hi"}]}
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(engine, "127.0.0.1", 0))
        config = Config(decode=url)
        mounted = EPDProxy(config=config)
        app = Starlette(
            routes=[Mount("/llm", app=mounted)],
            middleware=[Middleware(EPDProxy, config=config, paths=["/live"])],
            lifespan=mounted.lifespan,
        )
        host = await stack.enter_async_context(serving(app, "127.0.0.1", 0))
        client = httpx.AsyncClient(base_url=host, trust_env=False, timeout=LIMIT)
        await stack.enter_async_context(client)
        for path in (CHAT, "/llm" + CHAT):
            assert (await client.post(path, json=body)).json()["object"] == "chat.completion"
        assert (await client.get("/live")).status_code == 200
        assert (await client.get("/health")).status_code == 404
        assert (await client.get("/llm/health")).status_code == 200
