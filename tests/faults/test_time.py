"""
Limits of time and of number: 504, 408 and 503, and whose they are.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.faults.callers import LEAVINGS, Caller, Leaving
from tests.faults.engines import (
    CHUNKED,
    COMPLETION,
    CONTENT,
    DONE,
    ROLE,
    Act,
    answers,
    chunk,
    deaf_address,
    hang,
    head,
    pause,
    plays,
    streams,
    until,
    whole,
)
from tests.faults.fleet import STAGES, Fleet, fleet, request
from tests.faults.test_before_first_byte import check_good, check_ours, of, until_stage

STREAMED = pytest.mark.parametrize("stream", [False, True])
STAGED = pytest.mark.parametrize("stage", STAGES)

LIMITS = {
    "encode": "encode_timeout",
    "prefill": "prefill_timeout",
    "decode": "first_byte_timeout",
}
DECODE_ALONE: dict[str, Any] = {"encode": 0, "prefill": 0}
BODY = plays(head(200, CHUNKED), chunk(b'{"choices":'), hang)


def limits(**seconds: float) -> dict[str, Any]:
    """The proxy's limits by stage."""
    return {LIMITS[stage]: limit for stage, limit in seconds.items()}


# Silent engines.


@STREAMED
@STAGED
async def test_a_silent_engine_is_a_504_that_names_the_stage(stage: str, stream: bool) -> None:
    async with fleet(**limits(**{stage: 0.2}), encode_retries=0, decode_retries=0) as one:
        one.engines[stage][0].always(hang)
        answer = await one.ask(request(stream))
        check_ours(one, answer, 504, stage)
        assert 0.15 < answer.seconds < 2
        assert one.counts == until_stage(stage)
        async with asyncio.timeout(1):
            await one.engines[stage][0].calls[0].gone()


@STREAMED
async def test_a_silent_decode_server_is_a_504_and_not_redone(stream: bool) -> None:
    async with fleet(decode=2, first_byte_timeout=0.2) as one:
        one.decode[0].always(hang)
        check_ours(one, await one.ask(request(stream)), 504, "decode")
        assert one.counts == (1, 1, 1)


@pytest.mark.parametrize("act", [hang, BODY], ids=["no head", "half a body"])
async def test_a_silent_encoders_call_goes_to_another_encoder(act: Act) -> None:
    async with fleet(encode=2, encode_timeout=0.2) as one:
        one.encode[0].always(act)
        check_good(await one.ask(request()), False)
        assert one.each("encode") == [1, 1]
        assert one.counts[1:] == (1, 1)


@pytest.mark.parametrize("act", [hang, BODY], ids=["no head", "half a body"])
async def test_encoders_that_are_all_silent_are_a_504(act: Act) -> None:
    async with fleet(encode=3, encode_timeout=0.2) as one:
        for engine in one.encode:
            engine.always(act)
        check_ours(one, await one.ask(request()), 504, "encode")
        assert one.each("encode") == [1, 1, 0]


@pytest.mark.parametrize("act", [hang, BODY], ids=["no head", "half a body"])
async def test_a_silent_prefill_is_redone_from_the_start(act: Act) -> None:
    async with fleet(prefill=2, prefill_timeout=0.2) as one:
        one.prefill[0].always(act)
        check_good(await one.ask(request()), False)
        assert one.each("prefill") == [1, 1]
        assert one.counts[0] == 2


@pytest.mark.parametrize("act", [hang, BODY], ids=["no head", "half a body"])
async def test_prefills_that_are_all_silent_are_a_504(act: Act) -> None:
    async with fleet(prefill_timeout=0.2) as one:
        one.prefill[0].always(act)
        check_ours(one, await one.ask(request()), 504, "prefill")
        assert one.counts == (2, 2, 0)


async def test_each_stage_has_a_limit_of_its_own_and_there_is_none_for_the_whole() -> None:
    async with fleet(**limits(encode=0.6, prefill=0.6, decode=0.6), idle_timeout=0.6) as one:
        for stage in STAGES:
            engine = one.engines[stage][0]
            engine.always(plays(pause(0.25), engine.answer))
        answer = await one.ask(request(True))
        check_good(answer, True)
        assert answer.seconds > 0.7


@pytest.mark.parametrize("silent", STAGES)
async def test_the_limits_of_other_stages_do_not_bind(silent: str) -> None:
    short = {stage: 0.25 for stage in STAGES if stage != silent}
    async with fleet(**limits(**short), idle_timeout=0.25, connect_timeout=0.25) as one:
        engine = one.engines[silent][0]
        engine.always(plays(pause(0.5), engine.answer))
        check_good(await one.ask(request(True)), True)


@STAGED
async def test_a_limit_of_zero_waits_for_ever(stage: str) -> None:
    async with fleet(**limits(**{stage: 0})) as one:
        engine = one.engines[stage][0]
        engine.always(plays(pause(0.2), engine.answer))
        check_good(await one.ask(request()), False)


