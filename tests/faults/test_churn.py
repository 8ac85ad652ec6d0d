"""
Callers killed at random moments against a small pool: afterwards every slot is free.
"""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from tests.faults.callers import LEAVINGS
from tests.faults.engines import (
    CONTENT,
    DONE,
    LAST_CHUNK,
    ROLE,
    STREAM,
    Act,
    Call,
    Engine,
    answers,
    chunk,
    close,
    reset,
    streams,
)
from tests.faults.fleet import STAGES, Fleet, fleet, request
from tests.faults.test_before_first_byte import check_good

SECONDS = 3
CALLERS = 16
CONNECTIONS = 4


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def wavering(well: Act, chance: random.Random, *, fails: bool) -> Act:
    """An engine that takes a moment, and, if it ``fails``, sometimes does."""

    async def act(call: Call) -> None:
        await asyncio.sleep(chance.random() * 0.01)
        faults = [reset, close, answers(500, b"{}"), answers(400, b"{}"), streams(ROLE, DONE)]
        await (chance.choice(faults) if fails and chance.random() < 0.2 else well)(call)

    return act


async def stream_slowly(call: Call) -> None:
    for piece in (STREAM, chunk(ROLE), chunk(CONTENT), chunk(CONTENT), chunk(DONE), LAST_CHUNK):
        if not call.peer.is_gone:
            call.peer.send(piece)
            await asyncio.sleep(0.003)


async def come_and_go(one: Fleet, chance: random.Random, end: float) -> None:
    """One caller after another, each of which leaves at some moment, in some way."""
    while asyncio.get_running_loop().time() < end:
        caller = await one.asked(request(chance.random() < 0.5, images=chance.randrange(3)))
        patience = chance.choice([0.01, 0.03, 0.1, 0.3, 1.0])
        try:
            async with asyncio.timeout(patience * chance.random()):
                await caller.answer()
        except TimeoutError:
            how = chance.choice(LEAVINGS)
            caller.leave(how)
            if how == "half-close":
                # It may still read, and sees the proxy hang up.
                await caller.answer()
        await caller.close()


async def closed(one: Fleet, engines: list[Engine]) -> None:
    """Until the proxy has let go of every connection to an engine."""
    await one.proxy.aclose()
    async with asyncio.timeout(1):
        for engine in engines:
            await engine.all_gone()
    # The transports close their sockets in the next turn.
    await asyncio.sleep(0.05)
    assert [engine.open_connections for engine in engines] == [0] * len(engines)


@pytest.mark.parametrize("fails", [False, True], ids=["sound engines", "failing engines"])
async def test_after_callers_came_and_went_at_random_every_slot_is_free(fails: bool) -> None:
    chance = random.Random(5)
    async with fleet(
        encode=2, decode=2, max_connections=CONNECTIONS, encode_selector="round-robin"
    ) as one:
        engines = [engine for stage in STAGES for engine in one.engines[stage]]
        check_good(await one.ask(request()), False)
        await closed(one, engines)
        before = open_files()
        for engine in engines:
            engine.always(wavering(engine.answer, chance, fails=fails))
        one.decode[0].always(wavering(stream_slowly, chance, fails=fails))
        end = asyncio.get_running_loop().time() + SECONDS
        async with asyncio.TaskGroup() as group:
            for _ in range(CALLERS):
                group.create_task(come_and_go(one, chance, end))
        await one.idle()
        # Enough was going on for this to mean something.
        assert min(one.counts) > 20
        if not fails:
            assert [line for line in one.log.lines if "503" not in line] == []

        for engine in engines:
            engine.restore()
        for _ in range(10):
            found = await asyncio.gather(*[one.ask(request()) for _ in range(CONNECTIONS)])
            for answer in found:
                check_good(answer, False)
        assert set(one.loads) == {0}
        assert all(engine.open_connections <= CONNECTIONS for engine in engines)

        await closed(one, engines)
        assert open_files() <= before
