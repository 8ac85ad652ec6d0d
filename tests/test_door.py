"""
Keys, the gate, the caller's time limit, and a caller who leaves at any moment.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message

from epd_proxy import Config, ConfigError, EPDProxy, Role, asgi
from tests.backends import Backends, Engine, ask, decoded, image, report, streamed
from tests.driver import CHAT, Reply, call, chat, http_scope

LIMIT = 10
"""Seconds after which a test has hung."""

TEXT = {"type": "text", "text": "hello"}
STAGES = ("encode", "prefill", "decode")


@pytest.fixture(params=[False, True], ids=["told by receive", "told by the server"], autouse=True)
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two ways in which a host tells that a caller has left."""
    monkeypatch.setattr(Caller, "is_told_by_server", request.param)


class Caller:
    """One request, driven by hand: the caller says what it says when the test says so."""

    is_told_by_server = False

    def __init__(self, proxy: EPDProxy, body: Any, **headers: str) -> None:
        self.reply = Reply()
        self.content = json.dumps(body).encode()
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._word = asgi.Caller(asyncio.get_running_loop())
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        scope = http_scope("POST", CHAT, {"x-request-id": "r1", **names})
        if self.is_told_by_server:
            scope[asgi.CALLER] = self._word
        self.task = asyncio.create_task(self._run(proxy, scope))
        self.said = asyncio.Event()

    async def _run(self, proxy: EPDProxy, scope: Any) -> None:
        await proxy(scope, self._messages.get, self._send)

    async def _send(self, message: Message) -> None:
        self.reply.messages.append(message)
        self.said.set()

    def speaks(self, *, more: bool = False) -> None:
        message = {"type": "http.request", "body": self.content, "more_body": more}
        self._messages.put_nowait(message)

    def leaves(self) -> None:
        self._word.leave()
        self._messages.put_nowait({"type": "http.disconnect"})

    async def ends(self) -> None:
        async with asyncio.timeout(LIMIT):
            await self.task


class Stuck:
    """An engine that has begun to work and does not end."""

    def __init__(self, engine: Engine) -> None:
        self.has_begun = asyncio.Event()
        self.was_stopped = asyncio.Event()
        engine.route.mock(side_effect=self)

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.has_begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_stopped.set()
            raise
        raise AssertionError


