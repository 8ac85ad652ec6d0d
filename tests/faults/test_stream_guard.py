"""
Streams that die before anything of value: held back, done again, or answered as what they are.
"""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import pytest

from tests.faults.engines import (
    ABORT,
    CHUNKED,
    COMPLETION,
    CONTENT,
    DONE,
    KEEP_ALIVE,
    LAST_CHUNK,
    ROLE,
    STOP,
    STREAM,
    Act,
    chunk,
    close,
    delta,
    error_event,
    event,
    good,
    hang,
    head,
    pause,
    plays,
    reset,
    streams,
    until,
)
from tests.faults.fleet import Fleet, fleet, request
from tests.faults.test_before_first_byte import check_good, check_ours

NEVER = 60
"""Seconds for which a stream is held back: longer than a test may last."""

DECODE_ALONE: dict[str, Any] = {"encode": 0, "prefill": 0}

# Streams without anything of value, and the status each one comes to.
STILLBORN: dict[str, tuple[Act, int]] = {
    "error first": (streams(error_event(500), DONE), 500),
    "error after the role": (streams(ROLE, error_event(500), DONE), 500),
    "error without a code": (streams(ROLE, event({"error": {"message": "no"}}), DONE), 502),
    "error that is a string": (streams(event({"error": "no"}), DONE), 502),
    "error with no status": (streams(ROLE, error_event("server_error"), DONE), 502),
    "error with a good status": (streams(ROLE, error_event(200), DONE), 502),
    "error with half a status": (streams(ROLE, error_event(50), DONE), 502),
    "error with true": (streams(ROLE, error_event(True), DONE), 502),
    "error with a huge number": (streams(ROLE, error_event(10**30), DONE), 502),
    "role and the end": (streams(ROLE, DONE), 502),
    "role and no end": (streams(ROLE), 502),
    "role and a reset": (streams(ROLE, end=reset), 502),
    "role and a close": (streams(ROLE, end=close), 502),
    "half an event": (streams(ROLE, CONTENT[:40], end=close), 502),
    "abort": (streams(ROLE, ABORT, DONE), 502),
    "abort first": (streams(ABORT, DONE), 502),
    "the end alone": (streams(DONE), 502),
    "nothing": (streams(), 502),
    "comments": (streams(KEEP_ALIVE, KEEP_ALIVE), 502),
    "comments and an error": (streams(KEEP_ALIVE, ROLE, KEEP_ALIVE, error_event(500)), 500),
}
KINDS = pytest.mark.parametrize("kind", STILLBORN)
STREAMED = pytest.mark.parametrize("stream", [False, True])


async def answered_with(one: Fleet, act: Act, stream: bool = True) -> bytes:
    """The body that a caller gets of a decode engine's answer, which must be a whole 200."""
    one.decode[0].then(act)
    answer = await one.ask(request(stream))
    assert (answer.status, answer.is_whole) == (200, True)
    return answer.body


# What does not live.


@STREAMED
@KINDS
async def test_a_stillborn_stream_is_redone_from_the_start_and_seen_by_nobody(
    kind: str, stream: bool
) -> None:
    async with fleet() as one:
        one.decode[0].then(STILLBORN[kind][0])
        check_good(await one.ask(request(stream)), stream)
        assert one.counts == (2, 2, 2)


@STREAMED
@KINDS
async def test_a_stillborn_stream_beyond_its_redos_is_an_error_with_a_status(
    kind: str, stream: bool
) -> None:
    act, status = STILLBORN[kind]
    async with fleet() as one:
        one.decode[0].always(act)
        answer = await one.ask(request(stream))
        assert answer.status == status
        assert answer.is_json
        assert answer.is_whole
        assert answer.error
        assert b"data:" not in answer.body
        assert one.counts == (2, 2, 2)


async def test_without_an_error_event_the_error_is_ours() -> None:
    async with fleet(decode_retries=0) as one:
        one.decode[0].always(streams(ROLE, DONE))
        check_ours(one, await one.ask(request(True)), 502, "decode")


