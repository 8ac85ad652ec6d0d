from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import anyio
import pytest

from epd_proxy.simulator import Failure, Simulator
from tests.simulator.bodies import ask, chat, drive, stay


@pytest.mark.parametrize(("role", "chunks"), [("router", 8), ("decode", 0)])
def test_an_engine_that_makes_no_sense_is_not_built(role: str, chunks: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        Simulator(role, chunks=chunks)


async def test_the_id_is_the_header_else_the_body_else_new() -> None:
    engine = Simulator("decode")
    header = await ask(engine, chat(request_id="b"), headers={"x-request-id": "h"})
    body = await ask(engine, chat(request_id="b"))
    new = [(await ask(engine, chat())).json()["id"] for _ in range(2)]

    assert (header.json()["id"], body.json()["id"]) == ("chatcmpl-h", "chatcmpl-b")
    assert new[0] != new[1]


async def test_every_event_is_a_message_of_its_own() -> None:
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await drive(Simulator("decode", chunks=3), chat(stream=True), send, stay)

    start, *bodies, last = sent
    assert start["status"] == 200
    assert len(bodies) == 6
    assert all(message["body"].count(b"\n\n") == 1 for message in bodies)
    assert (last["body"], last["more_body"]) == (b"", False)


async def test_the_head_of_a_stream_comes_before_its_latency() -> None:
    engine = Simulator("decode", latency=3600)
    heads: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()

    with anyio.move_on_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(drive, engine, chat(stream=True), heads.put, stay)
            head = await heads.get()
            group.cancel_scope.cancel()

    assert head["type"] == "http.response.start"
    assert heads.empty()
    assert engine.active == 0


async def test_requests_are_kept_as_they_arrived() -> None:
    engine = Simulator("decode")
    for index in range(70):
        await ask(engine, b'{ "n":%d}' % index, headers={"X-Request-Id": str(index)})

    assert len(engine.received) == 64
    assert engine.received[-1].body == b'{ "n":69}'
    assert (b"x-request-id", b"69") in engine.received[-1].headers


async def test_scripted_failures_are_answered_first_and_once() -> None:
    engine = Simulator("decode")
    html = Failure(502, b"<h1>Bad Gateway</h1>", "text/html", [("retry-after", "1")])
    engine.failures += [html, Failure(500)]

    answers = [await ask(engine, body) for body in (b"no JSON", chat(), chat())]

    assert [answer.status_code for answer in answers] == [502, 500, 200]
    assert answers[0].text == "<h1>Bad Gateway</h1>"
    assert answers[0].headers["content-type"] == "text/html"
    assert answers[0].headers["retry-after"] == "1"
    assert answers[1].json()["error"]["type"] == "InternalServerError"
