"""
A caller who leaves frees the engines within a second; one who stalls holds them back.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import pytest

from epd_proxy.intake import IntakeProtocol
from tests.faults.callers import LEAVINGS, Caller, Leaving
from tests.faults.engines import (
    CHUNKED,
    CONTENT,
    ROLE,
    STREAM,
    Act,
    Call,
    answers,
    chunk,
    hang,
    head,
    plays,
    streams,
)
from tests.faults.fleet import SOON, STAGES, Fleet, fleet, request
from tests.faults.test_before_first_byte import check_good, until_stage

HOW = pytest.mark.parametrize("how", LEAVINGS)
STREAMED = pytest.mark.parametrize("stream", [False, True])

JSON = "content-type: application/json"
HALF = b'{"choices":'


@pytest.fixture(params=["auto", IntakeProtocol], ids=["uvicorn", "serve"], autouse=True)
def protocol(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As a host learns of a caller who leaves, and as ``serve`` does."""
    monkeypatch.setattr("tests.faults.fleet.PROTOCOL", request.param)
    return request.param


class Place(NamedTuple):
    """Where a request stands when its caller leaves."""

    stage: str
    act: Act
    stream: bool
    seen: bytes = b""
    """What the caller has got by then."""


PLACES = {
    "encode": Place("encode", hang, False),
    "encode, streamed": Place("encode", hang, True),
    "encode's body": Place("encode", plays(head(200, CHUNKED), chunk(HALF), hang), False),
    "prefill": Place("prefill", hang, False),
    "prefill, streamed": Place("prefill", hang, True),
    "prefill's body": Place("prefill", plays(head(200, CHUNKED), chunk(HALF), hang), True),
    "decode's head": Place("decode", hang, False),
    "decode's head, streamed": Place("decode", hang, True),
    "held by the guard": Place("decode", streams(ROLE, end=hang), True),
    "mid-stream": Place("decode", streams(ROLE, CONTENT, end=hang), True, ROLE + CONTENT),
    "unstreamed": Place(
        "decode", plays(head(200, JSON, "content-length: 99"), HALF, hang), False, HALF
    ),
    "decode's error": Place("decode", plays(head(400, "content-length: 99"), HALF, hang), False),
}


async def at(one: Fleet, place: Place) -> tuple[Caller, Call]:
    """A caller whose request has come to that place, and the call it waits for."""
    one.engines[place.stage][0].then(place.act)
    caller = await one.asked(request(place.stream))
    call = await one.engines[place.stage][0].call()
    await caller.until(lambda: caller.body == place.seen)
    return caller, call


async def gone(*calls: Call) -> None:
    """All their connections closed, soon enough."""
    async with asyncio.timeout(SOON):
        for call in calls:
            await call.gone()


async def check_no_harm(one: Fleet) -> None:
    """Nothing in progress, nothing to complain of, and the next caller is served."""
    await one.idle()
    check_good(await one.ask(request()), False)
    assert one.log.lines == []


@HOW
@pytest.mark.parametrize("place", PLACES)
async def test_a_caller_who_leaves_frees_the_engine_within_a_second(
    place: str, how: Leaving
) -> None:
    async with fleet() as one:
        caller, call = await at(one, PLACES[place])
        caller.leave(how)
        await gone(call)
        await one.idle()
        assert one.counts == until_stage(PLACES[place].stage)
        await check_no_harm(one)


@HOW
async def test_all_encode_calls_of_a_caller_who_leaves_end(how: Leaving) -> None:
    async with fleet(encode=3, encode_selector="round-robin") as one:
        for engine in one.encode:
            engine.then(hang)
        caller = await one.asked(request(images=3))
        calls = [await engine.call() for engine in one.encode]
        caller.leave(how)
        await gone(*calls)
        await check_no_harm(one)