@pytest.mark.parametrize("code", [400, 404, 422, 429, 501, 529])
async def test_an_error_event_that_blames_the_request_is_answered_with_its_code_at_once(
    code: int,
) -> None:
    async with fleet(decode=2) as one:
        one.decode[0].always(streams(error_event(code, "rank 7 is out of range"), DONE))
        answer = await one.ask(request(True))
        assert (answer.status, answer.is_json) == (code, True)
        assert answer.error["message"] == "rank 7 is out of range"
        assert one.counts == (1, 1, 1)


async def test_an_error_event_with_503_goes_to_another_decode_server_with_a_new_handle() -> None:
    async with fleet(decode=2) as one:
        one.decode[0].always(streams(error_event(503), DONE))
        check_good(await one.ask(request(True)), True)
        assert one.each("decode") == [1, 1]
        assert one.counts[1] == 2


async def test_an_error_event_with_503_of_the_only_decode_server_is_a_503_at_once() -> None:
    async with fleet() as one:
        one.decode[0].always(streams(error_event(503, "queue full"), DONE))
        answer = await one.ask(request(True))
        assert (answer.status, answer.is_json) == (503, True)
        assert answer.error["message"] == "queue full"
        assert one.counts == (1, 1, 1)


async def test_a_redo_after_a_stillborn_stream_avoids_its_server() -> None:
    async with fleet(decode=2) as one:
        one.decode[0].always(streams(ROLE, DONE))
        check_good(await one.ask(request(True)), True)
        assert one.each("decode") == [1, 1]


@pytest.mark.parametrize(
    "framed",
    [
        error_event(500).replace(b"\n", b"\r\n"),
        error_event(500).replace(b"data: ", b"data:"),
        b"event: error\nid: 7\n" + error_event(500),
        error_event(500).replace(b': {"message"', b':\ndata: {"message"'),
        KEEP_ALIVE.strip() + b"\n" + error_event(500),
        error_event(500, "描述 \u2028 é".encode().decode()),
    ],
    ids=["crlf", "no blank", "other fields", "two lines", "comment inside", "other scripts"],
)
async def test_an_error_event_is_known_in_every_framing(framed: bytes) -> None:
    async with fleet(**DECODE_ALONE, decode_retries=0) as one:
        one.decode[0].always(streams(framed, DONE))
        answer = await one.ask(request(True))
        assert (answer.status, answer.is_json) == (500, True)


async def test_an_error_event_is_known_in_pieces_of_one_byte() -> None:
    async with fleet(**DECODE_ALONE, decode_retries=0) as one:
        pieces = [bytes([byte]) for byte in ROLE + error_event(500)]
        turns = [step for piece in pieces for step in (piece, pause(0))]
        one.decode[0].always(streams(*turns))
        assert (await one.ask(request(True))).status == 500


async def test_an_error_event_is_enough_and_the_end_not_waited_for() -> None:
    async with fleet(**DECODE_ALONE, decode_retries=0, stream_guard=NEVER) as one:
        one.decode[0].always(streams(ROLE, error_event(500), end=hang))
        assert (await one.ask(request(True))).status == 500
        async with asyncio.timeout(1):
            await one.decode[0].calls[0].gone()


# What lives.


@pytest.mark.parametrize(
    "value",
    [
        CONTENT,
        delta(reasoning="hm"),
        delta(reasoning_content="hm"),
        delta(tool_calls=[{"index": 0, "id": "c1", "type": "function", "function": {"name": "f"}}]),
        STOP,
        delta("length", content=""),
        delta("tool_calls"),
        delta("repetition"),
        event(b'{"choices": [{"delta": {"content": "x'),
        event(b"\xff"),
        event(b"7"),
        event(b'{"choices": 7}'),
    ],
    ids=[
        "content",
        "reasoning",
        "older reasoning",
        "tool call",
        "stop",
        "length",
        "tool_calls",
        "repetition",
        "half JSON",
        "byte 0xFF",
        "a number",
        "odd choices",
    ],
)
async def test_the_first_thing_of_value_lets_all_bytes_go(value: bytes) -> None:
    async with fleet(**DECODE_ALONE, stream_guard=NEVER, decode_retries=0) as one:
        sent = KEEP_ALIVE + ROLE + value
        one.decode[0].always(streams(KEEP_ALIVE, ROLE, value, end=hang))
        caller = await one.asked(request(True))
        await caller.until(lambda: len(caller.body) >= len(sent))
        assert caller.status == 200
        assert caller.body == sent


