"""
Failures before anything of value has reached the caller: real statuses, JSON, and retries.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from epd_proxy import ConfigError, Role
from tests.faults.callers import Answer
from tests.faults.engines import (
    CHUNKED,
    Act,
    answers,
    chunk,
    close,
    completion,
    good,
    hang,
    head,
    no_handle,
    plays,
    reset,
)
from tests.faults.fleet import STAGES, Fleet, config, fleet, request

STREAMED = pytest.mark.parametrize("stream", [False, True])
STAGED = pytest.mark.parametrize("stage", STAGES)

# Odd on purpose: a relay that parses it would write it in another way.
REFUSAL = '{"error":  {"message":"no: é","type":"X","param":null,"code":"x","more":1}}\n'.encode()
RETRY_AFTER = "retry-after: 7"

# How a call can fail to bring so much as a head.
LOST: dict[str, Act] = {
    "reset": reset,
    "close": close,
    "half a head": plays(b"HTTP/1.1 200 OK\r\ncontent-", close),
}
# How an answer that must be whole can break off.
BROKEN: dict[str, Act] = {
    "reset in the body": plays(head(200, "content-length: 100"), b'{"choices":', reset),
    "short of its length": plays(head(200, "content-length: 100"), b'{"choices":', close),
    "no last chunk": plays(head(200, CHUNKED), chunk(completion()), close),
}
LOST_CALLS = pytest.mark.parametrize("kind", LOST)
LOST_ANSWERS = pytest.mark.parametrize("kind", LOST | BROKEN)


def check_ours(one: Fleet, answer: Answer, status: int, stage: str | None) -> None:
    """An error in the proxy's own words."""
    assert answer.status == status
    assert answer.is_json
    assert answer.is_whole
    assert answer.error.keys() == {"message", "type", "param", "code", "stage", "request_id"}
    assert answer.error["message"]
    assert answer.error["code"] == status
    assert answer.error["stage"] == stage
    assert answer.error["request_id"] == answer.header("x-request-id")
    assert not any(address.encode() in answer.raw for address in one.addresses)


def check_relayed(answer: Answer, status: int, body: bytes) -> None:
    """An error in the engine's own words."""
    assert answer.status == status
    assert answer.is_json
    assert answer.is_whole
    assert answer.body == body
    assert answer.header("retry-after") == "7"


def check_good(answer: Answer, stream: bool) -> None:
    assert answer.status == 200
    assert answer.is_whole
    assert answer.body == good(stream)


def of(stage: str, number: int) -> dict[str, Any]:
    """So many instances of a role."""
    return {stage: number}


def until_stage(stage: str) -> tuple[int, int, int]:
    """Calls by role if each stage up to this one is called once."""
    last = STAGES.index(stage)
    return (1, int(last >= 1), int(last >= 2))


@STREAMED
async def test_a_fleet_without_faults_answers_well_and_complains_of_nothing(stream: bool) -> None:
    async with fleet() as one:
        check_good(await one.ask(request(stream)), stream)
        assert one.counts == (1, 1, 1)
        assert one.log.lines == []


# What engines say.


@STREAMED
@STAGED
@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 501, 529])
async def test_a_refusal_keeps_its_status_and_words_and_is_never_retried(
    status: int, stage: str, stream: bool
) -> None:
    async with fleet(encode=2, prefill=2, decode=2) as one:
        one.engines[stage][0].always(answers(status, REFUSAL, RETRY_AFTER))
        check_relayed(await one.ask(request(stream)), status, REFUSAL)
        assert one.counts == until_stage(stage)


@STREAMED
@STAGED
async def test_a_503_of_the_only_instance_is_the_answer_at_once(stage: str, stream: bool) -> None:
    async with fleet() as one:
        one.engines[stage][0].always(answers(503, REFUSAL, RETRY_AFTER))
        check_relayed(await one.ask(request(stream)), 503, REFUSAL)
        assert one.counts == until_stage(stage)