@STAGED
async def test_an_engine_that_takes_no_connection_in_time_is_a_502(stage: str) -> None:
    with deaf_address() as url:
        async with fleet(first={stage: url}, connect_timeout=0.2, **of(stage, 0)) as one:
            answer = await one.ask(request())
            check_ours(one, answer, 502, stage)
            assert 0.15 < answer.seconds < 2


@STAGED
async def test_a_connection_not_made_in_time_goes_elsewhere_and_redoes_nothing(
    stage: str,
) -> None:
    nothing: dict[str, Any] = {"encode_retries": 0, "decode_retries": 0}
    with deaf_address() as url:
        async with fleet(first={stage: url}, connect_timeout=0.2, **nothing) as one:
            check_good(await one.ask(request()), False)
            assert one.counts == (1, 1, 1)


# What the caller gives.


def within(seconds: object) -> dict[str, str]:
    return {"x-request-timeout": str(seconds)}


@STREAMED
@STAGED
async def test_the_callers_limit_is_a_504_that_names_the_stage_and_is_not_redone(
    stage: str, stream: bool
) -> None:
    async with fleet(encode=2, prefill=2, decode=2) as one:
        one.engines[stage][0].always(hang)
        answer = await one.ask(request(stream), within(0.3))
        check_ours(one, answer, 504, stage)
        assert 0.2 < answer.seconds < 2
        assert one.counts == until_stage(stage)
        async with asyncio.timeout(1):
            await one.engines[stage][0].calls[0].gone()


@STAGED
async def test_what_is_left_of_the_callers_limit_bounds_the_stage(stage: str) -> None:
    async with fleet() as one:
        for earlier in STAGES[: STAGES.index(stage)]:
            engine = one.engines[earlier][0]
            engine.always(plays(pause(0.3), engine.answer))
        one.engines[stage][0].always(hang)
        answer = await one.ask(request(), within(0.7))
        check_ours(one, answer, 504, stage)
        assert 0.6 < answer.seconds < 0.95


async def test_the_callers_limit_bounds_redos_too() -> None:
    async with fleet(decode_retries=1000) as one:
        one.decode[0].always(plays(pause(0.1), whole(500, b"{}")))
        answer = await one.ask(request(), within(0.35))
        assert answer.status in (500, 504)
        assert answer.is_json
        assert answer.seconds < 2


async def test_the_callers_limit_cuts_a_stream_that_is_still_going() -> None:
    async with fleet(**DECODE_ALONE) as one:
        one.decode[0].always(streams(ROLE, CONTENT, end=hang))
        answer = await one.ask(request(True), within(0.3))
        assert (answer.status, answer.is_whole) == (200, False)
        assert answer.body == ROLE + CONTENT
        assert 0.2 < answer.seconds < 2
        async with asyncio.timeout(1):
            await one.decode[0].calls[0].gone()


async def test_a_long_limit_of_the_callers_does_not_lengthen_ours() -> None:
    async with fleet(prefill_timeout=0.2, decode_retries=0) as one:
        one.prefill[0].always(hang)
        answer = await one.ask(request(), within(60))
        check_ours(one, answer, 504, "prefill")
        assert answer.seconds < 2


@STREAMED
async def test_who_is_fast_enough_sees_nothing_of_its_limit(stream: bool) -> None:
    async with fleet() as one:
        check_good(await one.ask(request(stream), within(5)), stream)


@pytest.mark.parametrize("odd", ["", "soon", "-1", "nan", "inf", "1e400", "1_0", "٣", "5s"])
async def test_an_odd_limit_of_the_callers_is_ignored_or_refused(odd: str) -> None:
    async with fleet(**DECODE_ALONE) as one:
        headers = {"x-request-timeout": odd.encode().decode("latin-1")}
        answer = await one.ask(request(), headers)
        assert answer.status in (200, 400)
        assert answer.is_json


# Slow bodies.


async def test_a_body_that_stalls_is_a_408() -> None:
    async with fleet(body_timeout=0.2) as one:
        caller = await one.caller()
        await caller.ask(b'{"messages":', {"content-length": "1000"})
        answer = await caller.answer()
        check_ours(one, answer, 408, None)
        assert 0.15 < answer.seconds < 2
        assert one.counts == (0, 0, 0)


async def test_a_body_that_never_begins_is_a_408() -> None:
    async with fleet(body_timeout=0.2) as one:
        caller = await one.caller()
        await caller.ask(b"", {"content-length": "1000"})
        check_ours(one, await caller.answer(), 408, None)


async def test_a_body_that_comes_slowly_but_comes_is_served() -> None:
    async with fleet(**DECODE_ALONE, body_timeout=0.4) as one:
        body = request()
        caller = await one.caller()
        await caller.ask(body[:1], {"content-length": str(len(body))})
        for start in range(1, 6):
            await asyncio.sleep(0.1)
            await caller.send(body[start : start + 1])
        await caller.send(body[6:])
        check_good(await caller.answer(), False)


async def test_the_bodys_limit_ends_with_the_body() -> None:
    async with fleet(**DECODE_ALONE, body_timeout=0.1) as one:
        one.decode[0].always(plays(pause(0.3), whole(200, COMPLETION)))
        check_good(await one.ask(request()), False)