@pytest.mark.parametrize(
    "events",
    [
        (ROLE, CONTENT, STOP, DONE),
        (KEEP_ALIVE, KEEP_ALIVE, ROLE, CONTENT, KEEP_ALIVE, STOP, DONE),
        (ROLE, STOP, DONE),
        (ROLE, CONTENT, ABORT, DONE),
        (ROLE, CONTENT, error_event(500), DONE),
        (ROLE, CONTENT),
        (ROLE, STOP),
        (ROLE.replace(b"\n", b"\r\n"), CONTENT.replace(b"\n", b"\r\n")),
        (ROLE, CONTENT.replace("é".encode(), b"\xff"), b"x" * 200_000),
        (ROLE + CONTENT + STOP + DONE,),
    ],
    ids=range(10),
)
@STREAMED
async def test_what_goes_out_is_exactly_what_decode_sent(
    events: tuple[bytes, ...], stream: bool
) -> None:
    async with fleet(**DECODE_ALONE) as one:
        assert await answered_with(one, streams(*events), stream) == b"".join(events)
        assert one.counts == (0, 0, 1)


async def test_a_held_stream_cut_anywhere_goes_out_whole() -> None:
    async with fleet(**DECODE_ALONE) as one:
        pieces = [bytes([byte]) for byte in good(True)]
        turns = [step for piece in pieces for step in (piece, pause(0))]
        assert await answered_with(one, streams(*turns)) == good(True)


async def test_after_the_first_value_nothing_is_held_back() -> None:
    more = asyncio.Event()
    async with fleet(**DECODE_ALONE, stream_guard=NEVER) as one:
        half = STOP[:30]
        one.decode[0].always(streams(ROLE, CONTENT, until(more), half, end=hang))
        caller = await one.asked(request(True))
        await caller.until(lambda: caller.body.endswith(CONTENT))
        more.set()
        await caller.until(lambda: caller.body.endswith(half))
        assert caller.body == ROLE + CONTENT + half


# The limits of holding back.


async def test_the_head_is_held_back_too() -> None:
    seen, more = asyncio.Event(), asyncio.Event()

    async def mark(call: Any) -> None:
        seen.set()

    async with fleet(**DECODE_ALONE, stream_guard=NEVER) as one:
        one.decode[0].always(streams(ROLE, mark, until(more), CONTENT, end=hang))
        caller = await one.asked(request(True))
        await seen.wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await caller.head()
        more.set()
        assert await caller.head() == 200


async def test_a_stream_is_held_back_no_longer_than_the_guard_says() -> None:
    async with fleet(**DECODE_ALONE, stream_guard=0.2) as one:
        late = asyncio.Event()
        one.decode[0].always(streams(ROLE, until(late), error_event(500), DONE))
        began = asyncio.get_running_loop().time()
        caller = await one.asked(request(True))
        await caller.until(lambda: caller.body == ROLE)
        assert 0.15 < asyncio.get_running_loop().time() - began < 2
        late.set()
        answer = await caller.answer()
        assert (answer.status, answer.is_whole) == (200, True)
        assert answer.body == ROLE + error_event(500) + DONE
        assert one.counts == (0, 0, 1)


async def test_the_guards_time_runs_from_decodes_head_whatever_comes_meanwhile() -> None:
    async with fleet(**DECODE_ALONE, stream_guard=0.2) as one:
        trickle = [step for _ in range(60) for step in (KEEP_ALIVE, ROLE, pause(0.05))]
        one.decode[0].always(streams(*trickle))
        began = asyncio.get_running_loop().time()
        caller = await one.asked(request(True))
        assert await caller.head() == 200
        assert asyncio.get_running_loop().time() - began < 2