@STREAMED
@STAGED
async def test_a_503_goes_to_another_instance(stage: str, stream: bool) -> None:
    async with fleet(encode=2, prefill=2, decode=2) as one:
        one.engines[stage][0].always(answers(503, REFUSAL, RETRY_AFTER))
        check_good(await one.ask(request(stream)), stream)
        assert one.each(stage) == [1, 1]


@STREAMED
async def test_after_decodes_503_another_decode_server_gets_a_new_handle(stream: bool) -> None:
    async with fleet(decode=2) as one:
        one.decode[0].always(answers(503, REFUSAL))
        check_good(await one.ask(request(stream)), stream)
        assert one.counts[1:] == (2, 2)


@STREAMED
@STAGED
async def test_a_503_of_every_instance_is_the_answer_and_nobody_is_asked_twice(
    stage: str, stream: bool
) -> None:
    async with fleet(encode=2, prefill=2, decode=2) as one:
        for engine in one.engines[stage]:
            engine.always(answers(503, REFUSAL, RETRY_AFTER))
        check_relayed(await one.ask(request(stream)), 503, REFUSAL)
        assert one.each(stage) == [1, 1]


@STREAMED
@pytest.mark.parametrize("status", [500, 502, 504, 507])
async def test_encodes_5xx_is_a_502_after_as_many_other_encoders_as_allowed(
    status: int, stream: bool
) -> None:
    async with fleet(encode=3) as one:
        for engine in one.encode:
            engine.always(answers(status, REFUSAL))
        check_ours(one, await one.ask(request(stream)), 502, "encode")
        assert one.each("encode") == [1, 1, 0]
        assert one.counts[1:] == (0, 0)


@STREAMED
@pytest.mark.parametrize("status", [500, 502, 504, 507])
async def test_prefills_5xx_is_a_502_after_as_many_redos_as_allowed(
    status: int, stream: bool
) -> None:
    async with fleet() as one:
        one.prefill[0].always(answers(status, REFUSAL))
        check_ours(one, await one.ask(request(stream)), 502, "prefill")
        assert one.counts == (2, 2, 0)


@STREAMED
@pytest.mark.parametrize("status", [500, 502, 504, 507])
async def test_decodes_5xx_is_decodes_own_answer(status: int, stream: bool) -> None:
    async with fleet() as one:
        one.decode[0].always(answers(status, REFUSAL, RETRY_AFTER))
        check_relayed(await one.ask(request(stream)), status, REFUSAL)


@STREAMED
@pytest.mark.parametrize("retries", [0, 1, 2])
async def test_decodes_500_is_redone_from_the_start_as_often_as_allowed(
    retries: int, stream: bool
) -> None:
    async with fleet(decode_retries=retries) as one:
        one.decode[0].always(answers(500, REFUSAL, RETRY_AFTER))
        check_relayed(await one.ask(request(stream)), 500, REFUSAL)
        assert one.counts == (retries + 1,) * 3


@STREAMED
@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_a_500_once_is_seen_by_nobody(stage: str, stream: bool) -> None:
    async with fleet() as one:
        one.engines[stage][0].then(answers(500, REFUSAL))
        check_good(await one.ask(request(stream)), stream)
        assert one.engines[stage][0].calls[1].json == one.engines[stage][0].calls[0].json


async def test_redos_for_whatever_reason_share_one_limit() -> None:
    async with fleet() as one:
        one.prefill[0].then(answers(500, REFUSAL))
        one.decode[0].then(answers(500, REFUSAL, RETRY_AFTER))
        check_relayed(await one.ask(request()), 500, REFUSAL)
        assert one.counts == (2, 2, 1)


@STREAMED
@pytest.mark.parametrize("stage", ["prefill", "decode"])
@pytest.mark.parametrize("act", [answers(500, REFUSAL), reset], ids=["500", "reset"])
async def test_a_redo_avoids_the_instance_that_failed(stage: str, act: Act, stream: bool) -> None:
    async with fleet(**of(stage, 2)) as one:
        one.engines[stage][0].always(act)
        check_good(await one.ask(request(stream)), stream)
        assert one.each(stage) == [1, 1]