@HOW
@pytest.mark.parametrize("stage", STAGES)
async def test_a_redo_is_not_begun_for_a_caller_who_has_left(stage: str, how: Leaving) -> None:
    left = asyncio.Event()

    async def fail_then(call: Call) -> None:
        await left.wait()
        await answers(500, b"{}")(call)

    async with fleet(encode=2, prefill=2, decode=2) as one:
        one.engines[stage][0].always(fail_then)
        caller = await one.asked(request())
        call = await one.engines[stage][0].call()
        caller.leave(how)
        await gone(call)
        left.set()
        await one.idle()
        assert one.counts == until_stage(stage)
        assert one.log.lines == []


@HOW
async def test_a_caller_who_leaves_while_sending_its_body_troubles_nobody(how: Leaving) -> None:
    async with fleet() as one:
        caller = await one.caller()
        await caller.ask(b'{"messages":', {"content-length": "1000"})
        assert (await one.get("/live")).status == 200
        caller.leave(how)
        await check_no_harm(one)
        assert one.counts == (1, 1, 1)


@HOW
async def test_a_caller_who_has_got_all_and_leaves_is_no_event(how: Leaving) -> None:
    async with fleet() as one:
        caller = await one.asked(request(True))
        assert (await caller.answer()).is_whole
        caller.leave(how)
        await check_no_harm(one)


@HOW
async def test_who_leaves_takes_nobody_else_along(how: Leaving) -> None:
    more = asyncio.Event()

    async def stream_slowly(call: Call) -> None:
        await plays(STREAM, chunk(ROLE), chunk(CONTENT))(call)
        await more.wait()
        await plays(chunk(CONTENT), b"0\r\n\r\n")(call)

    async with fleet() as one:
        one.decode[0].then(stream_slowly, stream_slowly)
        stays = await one.asked(request(True))
        await stays.until(lambda: stays.body == ROLE + CONTENT)
        leaves = await one.asked(request(True))
        await leaves.until(lambda: leaves.body == ROLE + CONTENT)
        leaves.leave(how)
        await gone(one.decode[0].calls[1])
        more.set()
        answer = await stays.answer()
        assert (answer.body, answer.is_whole) == (ROLE + CONTENT * 2, True)
        await check_no_harm(one)


# Callers who do not read.

PIECES = chunk(b"x" * 65536)
MOST = 48 << 20
"""More than the sockets on the way can hold, and much less than an endless answer."""


class Endless:
    """An answer without an end: how much of it has gone, and when it is held back."""

    def __init__(self) -> None:
        self.count = 0
        self.is_held = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        await plays(STREAM, chunk(CONTENT))(call)
        while not call.peer.is_gone and self.count < MOST:
            call.peer.send(PIECES)
            self.count += len(PIECES)
            try:
                async with asyncio.timeout(0.2):
                    await call.peer.drain()
            except TimeoutError:
                self.is_held.set()
                await call.peer.drain()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_who_stalls_holds_back_decode(stream: bool) -> None:
    endless = Endless()
    async with fleet(encode=0, prefill=0) as one:
        one.decode[0].always(endless)
        caller = await one.caller(receive_buffer=4096)
        await caller.ask(request(stream))
        assert await caller.head() == 200
        await endless.is_held.wait()
        held = endless.count
        assert held < MOST
        # Who reads on lets it go on.
        await caller.until(lambda: len(caller.body) > held + len(PIECES))
        assert endless.count > held


@HOW
async def test_a_caller_who_stalls_and_leaves_frees_decode(how: Leaving, protocol: Any) -> None:
    if how == "half-close" and protocol == "auto":
        pytest.skip("plain uvicorn does not tell of it before the bytes in its buffer have gone")
    endless = Endless()
    async with fleet(encode=0, prefill=0) as one:
        one.decode[0].then(endless)
        caller = await one.caller(receive_buffer=4096)
        await caller.ask(request(True))
        assert await caller.head() == 200
        await endless.is_held.wait()
        caller.leave(how)
        await gone(one.decode[0].calls[0])
        await check_no_harm(one)