async def test_waiting_for_decodes_head_is_not_part_of_the_guards_time() -> None:
    async with fleet(**DECODE_ALONE, stream_guard=0.3, decode_retries=0) as one:
        one.decode[0].always(plays(pause(0.5), streams(ROLE, error_event(500), DONE)))
        assert (await one.ask(request(True))).status == 500


@pytest.mark.parametrize(
    "steps",
    [[ROLE] * 700, [KEEP_ALIVE] * 6000, [b"data: " + b"x" * 70_000], [delta(role="x" * 70_000)]],
    ids=["events", "comments", "one without an end", "one"],
)
async def test_a_stream_is_held_back_to_64_kib_at_most(steps: list[bytes]) -> None:
    async with fleet(**DECODE_ALONE, stream_guard=NEVER) as one:
        one.decode[0].always(plays(STREAM, chunk(b"".join(steps)), hang))
        caller = await one.asked(request(True))
        await caller.until(lambda: len(caller.body) >= sum(map(len, steps)))
        assert caller.status == 200
        assert caller.body == b"".join(steps)


async def test_a_guard_of_zero_holds_nothing_back() -> None:
    more = asyncio.Event()
    async with fleet(**DECODE_ALONE, stream_guard=0) as one:
        one.decode[0].always(streams(until(more), ROLE, error_event(500), DONE))
        caller = await one.asked(request(True))
        assert await caller.head() == 200
        more.set()
        answer = await caller.answer()
        assert answer.is_whole
        assert answer.body == ROLE + error_event(500) + DONE
        assert one.counts == (0, 0, 1)


PACKED = gzip.compress(error_event(500))


@pytest.mark.parametrize(
    ("start", "body"),
    [
        (head(200, "content-type: text/event-stream", "content-encoding: gzip", CHUNKED), PACKED),
        (head(200, "content-type: application/json", CHUNKED), error_event(500)),
        (head(200, "content-type: text/plain", CHUNKED), error_event(500)),
        (head(200, CHUNKED), error_event(500)),
        (head(206, "content-type: text/event-stream", CHUNKED), error_event(500)),
    ],
    ids=["compressed", "json", "text", "of no type", "not 200"],
)
@STREAMED
async def test_nothing_but_plain_event_streams_is_held_back(
    start: bytes, body: bytes, stream: bool
) -> None:
    more = asyncio.Event()
    async with fleet(**DECODE_ALONE, stream_guard=NEVER) as one:
        one.decode[0].always(plays(start, until(more), chunk(body), LAST_CHUNK))
        caller = await one.asked(request(stream), {"accept-encoding": "gzip"})
        assert await caller.head() in (200, 206)
        more.set()
        answer = await caller.answer()
        assert (answer.body, answer.is_whole) == (body, True)
        assert one.counts == (0, 0, 1)


@pytest.mark.parametrize(
    "kind", ["text/event-stream", "Text/Event-Stream; charset=UTF-8", "text/event-stream ;x=y"]
)
async def test_event_streams_are_known_in_every_spelling(kind: str) -> None:
    async with fleet(**DECODE_ALONE, decode_retries=0) as one:
        start = head(200, f"content-type: {kind}", CHUNKED)
        one.decode[0].always(plays(start, chunk(ROLE), chunk(error_event(500)), LAST_CHUNK))
        assert (await one.ask(request(True))).status == 500


async def test_an_unstreamed_answer_to_a_streamed_request_is_passed_on() -> None:
    async with fleet(**DECODE_ALONE, stream_guard=NEVER) as one:
        body = plays(head(200, "content-type: application/json", CHUNKED), chunk(COMPLETION))
        assert await answered_with(one, plays(body, LAST_CHUNK)) == COMPLETION


async def test_a_stream_that_ends_with_its_connection_is_whole() -> None:
    async with fleet(**DECODE_ALONE) as one:
        start = head(200, "content-type: text/event-stream")
        assert await answered_with(one, plays(start, good(True), close)) == good(True)