# What engines do not say.


@STREAMED
@LOST_ANSWERS
async def test_a_lost_encode_call_goes_to_another_encoder_and_nothing_else_is_redone(
    kind: str, stream: bool
) -> None:
    async with fleet(encode=2) as one:
        one.encode[0].always((LOST | BROKEN)[kind])
        check_good(await one.ask(request(stream)), stream)
        assert one.each("encode") == [1, 1]
        assert one.counts[1:] == (1, 1)


@STREAMED
@LOST_ANSWERS
async def test_encode_calls_that_are_all_lost_are_a_502(kind: str, stream: bool) -> None:
    async with fleet(encode=3) as one:
        for engine in one.encode:
            engine.always((LOST | BROKEN)[kind])
        check_ours(one, await one.ask(request(stream)), 502, "encode")
        assert one.each("encode") == [1, 1, 0]
        assert one.counts[1:] == (0, 0)


@pytest.mark.parametrize("act", [answers(500, REFUSAL), reset], ids=["500", "reset"])
async def test_without_encode_retries_the_first_failure_of_an_encoder_is_the_answer(
    act: Act,
) -> None:
    async with fleet(encode=2, encode_retries=0) as one:
        one.encode[0].always(act)
        check_ours(one, await one.ask(request()), 502, "encode")
        assert one.each("encode") == [1, 0]


async def test_encode_retries_go_to_a_new_encoder_each() -> None:
    async with fleet(encode=3, encode_retries=2) as one:
        one.encode[0].always(answers(500, REFUSAL))
        one.encode[1].always(reset)
        check_good(await one.ask(request()), False)
        assert one.each("encode") == [1, 1, 1]


async def test_of_several_encode_calls_only_the_failed_one_is_repeated() -> None:
    async with fleet(encode=2, encode_selector="round-robin") as one:
        one.encode[0].then(answers(500, REFUSAL))
        check_good(await one.ask(request(images=2)), False)
        assert one.each("encode") == [1, 2]
        (failed,) = one.encode[0].calls
        assert failed.json in [call.json for call in one.encode[1].calls]
        kinds = [part["type"] for part in one.decode[0].calls[0].parts]
        assert kinds == ["image_embeds", "image_embeds", "text"]


@STREAMED
async def test_the_first_refused_encode_call_ends_the_request_and_the_other_calls(
    stream: bool,
) -> None:
    all_there = asyncio.Event()

    async def refuse(call: Any) -> None:
        await all_there.wait()
        await answers(422, REFUSAL, RETRY_AFTER)(call)

    async with fleet(encode=6, encode_selector="round-robin") as one:
        for engine in one.encode:
            engine.always(hang)
        one.encode[1].always(refuse)
        caller = await one.asked(request(stream, images=6))
        calls = [await engine.call() for engine in one.encode]
        all_there.set()
        check_relayed(await caller.answer(), 422, REFUSAL)
        async with asyncio.timeout(1):
            for call in calls[:1] + calls[2:]:
                await call.gone()
        assert one.counts == (6, 0, 0)


@STREAMED
@LOST_ANSWERS
async def test_a_lost_prefill_is_redone_from_the_start(kind: str, stream: bool) -> None:
    async with fleet() as one:
        one.prefill[0].then((LOST | BROKEN)[kind])
        check_good(await one.ask(request(stream)), stream)
        assert one.counts == (2, 2, 1)


@STREAMED
@LOST_ANSWERS
async def test_prefills_that_are_all_lost_are_a_502(kind: str, stream: bool) -> None:
    async with fleet() as one:
        one.prefill[0].always((LOST | BROKEN)[kind])
        check_ours(one, await one.ask(request(stream)), 502, "prefill")
        assert one.counts == (2, 2, 0)