# How many at once.


async def first_of(one: Fleet, done: asyncio.Event) -> Caller:
    """A caller whose request is at decode until the test says that it is done."""
    one.decode[0].then(plays(until(done), whole(200, COMPLETION)))
    caller = await one.asked(request())
    await one.decode[0].call()
    return caller


def check_full(answer: Any) -> None:
    assert (answer.status, answer.is_json, answer.is_whole) == (503, True, True)
    assert int(answer.header("retry-after")) >= 1
    assert answer.error["code"] == 503
    assert answer.error["message"]


@STREAMED
async def test_beyond_the_limit_is_a_503_at_once_and_no_engine_is_troubled(stream: bool) -> None:
    done = asyncio.Event()
    async with fleet(max_concurrency=1) as one:
        first = await first_of(one, done)
        answer = await one.ask(request(stream))
        check_full(answer)
        assert answer.seconds < 0.5
        assert one.counts == (1, 1, 1)
        done.set()
        check_good(await first.answer(), False)
        check_good(await one.ask(request(stream)), stream)


async def test_health_and_liveness_are_answered_when_all_is_full() -> None:
    done = asyncio.Event()
    async with fleet(max_concurrency=1, max_queue=1, queue_timeout=5) as one:
        await first_of(one, done)
        await one.asked(request())
        check_full(await one.ask(request()))
        assert (await one.get("/live")).status == 200
        assert (await one.get("/health")).status == 200


async def test_who_waits_in_the_queue_is_served_when_its_turn_comes_and_in_order() -> None:
    done = asyncio.Event()
    async with fleet(max_concurrency=1, max_queue=3) as one:
        first = await first_of(one, done)
        waiting = []
        for number in range(3):
            waiting.append(await one.asked(request(user=f"u{number}")))
            # Its request has been read once this answer is there.
            assert (await one.get("/live")).status == 200
        check_full(await one.ask(request()))
        assert one.counts == (1, 1, 1)
        done.set()
        check_good(await first.answer(), False)
        for caller in waiting:
            check_good(await caller.answer(), False)
        users = [call.json.get("user") for call in one.decode[0].calls]
        assert users == [None, "u0", "u1", "u2"]


async def test_who_waits_in_the_queue_too_long_gets_a_503() -> None:
    async with fleet(max_concurrency=1, max_queue=5, queue_timeout=0.2) as one:
        await first_of(one, asyncio.Event())
        answer = await one.ask(request())
        check_full(answer)
        assert 0.15 < answer.seconds < 2
        assert one.counts == (1, 1, 1)


@pytest.mark.parametrize("how", LEAVINGS)
async def test_who_leaves_the_queue_makes_room_in_it(how: Leaving) -> None:
    done = asyncio.Event()
    async with fleet(max_concurrency=1, max_queue=1) as one:
        first = await first_of(one, done)
        second = await one.asked(request(user="left"))
        assert (await one.get("/live")).status == 200
        check_full(await one.ask(request()))
        second.leave(how)
        assert (await one.get("/live")).status == 200
        third = await one.asked(request(user="stayed"))
        assert (await one.get("/live")).status == 200
        done.set()
        check_good(await first.answer(), False)
        check_good(await third.answer(), False)
        assert [call.json.get("user") for call in one.decode[0].calls] == [None, "stayed"]


@pytest.mark.parametrize("how", LEAVINGS)
async def test_who_leaves_in_the_middle_makes_room(how: Leaving) -> None:
    async with fleet(max_concurrency=1) as one:
        first = await first_of(one, asyncio.Event())
        first.leave(how)
        async with asyncio.timeout(1):
            await one.decode[0].calls[0].gone()
        await one.idle()
        check_good(await one.ask(request()), False)


@pytest.mark.parametrize(
    "act",
    [answers(400, b'{"error":1}'), answers(500, b'{"error":1}'), answers(200, b"{")],
    ids=["400", "500", "odd"],
)
async def test_failed_requests_make_room(act: Act) -> None:
    async with fleet(max_concurrency=1, decode_retries=0) as one:
        one.prefill[0].then(act)
        assert (await one.ask(request())).status >= 400
        check_good(await one.ask(request()), False)


async def test_a_stream_keeps_its_place_to_its_end() -> None:
    done = asyncio.Event()
    async with fleet(**DECODE_ALONE, max_concurrency=1) as one:
        one.decode[0].then(streams(ROLE, CONTENT, until(done), DONE))
        first = await one.asked(request(True))
        await first.until(lambda: first.body == ROLE + CONTENT)
        check_full(await one.ask(request(True)))
        done.set()
        assert (await first.answer()).is_whole
        check_good(await one.ask(request(True)), True)


async def test_the_default_sets_no_limit_to_how_many() -> None:
    done = asyncio.Event()
    async with fleet(**DECODE_ALONE) as one:
        one.decode[0].always(plays(until(done), whole(200, COMPLETION)))
        callers = [await one.asked(request()) for _ in range(50)]
        await one.decode[0].call(49)
        done.set()
        for caller in callers:
            check_good(await caller.answer(), False)
