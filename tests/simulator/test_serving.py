from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import anyio
import pytest

from epd_proxy.simulator import Simulator, serving
from tests.simulator.bodies import CHAT, ask, chat, drive, scope, stay


async def test_messages_after_the_body_do_not_end_a_request() -> None:
    messages = [{"type": "http.request"}, {"type": "http.disconnect"}]
    left = serving._caller_left

    async def receive() -> MutableMapping[str, Any]:
        return messages.pop(0)

    await left(receive)

    assert not messages


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        ("GET", "/health", 200, b""),
        ("GET", "/version", 200, b'{"version":"0.33.0"}'),
        ("POST", "/health", 405, b'{"detail":"Method Not Allowed"}'),
        ("GET", CHAT, 405, b'{"detail":"Method Not Allowed"}'),
        ("GET", "/v1/nothing", 404, b'{"detail":"Not Found"}'),
    ],
)
async def test_other_paths(method: str, path: str, status: int, body: bytes) -> None:
    answer = await ask(Simulator("encode"), b"", path, method)
    assert (answer.status_code, answer.content) == (status, body)


async def test_the_model_is_listed() -> None:
    answer = await ask(Simulator("decode", model="m"), b"", "/v1/models", "GET")
    assert [model["id"] for model in answer.json()["data"]] == ["m"]


async def test_a_mounted_engine_finds_its_paths() -> None:
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("there is no body to wait for")

    mounted = scope(method="GET", path="/e1/health", root_path="/e1")
    await Simulator("encode")(mounted, receive, send)

    assert sent[0]["status"] == 200


async def test_lifespan_is_answered_and_websockets_are_closed() -> None:
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent: list[str] = []

    async def receive() -> MutableMapping[str, Any]:
        return messages.pop(0)

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message["type"])

    await Simulator("encode")({"type": "lifespan"}, receive, send)
    await Simulator("encode")({"type": "websocket"}, receive, send)

    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete", "websocket.close"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_caller_who_leaves_ends_the_request(stream: bool) -> None:
    engine = Simulator("decode", latency=3600)
    running: list[int] = []

    async def leave() -> None:
        await anyio.wait_all_tasks_blocked()
        running.append(engine.active)

    async def send(message: MutableMapping[str, Any]) -> None:
        assert message["type"] == "http.response.start"

    with anyio.fail_after(5):
        await drive(engine, chat(stream=stream), send, leave)

    assert running == [1]
    assert len(engine.received) == 1
    assert engine.active == 0
    assert repr(engine) == "<Simulator decode '' [0 active]>"


async def test_a_caller_who_leaves_while_sending_was_never_there() -> None:
    engine = Simulator("decode")

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        raise AssertionError(message)

    await engine(scope(), receive, send)

    assert not engine.received


async def test_a_send_that_fails_is_told_to_the_host() -> None:
    engine = Simulator("decode")

    async def send(message: MutableMapping[str, Any]) -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        await drive(engine, chat(), send, stay)
    assert engine.active == 0