@STREAMED
@LOST_CALLS
async def test_a_lost_decode_call_is_redone_from_the_start(kind: str, stream: bool) -> None:
    async with fleet() as one:
        one.decode[0].then(LOST[kind])
        check_good(await one.ask(request(stream)), stream)
        assert one.counts == (2, 2, 2)


@STREAMED
@LOST_CALLS
async def test_decode_calls_that_are_all_lost_are_a_502(kind: str, stream: bool) -> None:
    async with fleet() as one:
        one.decode[0].always(LOST[kind])
        check_ours(one, await one.ask(request(stream)), 502, "decode")
        assert one.counts == (2, 2, 2)


@STREAMED
@STAGED
async def test_what_is_no_http_is_a_502_that_names_the_stage(stage: str, stream: bool) -> None:
    async with fleet() as one:
        one.engines[stage][0].always(plays(b"SSH-2.0-OpenSSH_9.9\r\n\r\n", close))
        check_ours(one, await one.ask(request(stream)), 502, stage)


@STREAMED
@STAGED
async def test_a_redirect_is_not_followed(stage: str, stream: bool) -> None:
    async with fleet(encode_retries=0, decode_retries=0) as one:
        away = "location: http://127.0.0.1:9/v1/chat/completions"
        one.engines[stage][0].always(plays(head(307, away, "content-length: 0")))
        check_ours(one, await one.ask(request(stream)), 502, stage)
        assert one.counts == until_stage(stage)


@STREAMED
async def test_references_without_a_handle_are_redone_and_then_a_502(stream: bool) -> None:
    async with fleet() as one:
        one.prefill[0].then(no_handle)
        check_good(await one.ask(request(stream)), stream)
        assert one.counts == (2, 2, 1)
        one.prefill[0].always(no_handle)
        check_ours(one, await one.ask(request(stream)), 502, "prefill")
        assert one.counts == (4, 4, 1)


@pytest.mark.parametrize("stage", ["encode", "prefill"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 20_000], ids=len)
async def test_a_200_that_is_no_answer_is_a_502(stage: str, body: bytes) -> None:
    async with fleet() as one:
        one.engines[stage][0].always(answers(200, body))
        check_ours(one, await one.ask(request()), 502, stage)
        assert one.counts[2] == 0


# Connections that are never made.


@STREAMED
@STAGED
async def test_an_engine_out_of_reach_is_a_502_that_names_the_stage(
    stage: str, stream: bool
) -> None:
    async with fleet(refused=[stage], **of(stage, 0)) as one:
        check_ours(one, await one.ask(request(stream)), 502, stage)


@STREAMED
@STAGED
async def test_a_refused_connection_goes_elsewhere_outside_every_limit_and_redoes_nothing(
    stage: str, stream: bool
) -> None:
    async with fleet(refused=[stage, stage, stage], encode_retries=0, decode_retries=0) as one:
        check_good(await one.ask(request(stream)), stream)
        assert one.counts == (1, 1, 1)


@STAGED
async def test_one_dead_instance_among_three_fails_no_request(stage: str) -> None:
    selector: dict[str, Any] = {f"{stage}_selector": "round-robin"}
    async with fleet(refused=[stage], **of(stage, 2), **selector) as one:
        for _ in range(9):
            check_good(await one.ask(request()), False)
        assert sum(one.each(stage)) == 9
        assert min(one.each(stage)) >= 3


async def test_refused_connections_cost_nothing_of_the_retry_budget() -> None:
    async with fleet(encode=0, prefill=0, refused=["decode"], decode_retries=0) as one:
        answers_ = await asyncio.gather(*[one.ask(request()) for _ in range(60)])
        assert {answer.status for answer in answers_} == {200}
        assert one.counts == (0, 0, 60)


async def test_a_consumer_that_was_named_to_encoders_and_refuses_has_everything_redone() -> None:
    pushed = ["tcp://10.0.0.1:1", "tcp://10.0.0.2:1"]
    async with fleet(prefill=0, refused=["decode"], ec_consumer_zmq_addrs=pushed) as one:
        check_good(await one.ask(request()), False)
        named = [call.json["ec_transfer_params"]["consumer_zmq"] for call in one.encode[0].calls]
        assert named == pushed
        assert one.counts == (2, 0, 1)