class Tap(httpx.AsyncByteStream):
    """An answer that comes as far as ``pieces`` and then no further."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces
        self.is_waiting = asyncio.Event()
        self.is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece
        self.is_waiting.set()
        await asyncio.Event().wait()

    async def aclose(self) -> None:
        self.is_closed = True

    def answer(self, kind: str = "text/event-stream") -> httpx.Response:
        return httpx.Response(200, headers={"content-type": kind}, stream=self)


def stage(role: str) -> tuple[Backends, EPDProxy, Stuck]:
    backends = Backends(prefill=1)
    return backends, backends.proxy(), Stuck(getattr(backends, role)[0])


def loads(proxy: EPDProxy) -> list[int]:
    return [one.load for one in proxy.registry.instances()]


def quiet(caplog: pytest.LogCaptureFixture) -> bool:
    return not [record for record in caplog.records if record.levelno >= logging.WARNING]


# The proxy ends


@pytest.mark.parametrize("role", STAGES)
async def test_what_is_cut_before_its_answer_began_is_a_503_that_says_so(role: str) -> None:
    _, proxy, stuck = stage(role)
    caller = Caller(proxy, ask(image(), stream=True))
    caller.speaks()
    await stuck.has_begun.wait()
    proxy.close_the_door()
    caller.task.cancel()
    await caller.ends()
    assert stuck.was_stopped.is_set()
    assert caller.reply.status == 503
    assert caller.reply.error["message"] == "the proxy is shutting down"
    assert caller.reply.header("retry-after") == "1"
    assert caller.reply.is_whole
    assert loads(proxy) == [0, 0, 0]


async def test_what_is_cut_after_its_answer_began_is_seen_to_be_cut() -> None:
    backends = Backends(encode=0)
    tap = Tap(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n')
    backends.decode[0].answers(tap.answer())
    proxy = backends.proxy()
    caller = Caller(proxy, ask(TEXT, stream=True))
    caller.speaks()
    await tap.is_waiting.wait()
    proxy.close_the_door()
    caller.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller.ends()
    assert not caller.reply.is_whole
    assert tap.is_closed
    assert loads(proxy) == [0]


async def test_a_caller_who_leaves_while_the_proxy_ends_gets_no_answer() -> None:
    _, proxy, stuck = stage("decode")
    caller = Caller(proxy, ask(image()))
    caller.speaks()
    await stuck.has_begun.wait()
    proxy.close_the_door()
    caller.leaves()
    await caller.ends()
    assert caller.reply.messages == []


# The caller leaves


@pytest.mark.parametrize("role", STAGES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_who_leaves_in_a_stage_stops_it_and_no_later_one_starts(
    role: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    backends, proxy, stuck = stage(role)
    caller = Caller(proxy, ask(image(), stream=stream))
    caller.speaks()
    await stuck.has_begun.wait()
    caller.leaves()
    await caller.ends()
    assert stuck.was_stopped.is_set()
    later = STAGES[STAGES.index(role) + 1 :]
    assert all(getattr(backends, each)[0].requests == [] for each in later)
    assert caller.reply.messages == []
    assert loads(proxy) == [0, 0, 0]
    assert quiet(caplog)


async def test_a_caller_who_leaves_stops_all_encode_calls_at_once() -> None:
    backends = Backends(encode=3)
    stuck = [Stuck(engine) for engine in backends.encode]
    proxy = backends.proxy()
    caller = Caller(proxy, ask(*(image(f"http://media/{n}") for n in range(3))))
    caller.speaks()
    for each in stuck:
        await each.has_begun.wait()
    caller.leaves()
    await caller.ends()
    assert all(each.was_stopped.is_set() for each in stuck)
    assert loads(proxy) == [0] * 4


CONTENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
ROLE = b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n'


@pytest.mark.parametrize(
    ("tap", "kind", "sent"),
    [
        (Tap(CONTENT), "text/event-stream", CONTENT),
        (Tap(ROLE), "text/event-stream", None),
        (Tap(), "text/event-stream", None),
        (Tap(b'{"id":'), "application/json", b'{"id":'),
        (Tap(), "application/json", b""),
    ],
    ids=["mid-stream", "before the first word", "no event", "unstreamed", "no byte"],
)
async def test_a_caller_who_leaves_in_decodes_answer_closes_it(
    tap: Tap, kind: str, sent: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    backends = Backends(encode=0)
    backends.decode[0].answers(tap.answer(kind))
    proxy = backends.proxy()
    caller = Caller(proxy, ask(TEXT))
    caller.speaks()
    await tap.is_waiting.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    caller.leaves()
    await caller.ends()
    assert tap.is_closed
    assert caller.reply.messages == [] if sent is None else caller.reply.body == sent
    assert not caller.reply.messages or not caller.reply.is_whole
    assert loads(proxy) == [0]
    assert len(backends.decode[0].requests) == 1
    assert quiet(caplog)


async def test_a_caller_who_leaves_in_the_pause_before_a_redo_is_not_served_again() -> None:
    backends = Backends(encode=0)
    backends.decode[0].answers(decoded(500))
    answered = asyncio.Event()
    proxy = backends.proxy(decode_retries=9)

    def fail(request: httpx.Request) -> httpx.Response:
        answered.set()
        return decoded(500)

    backends.decode[0].route.mock(side_effect=fail)
    caller = Caller(proxy, ask(TEXT))
    caller.speaks()
    await answered.wait()
    caller.leaves()
    await caller.ends()
    assert len(backends.decode[0].requests) == 1


async def test_a_caller_who_leaves_in_the_body_troubles_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backends = Backends()
    caller = Caller(backends.proxy(), ask(image()))
    caller.speaks(more=True)
    caller.leaves()
    await caller.ends()
    assert caller.reply.messages == []
    assert backends.encode[0].requests == []
    assert quiet(caplog)


async def test_a_caller_who_leaves_while_waiting_for_room_gives_up_the_place() -> None:
    backends, proxy, stuck = stage("decode")
    proxy = backends.proxy(max_concurrency=1, max_queue=1)
    first, second = Caller(proxy, ask(TEXT)), Caller(proxy, ask(TEXT))
    first.speaks()
    await stuck.has_begun.wait()
    second.speaks()
    second.leaves()
    await second.ends()
    assert second.reply.messages == []
    third = Caller(proxy, ask(TEXT))
    third.speaks()
    await asyncio.sleep(0)
    first.leaves()
    await first.ends()
    backends.decode[0].answers(decoded())
    await third.ends()
    assert third.reply.status == 200


async def test_a_caller_who_has_gone_when_the_answer_is_said_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": json.dumps(ask(TEXT)).encode()}

    async def send(message: Message) -> None:
        raise OSError("nobody is there")

    good, bad = Backends(encode=0), Backends(encode=0)
    bad.decode[0].answers(httpx.Response(400))
    for backends in (good, bad):
        proxy = backends.proxy()
        await proxy(http_scope("POST", CHAT, {}), receive, send)
        assert loads(proxy) == [0]
    assert quiet(caplog)


async def test_a_request_that_has_ended_is_not_cancelled_afterwards() -> None:
    proxy = Backends().proxy()
    caller = Caller(proxy, ask(TEXT))
    caller.speaks()
    await caller.ends()
    caller.leaves()
    for _ in range(5):
        await asyncio.sleep(0)
    assert caller.reply.is_whole
    assert not caller.task.cancelled()


async def test_a_caller_who_leaves_with_the_last_byte_of_the_body_gets_no_answer() -> None:
    backends = Backends()
    caller = Caller(backends.proxy(), ask(image()))
    caller.speaks()
    caller.leaves()
    await caller.ends()
    assert caller.reply.messages == []
    assert backends.decode[0].requests == []


async def test_leaving_with_the_last_bytes_neither_cancels_the_host_nor_is_an_error() -> None:
    proxy = Backends(encode=0).proxy()
    body = json.dumps(ask(TEXT)).encode()
    for turns in range(12):
        has_left = asyncio.Event()
        messages: list[Message] = [{"type": "http.request", "body": body}]

        async def receive(
            messages: list[Message] = messages, has_left: asyncio.Event = has_left
        ) -> Message:
            if messages:
                return messages.pop()
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            await asyncio.sleep(0)

        async def leave(turns: int = turns, has_left: asyncio.Event = has_left) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            has_left.set()

        leaving = asyncio.create_task(leave())
        await proxy(http_scope("POST", CHAT, {}), receive, send)
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()
        # A cancel that was left behind would strike here.
        await asyncio.sleep(0)
        await leaving
        assert loads(proxy) == [0]


async def test_a_host_that_says_the_same_for_ever_is_served() -> None:
    proxy = Backends(encode=0).proxy()
    reply = Reply()

    async def receive() -> Message:
        return {"type": "http.request", "body": json.dumps(ask(TEXT)).encode()}

    async def send(message: Message) -> None:
        reply.messages.append(message)

    await proxy(http_scope("POST", CHAT, {}), receive, send)
    assert reply.status == 200


@pytest.mark.parametrize("role", STAGES)
async def test_a_cancel_that_comes_from_the_host_is_not_swallowed(role: str) -> None:
    _, proxy, stuck = stage(role)
    caller = Caller(proxy, ask(image()))
    caller.speaks()
    await stuck.has_begun.wait()
    caller.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller.ends()
    assert caller.reply.messages == []
    assert stuck.was_stopped.is_set()
    assert loads(proxy) == [0, 0, 0]


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancel_that_comes_with_the_callers_leaving_is_not_swallowed(turns: int) -> None:
    _, proxy, stuck = stage("decode")
    caller = Caller(proxy, ask(TEXT))
    caller.speaks()
    await stuck.has_begun.wait()
    caller.leaves()
    for _ in range(turns):
        await asyncio.sleep(0)
    if caller.task.cancel():
        with pytest.raises(asyncio.CancelledError):
            await caller.ends()
    assert caller.task.done()
    assert loads(proxy) == [0, 0, 0]


# The caller's time limit


@pytest.mark.parametrize("role", STAGES)
async def test_the_callers_limit_ends_a_stage_and_no_later_one_starts(role: str) -> None:
    backends, proxy, stuck = stage(role)
    caller = Caller(proxy, ask(image()), x_request_timeout="0.05")
    caller.speaks()
    await caller.ends()
    assert caller.reply.status == 504
    error = caller.reply.error
    assert (error["type"], error["stage"]) == ("timeout_error", role)
    assert "x-request-timeout of 0.05 s" in error["message"]
    assert stuck.was_stopped.is_set()
    later = STAGES[STAGES.index(role) + 1 :]
    assert all(getattr(backends, each)[0].requests == [] for each in later)
    assert loads(proxy) == [0, 0, 0]


async def test_the_callers_limit_after_the_first_byte_breaks_the_transfer() -> None:
    tap = Tap(CONTENT)
    backends = Backends(encode=0)
    backends.decode[0].answers(tap.answer())
    caller = Caller(backends.proxy(), ask(TEXT), x_request_timeout="0.05")
    caller.speaks()
    with pytest.raises(Exception, match="x-request-timeout"):
        await caller.ends()
    assert caller.reply.body == CONTENT
    assert not caller.reply.is_whole
    assert tap.is_closed


async def test_the_callers_limit_counts_the_body_and_the_line_too() -> None:
    backends, _, stuck = stage("decode")
    proxy = backends.proxy(max_concurrency=1, max_queue=1)
    slow = Caller(proxy, ask(TEXT), x_request_timeout="0.02")
    await slow.ends()
    assert (slow.reply.status, slow.reply.error["stage"]) == (504, None)
    first = Caller(proxy, ask(TEXT))
    first.speaks()
    await stuck.has_begun.wait()
    second = Caller(proxy, ask(TEXT), x_request_timeout="0.02")
    second.speaks()
    await second.ends()
    assert (second.reply.status, second.reply.error["stage"]) == (504, None)
    first.leaves()
    await first.ends()


async def test_a_request_within_the_callers_limit_is_served() -> None:
    reply = await chat(Backends().proxy(), ask(image()), {"x-request-timeout": "30"})
    assert reply.status == 200


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "soon"])
async def test_a_limit_that_is_none_is_a_400_before_anything_happens(given: str) -> None:
    backends = Backends()
    reply = await chat(backends.proxy(), ask(image()), {"x-request-timeout": given})
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert backends.encode[0].requests == []


# Keys


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers", [{}, bearer("x"), bearer(""), {"authorization": "Basic a"}, {"api-key": "a"}]
)
@pytest.mark.parametrize(("method", "path"), [("POST", CHAT), ("GET", "/v1/models")])
async def test_without_a_key_that_is_known_it_is_a_401(
    headers: dict[str, str], method: str, path: str
) -> None:
    backends = Backends()
    reply = await call(backends.proxy(api_key=["a", "b"]), method, path, b"{", headers)
    assert (reply.status, reply.error["type"]) == (401, "authentication_error")
    assert reply.header("www-authenticate") == "Bearer"
    assert list(backends.router.calls) == []


async def test_a_caller_without_a_key_is_refused_before_the_body_is_read() -> None:
    caller = Caller(Backends().proxy(api_key=["a"]), ask(TEXT))
    await caller.ends()
    assert caller.reply.status == 401


async def test_a_caller_without_a_key_takes_no_place() -> None:
    backends, _, stuck = stage("decode")
    proxy = backends.proxy(api_key=["a"], max_concurrency=1)
    caller = Caller(proxy, ask(TEXT), authorization="Bearer a")
    caller.speaks()
    await stuck.has_begun.wait()
    assert (await chat(proxy, ask(TEXT))).status == 401
    assert (await chat(proxy, ask(TEXT), bearer("a"))).status == 503
    caller.leaves()
    await caller.ends()


@pytest.mark.parametrize("key", ["a", "b c", "k,1", "in file"])
async def test_each_key_opens(key: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of callers\n\nin file\n")
    proxy = Backends().proxy(api_key=["a", "b c", "k,1"], api_key_file=str(file))
    assert (await chat(proxy, ask(TEXT), bearer(key))).status == 200


async def test_health_and_live_stay_open() -> None:
    backends = Backends(encode=0)
    backends.router.get("http://d0:8000/health").respond(200)
    proxy = backends.proxy(api_key=["a"])
    assert (await call(proxy, "GET", "/health")).status == 200
    assert (await call(proxy, "GET", "/live")).status == 200


async def test_profiling_has_a_key_of_its_own() -> None:
    backends = Backends(encode=0)
    backends.router.post("http://d0:8000/start_profile").respond(200)
    proxy = backends.proxy(api_key=["a"], admin_api_key="b")
    reply = await call(proxy, "POST", "/start_profile", b"", {"x-api-key": "b"})
    assert reply.status == 200


def test_a_file_of_keys_that_cannot_be_read_stops_the_start() -> None:
    with pytest.raises(ConfigError) as caught:
        EPDProxy(config=Config(decode="http://d", api_key_file="/nowhere"))
    assert caught.value.option == "--api-key-file"


async def test_the_owner_of_a_key_gives_media_a_name_of_its_own() -> None:
    url = "data:image/png;base64,AAAA"
    names = {}
    for key in ("a", "b"):
        backends = Backends()
        options = {"media_ids": "tenant", "media_ids_secret": "s", "api_key": ["a", "b"]}
        proxy = backends.proxy(**options)
        await chat(proxy, ask(image(url, uuid="theirs")), bearer(key))
        (part,) = backends.encode[0].bodies[0]["messages"][0]["content"]
        names[key] = part["uuid"]
    assert names == {
        key: hmac.new(
            b"s", (hashlib.sha256(url.encode()).hexdigest() + key).encode(), "sha256"
        ).hexdigest()
        for key in ("a", "b")
    }


# The gate


async def test_beyond_the_room_there_is_it_is_a_503_that_says_when_to_come_again() -> None:
    backends, _, stuck = stage("decode")
    proxy = backends.proxy(max_concurrency=1)
    caller = Caller(proxy, ask(TEXT))
    caller.speaks()
    await stuck.has_begun.wait()
    reply = await chat(proxy, ask(TEXT))
    assert (reply.status, reply.header("retry-after")) == (503, "1")
    assert (reply.error["type"], reply.error["stage"]) == ("overloaded_error", None)
    assert (await call(proxy, "GET", "/live")).status == 200
    backends.router.get(url__regex=".*/health").respond(200)
    assert (await call(proxy, "GET", "/health")).status == 200
    caller.leaves()
    await caller.ends()
    backends.decode[0].answers(decoded())
    assert (await chat(proxy, ask(TEXT))).status == 200


async def test_who_waits_too_long_is_a_503() -> None:
    backends, _, stuck = stage("decode")
    proxy = backends.proxy(max_concurrency=1, max_queue=1, queue_timeout=0.02)
    caller = Caller(proxy, ask(TEXT))
    caller.speaks()
    await stuck.has_begun.wait()
    reply = await chat(proxy, ask(TEXT))
    assert (reply.status, reply.header("retry-after")) == (503, "1")
    assert "0.02 s" in reply.error["message"]
    caller.leaves()
    await caller.ends()


ENDINGS: dict[str, Callable[[EPDProxy], Awaitable[Any]]] = {
    "an answer": lambda proxy: chat(proxy, ask(TEXT)),
    "no JSON": lambda proxy: chat(proxy, b"no json"),
    "an unknown coding": lambda proxy: chat(proxy, b"", {"content-encoding": "br"}),
    "a body too large": lambda proxy: chat(proxy, b"x" * 2000),
    "a wrong limit": lambda proxy: chat(proxy, ask(TEXT), {"x-request-timeout": "soon"}),
    "a line break in a header": lambda proxy: chat(proxy, ask(TEXT), {"x-a": "b\nc"}),
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
async def test_a_place_is_given_back_whatever_the_end(
    ending: Callable[[EPDProxy], Awaitable[Any]],
) -> None:
    backends = Backends(encode=0)
    proxy = backends.proxy(max_concurrency=1, max_body_size=1000)
    for _ in range(3):
        await ending(proxy)
    assert (await chat(proxy, ask(TEXT))).status == 200


async def test_a_body_that_stalls_is_a_408_and_its_place_is_free_again() -> None:
    proxy = Backends(encode=0).proxy(body_timeout=0.02, max_concurrency=1)
    caller = Caller(proxy, ask(TEXT))
    caller.speaks(more=True)
    await caller.ends()
    assert (caller.reply.status, caller.reply.error["code"]) == (408, 408)
    assert (await chat(proxy, ask(TEXT))).status == 200


async def test_the_first_in_line_is_the_first_served() -> None:
    backends, _, stuck = stage("decode")
    proxy = backends.proxy(max_concurrency=1, max_queue=2)
    first = Caller(proxy, ask(TEXT))
    first.speaks()
    await stuck.has_begun.wait()
    waiting = [Caller(proxy, ask(TEXT, n=number)) for number in (1, 2)]
    for caller in waiting:
        caller.speaks()
    await asyncio.sleep(0)
    backends.decode[0].answers(decoded())
    first.leaves()
    for caller in (first, *waiting):
        await caller.ends()
    assert [body.get("n") for body in backends.decode[0].bodies] == [1, 2]


async def test_a_role_is_told_by_the_stage_that_was_called_last() -> None:
    backends = Backends()
    backends.encode[0].answers(report(None))
    stuck = Stuck(backends.decode[0])
    caller = Caller(backends.proxy(), ask(image()), x_request_timeout="0.05")
    caller.speaks()
    await stuck.has_begun.wait()
    await caller.ends()
    assert caller.reply.error["stage"] == Role.DECODE


async def test_a_stream_is_served_through_the_door() -> None:
    backends = Backends(encode=0)
    backends.decode[0].answers(streamed())
    caller = Caller(backends.proxy(), ask(TEXT, stream=True))
    caller.speaks()
    await caller.ends()
    assert caller.reply.body == streamed().content
    assert caller.reply.is_whole
