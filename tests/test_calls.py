"""
What is tried again after a failure, by whom, how often, and what never is.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from epd_proxy import EPDProxy, Instance, Role
from epd_proxy import calls as module
from epd_proxy.budget import RetryBudget
from tests.backends import (
    Backends,
    Engine,
    ask,
    decoded,
    image,
    prefilled,
    report,
    streamed,
)
from tests.driver import CHAT, Reply, call, chat

TEXT = {"type": "text", "text": "hello"}
GRID = {"image_grid_thw": [1, 4, 4]}
REPORT = report({"h": {"modality": "image", "item_indices": [0], "metadata": GRID}})
ROLES = ("encode", "prefill", "decode")
GOOD = {"encode": REPORT, "prefill": prefilled(), "decode": decoded()}

Failure = httpx.Response | Exception


class First:
    """The first that is ready, so that a test knows who is called."""

    def pick(self, ready: tuple[Instance, ...], key: str | None) -> Instance:
        return ready[0]


FIRST = {f"{role}_selector": f"{__name__}:First" for role in ROLES}


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "backoff", lambda attempt, rng: 0.0)


def fleet(**counts: int) -> Backends:
    backends = Backends(**{"encode": 1, "prefill": 1, "decode": 1, **counts})
    for engine in backends.encode:
        engine.answers(REPORT)
    return backends


def engines(backends: Backends, role: str) -> list[Engine]:
    found: list[Engine] = getattr(backends, role)
    return found


def counts(backends: Backends, role: str) -> list[int]:
    return [len(engine.requests) for engine in engines(backends, role)]


def status(code: int) -> httpx.Response:
    return httpx.Response(code, json={"error": {"message": "no", "code": code}})


def loads(proxy: EPDProxy) -> list[int]:
    return [one.load for one in proxy.registry.instances()]


# A connection that was never established


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "failure",
    [httpx.ConnectError("refused"), httpx.ConnectTimeout("5 s"), httpx.PoolTimeout("full")],
)
async def test_without_a_connection_all_the_others_are_tried_outside_every_budget(
    role: str, stream: bool, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RetryBudget, "may_redo", lambda self: False)
    backends = fleet(**{role: 4})
    for engine in engines(backends, role)[:3]:
        engine.answers(failure)
    proxy = backends.proxy(decode_retries=0, encode_retries=0, **FIRST)
    reply = await chat(proxy, ask(image(), stream=stream))
    assert reply.status == 200
    assert counts(backends, role) == [1] * 4
    assert all(counts(backends, other) == [1] for other in ROLES if other != role)
    assert len({engine.raw[0] for engine in engines(backends, role)}) == 1
    assert loads(proxy) == [0] * 6


@pytest.mark.parametrize("role", ROLES)
async def test_where_nobody_can_be_reached_each_is_tried_once(role: str) -> None:
    backends = fleet(**{role: 3})
    for engine in engines(backends, role):
        engine.answers(httpx.ConnectError("refused"))
    proxy = backends.proxy(decode_retries=5, encode_retries=5)
    reply = await chat(proxy, ask(image()))
    assert (reply.status, reply.error["stage"]) == (502, role)
    assert reply.error["message"] == f"the {role} server could not be reached"
    assert counts(backends, role) == [1, 1, 1]
    assert loads(proxy) == [0] * 5


@pytest.mark.parametrize("role", ROLES)
async def test_our_own_exhaustion_is_a_503_that_says_when_to_come_again(role: str) -> None:
    backends = fleet(**{role: 2})
    for engine in engines(backends, role):
        engine.answers(httpx.PoolTimeout("full"))
    reply = await chat(backends.proxy(), ask(image()))
    assert (reply.status, reply.header("retry-after")) == (503, "1")
    assert (reply.error["type"], reply.error["stage"]) == ("overloaded_error", role)
    assert counts(backends, role) == [1, 1]


@pytest.mark.parametrize(("role", "images"), [("encode", 2), ("prefill", 1), ("decode", 1)])
async def test_load_is_where_the_work_is(role: str, images: int) -> None:
    backends = fleet(**{role: 3})
    proxy = backends.proxy(**FIRST)
    ready = proxy.registry.ready(Role(role))
    seen: list[list[int]] = []
    entry = {"modality": "image", "item_indices": [*range(images)], "metadata": GRID}
    answers = {**GOOD, "encode": report({"h": entry})}

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append([one.load for one in ready])
        if request.url.host.endswith("2"):
            return answers[role]
        raise httpx.ConnectError("refused")

    for engine in engines(backends, role):
        engine.route.mock(side_effect=answer)
    assert (await chat(proxy, ask(*[image()] * images))).status == 200
    # Of encoders it is the bytes of their media.
    load = images * (len(json.dumps(image()["image_url"])) if role == "encode" else 1)
    assert seen == [[load, 0, 0], [0, load, 0], [0, 0, load]]
    assert loads(proxy) == [0] * 5


async def test_refused_connections_are_no_failure_in_the_log(caplog: Any) -> None:
    backends = fleet(encode=0, prefill=0, decode=2)
    backends.decode[0].answers(httpx.ConnectError("refused"))
    await chat(backends.proxy(**FIRST), ask(TEXT))
    assert caplog.records == []


async def test_one_that_failed_is_used_again_where_the_rest_cannot_be_reached() -> None:
    backends = fleet(encode=0, prefill=0, decode=2)
    backends.decode[0].answers(status(500), decoded())
    backends.decode[1].answers(httpx.ConnectError("refused"))
    assert (await chat(backends.proxy(**FIRST), ask(TEXT))).status == 200
    assert counts(backends, "decode") == [2, 1]


async def test_one_of_three_that_refuses_fails_no_request() -> None:
    backends = fleet(encode=0, prefill=0, decode=3)
    backends.decode[1].answers(httpx.ConnectError("refused"))
    proxy = backends.proxy()
    for _ in range(12):
        assert (await chat(proxy, ask(TEXT))).status == 200
    served = counts(backends, "decode")
    assert served[0] + served[2] == 12
    assert served[1] <= 6


# The consumer that encoders push to

PUSH = {"ec_consumer_zmq_addrs": ["tcp://0", "tcp://1"]}


async def test_where_the_consumer_was_named_everything_is_redone_with_another() -> None:
    backends = fleet(prefill=0, decode=2)
    backends.decode[0].answers(httpx.ConnectError("refused"))
    proxy = backends.proxy(decode_retries=0, **PUSH, **FIRST)
    assert (await chat(proxy, ask(image()))).status == 200
    pushed = [body["ec_transfer_params"]["consumer_zmq"] for body in backends.encode[0].bodies]
    assert pushed == ["tcp://0", "tcp://1"]
    assert counts(backends, "decode") == [1, 1]
    assert loads(proxy) == [0] * 3


async def test_where_no_consumer_can_be_reached_each_is_tried_once() -> None:
    backends = fleet(prefill=0, decode=2)
    for engine in backends.decode:
        engine.answers(httpx.ConnectError("refused"))
    reply = await chat(backends.proxy(decode_retries=5, **PUSH), ask(image()))
    assert (reply.status, reply.error["stage"]) == (502, "decode")
    assert counts(backends, "decode") == [1, 1]
    assert counts(backends, "encode") == [2]


async def test_encoders_that_push_are_reached_like_others() -> None:
    backends = fleet(encode=2, prefill=0, decode=2)
    backends.encode[0].answers(httpx.ConnectError("refused"))
    assert (await chat(backends.proxy(**PUSH, **FIRST), ask(image()))).status == 200
    assert counts(backends, "decode") == [1, 0]


# What is done again, and what is not

LOST = {
    "reset": httpx.ReadError("reset"),
    "closed": httpx.RemoteProtocolError("closed"),
    "not taken": httpx.WriteError("reset"),
}
LATE = httpx.ReadTimeout("late")
NEVER = [400, 401, 403, 404, 409, 413, 422, 429, 501, 529]

ANYWHERE: list[tuple[str, Failure, int]] = [
    *(("encode", status(code), 502) for code in (500, 502, 504, 599)),
    *(("prefill", status(code), 502) for code in (500, 502, 504, 599)),
    ("decode", status(500), 500),
    *((role, failure, 502) for role in ROLES for failure in LOST.values()),
    ("encode", LATE, 504),
    ("prefill", LATE, 504),
    ("prefill", httpx.Response(200, json={"kv_transfer_params": None}), 502),
    ("decode", streamed("decode-stream-role-only.sse"), 502),
    ("decode", streamed("decode-stream-error-after-role.sse"), 500),
]


@pytest.mark.parametrize(("role", "failure", "code"), ANYWHERE)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_may_pass_is_redone_by_another_or_else_by_the_same(
    role: str, failure: Failure, code: int, stream: bool
) -> None:
    body = ask(image(), stream=stream)
    pair = fleet(**{role: 2})
    engines(pair, role)[0].answers(failure)
    assert (await chat(pair.proxy(**FIRST), body)).status == 200
    assert counts(pair, role) == [1, 1]

    alone = fleet()
    engines(alone, role)[0].answers(failure, GOOD[role])
    assert (await chat(alone.proxy(), body)).status == 200
    assert counts(alone, role) == [2]

    dead = fleet(**{role: 3})
    for engine in engines(dead, role):
        engine.answers(failure)
    proxy = dead.proxy(**FIRST)
    reply = await chat(proxy, body)
    assert reply.status == code
    assert reply.header("content-type") == "application/json"
    assert counts(dead, role) == [1, 1, 0]
    assert loads(proxy) == [0] * 5


@pytest.mark.parametrize(("role", "failure", "code"), ANYWHERE)
async def test_with_no_retries_nothing_is_done_again(
    role: str, failure: Failure, code: int
) -> None:
    backends = fleet(**{role: 2})
    engines(backends, role)[0].answers(failure)
    proxy = backends.proxy(decode_retries=0, encode_retries=0, **FIRST)
    assert (await chat(proxy, ask(image()))).status == code
    assert counts(backends, role) == [1, 0]


@pytest.mark.parametrize("role", ROLES)
async def test_a_503_goes_elsewhere_and_never_to_the_same(role: str) -> None:
    pair = fleet(**{role: 2})
    engines(pair, role)[0].answers(status(503))
    assert (await chat(pair.proxy(**FIRST), ask(image()))).status == 200
    assert counts(pair, role) == [1, 1]

    alone = fleet()
    engines(alone, role)[0].answers(status(503), GOOD[role])
    reply = await chat(alone.proxy(decode_retries=5, encode_retries=5), ask(image()))
    assert (reply.status, reply.json()) == (503, status(503).json())
    assert counts(alone, role) == [1]

    full = fleet(**{role: 2})
    for engine in engines(full, role):
        engine.answers(status(503), GOOD[role])
    reply = await chat(full.proxy(decode_retries=5, encode_retries=5), ask(image()))
    assert reply.status == 503
    assert counts(full, role) == [1, 1]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("code", NEVER)
async def test_a_refusal_and_what_is_meant_for_good_are_never_repeated(
    role: str, code: int
) -> None:
    backends = fleet(**{role: 2})
    engines(backends, role)[0].answers(status(code))
    proxy = backends.proxy(decode_retries=5, encode_retries=5, **FIRST)
    reply = await chat(proxy, ask(image()))
    assert (reply.status, reply.json()) == (code, status(code).json())
    assert counts(backends, role) == [1, 0]


@pytest.mark.parametrize(
    ("failure", "code"), [(status(502), 502), (status(504), 504), (status(599), 599), (LATE, 504)]
)
async def test_decodes_other_5xx_and_its_silence_are_not_repeated(
    failure: Failure, code: int
) -> None:
    backends = fleet(decode=2)
    backends.decode[0].answers(failure)
    reply = await chat(backends.proxy(decode_retries=5, **FIRST), ask(image()))
    assert reply.status == code
    assert counts(backends, "decode") == [1, 0]


async def test_after_decodes_503_the_handle_is_spent() -> None:
    backends = fleet(decode=2)
    backends.decode[0].answers(status(503))
    handles = [httpx.Response(200, json={"kv_transfer_params": {"n": n}}) for n in (1, 2)]
    backends.prefill[0].answers(*handles)
    assert (await chat(backends.proxy(**FIRST), ask(image()))).status == 200
    assert [engine.bodies[0]["kv_transfer_params"] for engine in backends.decode] == [
        {"n": 1},
        {"n": 2},
    ]
    assert counts(backends, "encode") == [2]


@pytest.mark.parametrize(("retries", "code"), [(1, 500), (2, 200)])
async def test_failures_of_prefill_and_decode_count_together(retries: int, code: int) -> None:
    backends = fleet()
    backends.prefill[0].answers(status(500), prefilled())
    backends.decode[0].answers(status(500), decoded())
    reply = await chat(backends.proxy(decode_retries=retries), ask(TEXT))
    assert reply.status == code
    assert counts(backends, "prefill") == [1 + retries]
    assert counts(backends, "decode") == [retries]


async def test_an_encoders_failure_is_not_counted_with_those_of_prefill_and_decode() -> None:
    backends = fleet()
    backends.encode[0].answers(status(500), REPORT)
    backends.decode[0].answers(status(500), decoded())
    assert (await chat(backends.proxy(), ask(image()))).status == 200
    assert counts(backends, "encode") == [3]


async def test_what_broke_after_the_first_byte_is_never_repeated() -> None:
    async def broken() -> Any:
        yield b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
        raise httpx.ReadError("reset")

    backends = fleet(encode=0, prefill=0, decode=2)
    headers = {"content-type": "text/event-stream"}
    backends.decode[0].answers(httpx.Response(200, headers=headers, content=broken()))
    with pytest.raises(Exception, match="broke the connection"):
        await chat(backends.proxy(**FIRST), ask(TEXT))
    assert counts(backends, "decode") == [1, 0]


async def test_only_the_encode_call_that_failed_is_repeated() -> None:
    backends = fleet(encode=2)

    def all_there(request: httpx.Request) -> httpx.Response:
        parts = json.loads(request.content)["messages"][0]["content"]
        return report({part["uuid"]: {"metadata": GRID} for part in parts})

    backends.encode[0].answers(status(500))
    backends.encode[1].route.mock(side_effect=all_there)
    proxy = backends.proxy()
    reply = await chat(proxy, ask(image("http://media/0"), image("http://media/1")))
    assert reply.status == 200
    assert counts(backends, "encode") == [1, 2]
    assert backends.encode[0].raw[0] in backends.encode[1].raw
    assert loads(proxy) == [0] * 4


class Keyed(First):
    """Notes the keys it is asked for."""

    keys: list[str | None] = []

    def pick(self, ready: tuple[Instance, ...], key: str | None) -> Instance:
        self.keys.append(key)
        return ready[0]


async def test_the_selector_knows_the_key_on_every_try() -> None:
    Keyed.keys.clear()
    backends = fleet(encode=3)
    backends.encode[0].answers(httpx.ConnectError("refused"))
    backends.encode[1].answers(status(500))
    proxy = backends.proxy(encode_selector=f"{__name__}:Keyed")
    assert (await chat(proxy, ask(image(uuid="k")))).status == 200
    assert Keyed.keys == ["k", "k", "k"]


# The budget of all requests


async def test_redos_of_all_requests_have_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RetryBudget", lambda: RetryBudget(clock=lambda: 0.0))
    backends = fleet(encode=0, prefill=0)
    backends.decode[0].answers(status(500))
    proxy = backends.proxy(decode_retries=9)
    for _ in range(30):
        assert (await chat(proxy, ask(TEXT))).status == 500
    assert counts(backends, "decode") == [36]


async def test_encode_calls_draw_on_the_same_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RetryBudget", lambda: RetryBudget(clock=lambda: 0.0))
    backends = fleet()
    backends.encode[0].answers(status(500))
    proxy = backends.proxy(encode_retries=9)
    for _ in range(30):
        assert (await chat(proxy, ask(image()))).status == 502
    assert counts(backends, "encode") == [36]


async def test_a_redo_waits_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[int] = []

    def backoff(attempt: int, rng: Any) -> float:
        paused.append(attempt)
        return 0.0

    monkeypatch.setattr(module, "backoff", backoff)
    backends = fleet(decode=4)
    for engine in backends.decode:
        engine.answers(status(500))
    await chat(backends.proxy(decode_retries=2), ask(TEXT))
    assert paused == [1, 2]


# Nobody who could


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_without_a_ready_instance_is_a_503_that_says_when_to_come_again(
    role: str,
) -> None:
    backends = fleet()
    proxy = backends.proxy()
    proxy.registry.remove(proxy.registry.ready(Role(role))[0])
    reply = await chat(proxy, ask(image()))
    assert (reply.status, reply.error["stage"]) == (503, role)
    assert (reply.error["type"], reply.header("retry-after")) == ("overloaded_error", "1")
    assert all(counts(backends, each) == [0] for each in ROLES)


async def test_a_fleet_that_empties_while_it_is_tried_is_an_error_and_no_loop() -> None:
    backends = fleet(encode=0, prefill=0, decode=2)
    proxy = backends.proxy(**FIRST)

    def vanish(request: httpx.Request) -> httpx.Response:
        for one in proxy.registry.ready(Role.DECODE):
            proxy.registry.remove(one)
        raise httpx.ConnectError("refused")

    backends.decode[0].route.mock(side_effect=vanish)
    assert (await chat(proxy, ask(TEXT))).status == 503
    assert counts(backends, "decode") == [1, 0]


async def test_the_trace_tells_of_every_try() -> None:
    backends = fleet(encode=0, prefill=0, decode=2)
    backends.decode[0].answers(httpx.ConnectError("refused"))
    backends.decode[1].answers(status(500), decoded())
    trace: list[Any] = []
    scope: dict[str, Any] = {"epd_proxy.trace": trace}
    body = json.dumps(ask(TEXT)).encode()
    await call(backends.proxy(**FIRST), "POST", CHAT, body, **scope)
    assert [(step.url, step.status) for step in trace] == [
        ("http://d0:8000", 0),
        ("http://d1:8000", 500),
        # The first is out for now.
        ("http://d1:8000", 200),
    ]


# Without encoders, where the operator wants that

PICTURE = "data:image/png;base64,AAAA"
RAW = {"encode_fallback": "raw"}


def is_degraded(reply: Reply) -> bool:
    return reply.header("x-epd-degraded") == "encode"


@pytest.mark.parametrize(
    "failure",
    [
        status(500),
        status(502),
        status(503),
        status(529),
        LATE,
        httpx.ReadError("reset"),
        httpx.ConnectError("refused"),
        httpx.PoolTimeout("full"),
        httpx.Response(200, content=b"<html>"),
    ],
)
@pytest.mark.parametrize("prefill", [0, 1])
async def test_what_no_encoder_can_serve_goes_raw_under_its_key_and_the_answer_says_so(
    failure: Failure, prefill: int
) -> None:
    backends = fleet(prefill=prefill)
    backends.encode[0].answers(failure)
    proxy = backends.proxy(**RAW)
    reply = await chat(proxy, ask(image(PICTURE), TEXT, image(PICTURE, uuid="mine")))
    assert reply.status == 200
    assert is_degraded(reply)
    for role in ("prefill", "decode"):
        for engine in engines(backends, role):
            first, text, second = engine.bodies[0]["messages"][0]["content"]
            assert text == TEXT
            assert first == image(PICTURE, uuid=first["uuid"])
            assert len(first["uuid"]) == 64
            assert second == image(PICTURE, uuid="mine")
            assert "ec_transfer_params" not in engine.bodies[0]
    assert loads(proxy) == [0] * (2 + prefill)


@pytest.mark.parametrize("code", [400, 404, 422, 429, 501])
async def test_what_an_encoder_refuses_is_refused_all_the_same(code: int) -> None:
    backends = fleet()
    backends.encode[0].answers(status(code))
    reply = await chat(backends.proxy(**RAW), ask(image()))
    assert (reply.status, reply.json()) == (code, status(code).json())
    assert not is_degraded(reply)


@pytest.mark.parametrize("prefill", [0, 1])
async def test_a_role_that_is_empty_sends_media_raw_too(prefill: int) -> None:
    backends = fleet(prefill=prefill)
    proxy = backends.proxy(**RAW)
    proxy.registry.remove(proxy.registry.ready(Role.ENCODE)[0])
    reply = await chat(proxy, ask(image(PICTURE)))
    assert reply.status == 200
    assert is_degraded(reply)
    (part,) = backends.decode[0].bodies[0]["messages"][0]["content"]
    assert part == image(PICTURE, uuid=part["uuid"])
    reply = await chat(proxy, ask(TEXT))
    assert not is_degraded(reply)


@pytest.mark.parametrize("retries", [0, 1])
async def test_a_role_that_empties_meanwhile_sends_media_raw_too(retries: int) -> None:
    backends = fleet(encode=1)
    proxy = backends.proxy(encode_retries=retries, **RAW)

    def vanish(request: httpx.Request) -> httpx.Response:
        proxy.registry.remove(proxy.registry.ready(Role.ENCODE)[0])
        return status(500)

    backends.encode[0].route.mock(side_effect=vanish)
    reply = await chat(proxy, ask(image()))
    assert (reply.status, is_degraded(reply)) == (200, True)


async def test_a_role_that_empties_between_two_attempts_sends_media_raw_too() -> None:
    backends = fleet()
    proxy = backends.proxy(**RAW)

    def vanish(request: httpx.Request) -> httpx.Response:
        for one in proxy.registry.ready(Role.ENCODE):
            proxy.registry.remove(one)
        return answers.pop(0)

    answers = [status(500), decoded()]
    backends.decode[0].route.mock(side_effect=vanish)
    reply = await chat(proxy, ask(image()))
    assert (reply.status, is_degraded(reply)) == (200, True)
    kinds = [body["messages"][0]["content"][0]["type"] for body in backends.decode[0].bodies]
    assert kinds == ["image_embeds", "image_url"]


async def test_without_the_fallback_a_role_that_empties_between_two_attempts_is_a_503() -> None:
    backends = fleet()
    proxy = backends.proxy()

    def vanish(request: httpx.Request) -> httpx.Response:
        proxy.registry.remove(proxy.registry.ready(Role.ENCODE)[0])
        return status(500)

    backends.decode[0].route.mock(side_effect=vanish)
    reply = await chat(proxy, ask(image()))
    assert (reply.status, reply.error["stage"]) == (503, "encode")


async def test_only_the_modality_that_was_not_encoded_goes_raw() -> None:
    def pictures_only(request: httpx.Request) -> httpx.Response:
        return status(529) if b"video_url" in request.content else REPORT

    backends = fleet()
    backends.encode[0].route.mock(side_effect=pictures_only)
    video = {"type": "video_url", "video_url": {"url": "http://media/v"}}
    reply = await chat(backends.proxy(**RAW), ask(image(), video))
    assert is_degraded(reply)
    content = backends.decode[0].bodies[0]["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_embeds", "video_url"]
    assert len(content[1]["uuid"]) == 64


async def test_without_an_encode_role_nothing_is_degraded() -> None:
    backends = fleet(encode=0)
    assert not is_degraded(await chat(backends.proxy(**RAW), ask(image())))


async def test_an_attempt_in_which_encoders_served_is_not_degraded() -> None:
    backends = fleet()
    backends.encode[0].answers(status(529), REPORT)
    backends.decode[0].answers(status(500), decoded())
    reply = await chat(backends.proxy(**RAW), ask(image()))
    assert (reply.status, is_degraded(reply)) == (200, False)


@pytest.mark.parametrize(
    "failure",
    [httpx.Response(200, json={}), report(None, choices=[{"finish_reason": "abort"}])],
)
async def test_an_encoder_that_answers_badly_is_not_asked_again(failure: httpx.Response) -> None:
    backends = fleet(encode=2)
    backends.encode[0].answers(failure)
    reply = await chat(backends.proxy(**FIRST), ask(image(), image("http://media/1")))
    assert counts(backends, "encode") == [1, 0]
    assert reply.status in (200, 502)