# Nobody to ask.


@STREAMED
@STAGED
async def test_a_role_without_a_ready_instance_is_a_503_that_troubles_nobody(
    stage: str, stream: bool
) -> None:
    async with fleet() as one:
        for instance in one.proxy.registry.ready(Role(stage)):
            one.proxy.registry.remove(instance)
        answer = await one.ask(request(stream))
        assert (answer.status, answer.is_json) == (503, True)
        assert stage in answer.error["message"]
        assert one.counts == (0, 0, 0)


@STREAMED
@STAGED
async def test_our_own_exhaustion_is_a_503_with_retry_after(stage: str, stream: bool) -> None:
    async with fleet(max_connections=1, pool_timeout=0.1) as one:
        one.engines[stage][0].always(hang)
        await one.asked(request())
        await one.engines[stage][0].call()
        answer = await one.ask(request(stream))
        assert (answer.status, answer.is_json) == (503, True)
        assert answer.header("retry-after") == "1"
        assert len(one.engines[stage][0].calls) == 1


async def test_a_full_pool_of_one_engine_does_not_hold_up_another() -> None:
    async with fleet(max_connections=1) as one:
        one.encode[0].always(hang)
        await one.asked(request())
        await one.encode[0].call()
        for _ in range(3):
            check_good(await one.ask(request(images=0)), False)


# Whose words they are.


@STREAMED
@STAGED
@pytest.mark.parametrize(
    "body",
    [
        b'{"error":"Unauthorized"}',
        b' {"detail": 1, "error": null} ',
        b'{"error":{"message":"' + b"x" * 60_000 + b'"}}',
    ],
    ids=["a string", "null", "long"],
)
async def test_an_object_with_an_error_is_relayed_byte_for_byte(
    body: bytes, stage: str, stream: bool
) -> None:
    async with fleet() as one:
        one.engines[stage][0].always(answers(400, body, "content-type: text/plain", RETRY_AFTER))
        check_relayed(await one.ask(request(stream)), 400, body)


FLAT = b'{"object":"error","message":"max_tokens must be at least 1","type":"B","code":400}'
HTML = b"<html><body><h1>502 Bad Gateway</h1></body></html>"
TEXT = "é".encode() + b"x" * 10_000
LARGE = b'{"error":{"message":"' + b"x" * 70_000 + b'"}}'


@STREAMED
@STAGED
@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (FLAT, "application/json", "max_tokens must be at least 1"),
        (b'{"detail":"Not Found"}', "application/json", "Not Found"),
        (b"Service Unavailable", "text/plain; charset=utf-8", "Service Unavailable"),
        (HTML, "text/html", "502 Bad Gateway"),
        (b'["error"]', "application/json", "error"),
        (b'{"error":1} x', "application/json", "error"),
        (b"\xff\xfe no text \x00\r\n", "text/plain", "no text"),
        (b"", "text/plain", ""),
    ],
    ids=["flat", "detail", "text", "html", "array", "no json", "no text", "empty"],
)
async def test_other_words_of_an_engine_are_wrapped(
    body: bytes, kind: str, said: str, stage: str, stream: bool
) -> None:
    async with fleet() as one:
        field = f"content-type: {kind}"
        one.engines[stage][0].always(answers(429, body, field, RETRY_AFTER))
        answer = await one.ask(request(stream))
        check_ours(one, answer, 429, stage)
        assert said in answer.error["message"]
        assert answer.header("retry-after") == "7"
        assert one.counts == until_stage(stage)


@STREAMED
@pytest.mark.parametrize("status", [404, 500, 501, 502, 503, 529])
async def test_wrapped_words_keep_decodes_status(status: int, stream: bool) -> None:
    async with fleet(decode_retries=0) as one:
        one.decode[0].always(answers(status, HTML, "content-type: text/html", RETRY_AFTER))
        answer = await one.ask(request(stream))
        check_ours(one, answer, status, "decode")
        assert answer.header("retry-after") == "7"


