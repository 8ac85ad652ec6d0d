"""
Failures after the first byte: a broken answer is broken for the caller too, a clean one is clean.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from tests.faults.callers import Answer
from tests.faults.engines import (
    ABORT,
    CHUNKED,
    CONTENT,
    DONE,
    LAST_CHUNK,
    ROLE,
    STREAM,
    Act,
    chunk,
    close,
    error_event,
    hang,
    head,
    pause,
    plays,
    reset,
    streams,
    until,
)
from tests.faults.fleet import Fleet, fleet, request

DECODE_ALONE: dict[str, Any] = {"encode": 0, "prefill": 0}

JSON = "content-type: application/json"
EVENT_STREAM = "content-type: text/event-stream"
SENT = ROLE + CONTENT

# How an answer begins, and what of it goes out before it breaks off.
BEGINNINGS: dict[str, tuple[bool, bytes, bytes]] = {
    "stream": (True, STREAM + chunk(ROLE) + chunk(CONTENT), SENT),
    "half a chunk": (True, STREAM + chunk(ROLE) + b"fff\r\n" + CONTENT, SENT),
    "stream with a length": (True, head(200, EVENT_STREAM, "content-length: 9999") + SENT, SENT),
    "json": (False, head(200, JSON, "content-length: 99") + b'{"choices":', b'{"choices":'),
    "json in chunks": (False, head(200, JSON, CHUNKED) + chunk(b'{"choices":'), b'{"choices":'),
}
BEGINNING = pytest.mark.parametrize("beginning", BEGINNINGS)
ENDS: dict[str, Act] = {"reset": reset, "close": close}


async def broken(one: Fleet, beginning: str, end: Act) -> Answer:
    """What the caller gets of an answer that ends so once all that was sent has been received."""
    stream, start, body = BEGINNINGS[beginning]
    received = asyncio.Event()
    one.decode[0].always(plays(start, until(received), end))
    caller = await one.asked(request(stream))
    await caller.until(lambda: caller.body == body)
    received.set()
    return await caller.answer()


@BEGINNING
@pytest.mark.parametrize("end", ENDS)
async def test_an_answer_that_breaks_off_is_a_cut_transfer(beginning: str, end: str) -> None:
    async with fleet() as one:
        answer = await broken(one, beginning, ENDS[end])
        assert answer.status == 200
        assert not answer.is_whole
        # No last chunk, no [DONE], no JSON of ours.
        assert answer.body == BEGINNINGS[beginning][2]
        assert not answer.raw.endswith(LAST_CHUNK)
        assert one.counts == (1, 1, 1)


@BEGINNING
async def test_one_line_in_the_log_says_how_many_bytes_had_gone(beginning: str) -> None:
    async with fleet(**DECODE_ALONE) as one:
        answer = await broken(one, beginning, reset)
        await one.idle()
        (line,) = one.log.own
        assert re.search(rf"\b{len(BEGINNINGS[beginning][2])} bytes\b", line)
        assert (answer.header("x-request-id") or "?") in line
        assert one.decode[0].url in line


async def test_a_broken_answer_without_a_length_is_cut_where_the_break_can_be_seen() -> None:
    async with fleet(**DECODE_ALONE) as one:
        received = asyncio.Event()
        one.decode[0].always(plays(head(200, EVENT_STREAM) + SENT, until(received), reset))
        caller = await one.asked(request(True))
        await caller.until(lambda: caller.body == SENT)
        received.set()
        answer = await caller.answer()
        assert (answer.body, answer.is_whole) == (SENT, False)


@pytest.mark.parametrize(
    "events",
    [
        (ROLE, CONTENT),
        (ROLE, CONTENT, error_event(500), DONE),
        (ROLE, CONTENT, error_event(500)),
        (ROLE, CONTENT, ABORT, DONE),
    ],
    ids=["no [DONE]", "error", "error alone", "abort"],
)
async def test_a_clean_end_is_passed_on_clean_whatever_was_said(events: tuple[bytes, ...]) -> None:
    async with fleet(**DECODE_ALONE) as one:
        one.decode[0].always(streams(*events))
        answer = await one.ask(request(True))
        assert (answer.status, answer.is_whole) == (200, True)
        assert answer.body == b"".join(events)
        assert one.counts == (0, 0, 1)


@BEGINNING
async def test_silence_beyond_the_idle_limit_is_a_cut_transfer(beginning: str) -> None:
    async with fleet(**DECODE_ALONE, idle_timeout=0.2) as one:
        answer = await broken(one, beginning, hang)
        assert (answer.status, answer.is_whole) == (200, False)
        assert answer.body == BEGINNINGS[beginning][2]
        assert 0.15 < answer.seconds < 2
        async with asyncio.timeout(1):
            await one.decode[0].calls[0].gone()
        assert len(one.log.own) == 1


async def test_a_slow_stream_is_not_cut_however_long_it_lasts() -> None:
    async with fleet(
        **DECODE_ALONE, idle_timeout=0.4, first_byte_timeout=0.4, stream_guard=0.4
    ) as one:
        slow = [step for _ in range(8) for step in (CONTENT, pause(0.1))]
        one.decode[0].always(streams(ROLE, *slow, DONE))
        answer = await one.ask(request(True))
        assert answer.is_whole
        assert answer.body == ROLE + CONTENT * 8 + DONE
        assert answer.seconds > 0.5


async def test_comments_keep_a_stream_from_being_silent() -> None:
    async with fleet(**DECODE_ALONE, idle_timeout=0.4) as one:
        slow = [step for _ in range(6) for step in (b": keep-alive\n\n", pause(0.1))]
        one.decode[0].always(streams(ROLE, CONTENT, *slow, DONE))
        answer = await one.ask(request(True))
        assert answer.is_whole
        assert answer.body.endswith(DONE)


async def test_an_idle_limit_of_zero_waits_for_ever() -> None:
    more = asyncio.Event()
    async with fleet(**DECODE_ALONE, idle_timeout=0) as one:
        one.decode[0].always(streams(ROLE, CONTENT, until(more), DONE))
        caller = await one.asked(request(True))
        await caller.until(lambda: caller.body == SENT)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await caller.answer()
        more.set()
        assert (await caller.answer()).is_whole


async def test_a_caller_who_reads_slowly_is_not_an_idle_engine() -> None:
    body = b"x" * (16 << 20)
    async with fleet(**DECODE_ALONE, idle_timeout=0.2) as one:
        start = head(200, JSON, f"content-length: {len(body)}")
        one.decode[0].always(plays(start, body))
        caller = await one.caller(receive_buffer=4096)
        await caller.ask(request())
        assert await caller.head() == 200
        await asyncio.sleep(0.5)
        answer = await caller.answer()
        assert (len(answer.body), answer.is_whole) == (len(body), True)


async def test_the_instance_is_free_after_a_break() -> None:
    async with fleet() as one:
        await broken(one, "stream", reset)
        await one.idle()
        one.decode[0].always(streams(ROLE, CONTENT, DONE))
        assert (await one.ask(request(True))).is_whole