@STAGED
async def test_of_a_long_text_the_first_two_kib_are_the_message(stage: str) -> None:
    async with fleet() as one:
        one.engines[stage][0].always(answers(400, TEXT, "content-type: text/plain"))
        answer = await one.ask(request())
        check_ours(one, answer, 400, stage)
        message = answer.error["message"]
        assert message == TEXT[: len(message.encode())].decode()
        assert 2000 <= len(message.encode()) <= 2048


@STREAMED
@STAGED
async def test_an_error_over_64_kib_is_wrapped_and_its_end_not_waited_for(
    stage: str, stream: bool
) -> None:
    async with fleet() as one:
        start = head(400, "content-type: application/json", "content-length: 1000000")
        one.engines[stage][0].always(plays(start, LARGE, hang))
        answer = await one.ask(request(stream))
        check_ours(one, answer, 400, stage)
        assert 1 <= len(answer.error["message"]) <= 2048
        async with asyncio.timeout(1):
            await one.engines[stage][0].calls[0].gone()


@STAGED
async def test_a_compressed_error_is_read_or_relayed_as_what_it_is(stage: str) -> None:
    async with fleet() as one:
        body = gzip.compress(REFUSAL)
        one.engines[stage][0].always(answers(400, body, "content-encoding: gzip"))
        answer = await one.ask(request(), {"accept-encoding": "gzip"})
        is_packed = answer.header("content-encoding") == "gzip"
        assert (answer.status, answer.is_json, answer.is_whole) == (400, True, True)
        assert (gzip.decompress(answer.body) if is_packed else answer.body) == REFUSAL


@STAGED
async def test_an_error_that_breaks_off_is_a_whole_error_all_the_same(stage: str) -> None:
    async with fleet() as one:
        one.engines[stage][0].always(plays(head(429, "content-length: 100"), b'{"err', close))
        answer = await one.ask(request())
        assert answer.status in (429, 502)
        assert (answer.is_json, answer.is_whole) == (True, True)
        assert answer.error["stage"] == stage


@STAGED
async def test_addresses_are_told_only_where_the_operator_wants_it(stage: str) -> None:
    async with fleet(refused=[stage], expose_topology=True, **of(stage, 0)) as one:
        answer = await one.ask(request())
        assert (answer.status, answer.error["stage"]) == (502, stage)
        assert any(address.encode() in answer.raw for address in one.addresses)


# How much is redone.


async def test_redos_of_all_requests_together_stay_within_the_budget() -> None:
    number = 100
    async with fleet(encode=0, prefill=0, decode_retries=5) as one:
        one.decode[0].always(answers(500, REFUSAL, RETRY_AFTER))
        began = asyncio.get_running_loop().time()
        found = await asyncio.gather(*[one.ask(request()) for _ in range(number)])
        seconds = asyncio.get_running_loop().time() - began
        for answer in found:
            check_relayed(answer, 500, REFUSAL)
        redone = one.counts[2] - number
        # A fifth of the requests of ten seconds, or three for each of these seconds.
        assert 3 <= redone <= max(number / 5, 30) + 3 * (seconds + 1)


async def test_a_lonely_request_is_redone() -> None:
    async with fleet(encode=0, prefill=0) as one:
        one.decode[0].then(answers(500, REFUSAL))
        check_good(await one.ask(request()), False)
        assert one.counts == (0, 0, 2)


# Without encoders, where the operator allows it.

ENCODERS_FAIL: dict[str, Act] = {
    "500": answers(500, REFUSAL),
    "503": answers(503, REFUSAL),
    "reset": reset,
}


def is_raw(parts: list[Any]) -> bool:
    """Whether every image is the caller's own, with its uuid pinned."""
    images = parts[:-1]
    return all(part["type"] == "image_url" and part["uuid"] for part in images)


@STREAMED
@pytest.mark.parametrize("kind", ENCODERS_FAIL)
async def test_with_the_fallback_media_goes_raw_where_no_encoder_can_serve_it(
    kind: str, stream: bool
) -> None:
    async with fleet(encode=2, encode_fallback="raw") as one:
        for engine in one.encode:
            engine.always(ENCODERS_FAIL[kind])
        answer = await one.ask(request(stream))
        check_good(answer, stream)
        assert answer.header("x-epd-degraded") == "encode"
        uuid = one.encode[0].calls[0].parts[0]["uuid"]
        for engine in (*one.prefill, *one.decode):
            (call,) = engine.calls
            assert is_raw(call.parts)
            assert call.parts[0]["uuid"] == uuid
            assert call.parts[0]["image_url"] == one.encode[0].calls[0].parts[0]["image_url"]


@STREAMED
@pytest.mark.parametrize("is_ready", [True, False])
async def test_with_the_fallback_media_goes_raw_where_there_is_no_encoder_to_ask(
    is_ready: bool, stream: bool
) -> None:
    async with fleet(encode=0, refused=["encode"], encode_fallback="raw") as one:
        if not is_ready:
            (encoder,) = one.proxy.registry.ready(Role.ENCODE)
            one.proxy.registry.remove(encoder)
        answer = await one.ask(request(stream))
        check_good(answer, stream)
        assert answer.header("x-epd-degraded") == "encode"
        assert is_raw(one.prefill[0].calls[0].parts)
        assert is_raw(one.decode[0].calls[0].parts)


async def test_the_fallback_of_one_image_is_the_fallback_of_all_images() -> None:
    async with fleet(encode=2, encode_fallback="raw", encode_selector="round-robin") as one:
        one.encode[0].then(answers(500, REFUSAL), answers(500, REFUSAL))
        one.encode[1].then(answers(500, REFUSAL))
        answer = await one.ask(request(images=2))
        check_good(answer, False)
        assert answer.header("x-epd-degraded") == "encode"
        assert is_raw(one.prefill[0].calls[0].parts)
        assert is_raw(one.decode[0].calls[0].parts)


async def test_the_fallback_is_no_answer_to_what_an_encoder_refuses() -> None:
    async with fleet(encode_fallback="raw") as one:
        one.encode[0].always(answers(422, REFUSAL, RETRY_AFTER))
        answer = await one.ask(request())
        check_relayed(answer, 422, REFUSAL)
        assert answer.header("x-epd-degraded") is None
        assert one.counts == (1, 0, 0)


async def test_the_fallback_is_not_mentioned_where_it_was_not_needed() -> None:
    async with fleet(encode=2, encode_fallback="raw") as one:
        one.encode[0].always(reset)
        answer = await one.ask(request())
        check_good(answer, False)
        assert answer.header("x-epd-degraded") is None
        assert one.decode[0].calls[0].parts[0]["type"] == "image_embeds"


def test_the_fallback_together_with_push_addresses_is_refused_at_start() -> None:
    fields = {"encode": "http://e", "decode": "http://d", "ec_consumer_zmq_addrs": "tcp://d:1"}
    with pytest.raises(ConfigError, match=r"--encode-fallback|--ec-consumer-zmq-addrs"):
        config(encode_fallback="raw", **fields)


async def test_without_the_fallback_no_media_goes_raw() -> None:
    async with fleet() as one:
        one.encode[0].always(answers(500, REFUSAL))
        answer = await one.ask(request())
        check_ours(one, answer, 502, "encode")
        assert answer.header("x-epd-degraded") is None
        assert one.counts[1:] == (0, 0)


async def test_the_callers_own_id_is_in_every_error() -> None:
    async with fleet(refused=["decode"], decode=0) as one:
        answer = await one.ask(request(), {"x-request-id": "mine-1"})
        check_ours(one, answer, 502, "decode")
        assert json.loads(answer.body)["error"]["request_id"] == "mine-1"
