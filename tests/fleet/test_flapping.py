"""
Instances that come and go a hundred times a second under two hundred callers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from epd_proxy import EPDProxy
from epd_proxy.registry import API, Kind, Spec
from tests.faults.fleet import STAGES, Log, config, serving
from tests.fleet.engines import Living, living, slowly
from tests.fleet.load import Load, Outcome, load, report
from tests.fleet.proxies import KEY, Line, line, serve

CALLERS = 200
CHANGES_A_SECOND = 100
CHANGES = 200
FLAPPERS = 4
TIMES = {"encode": 0.3, "prefill": 0.2, "decode": 0.6}
"""Seconds that an engine takes: two hundred callers must not be more than one core can hold."""

Change = Callable[[Living], Awaitable[None]]


class Flapping:
    """Adds and removes engines, and remembers when a role may have had none."""

    def __init__(self, engines: Sequence[Living], settled: Sequence[Living]) -> None:
        self.engines = engines
        self.settled = settled
        self._absent: set[Living] = set()
        self._empty_since: dict[str, float] = {}
        self._empty: list[tuple[str, float, float]] = []
        self.changes = 0
        self.seconds = 0.0

    async def flap(self, own: Sequence[Living], add: Change, remove: Change, seed: int) -> None:
        """Its share of the changes, of engines that nobody else changes."""
        chance = random.Random(seed)
        now = asyncio.get_running_loop().time
        turn = now()
        for _ in range(CHANGES // FLAPPERS):
            engine = chance.choice(own)
            if engine in self._absent:
                engine.unseal()
                await add(engine)
                self._absent.discard(engine)
            else:
                self._absent.add(engine)
                self._note(engine.role)
                await remove(engine)
                engine.seal()
            self._note(engine.role)
            self.changes += 1
            turn += FLAPPERS / CHANGES_A_SECOND
            await asyncio.sleep(max(0.0, turn - now()))

    def _note(self, role: str) -> None:
        now = asyncio.get_running_loop().time()
        members = [engine for engine in self.engines if engine.role == role]
        stays = any(engine.role == role for engine in self.settled)
        is_empty = not stays and self._absent.issuperset(members)
        if is_empty:
            self._empty_since.setdefault(role, now)
        elif role in self._empty_since:
            self._empty.append((role, self._empty_since.pop(role), now))

    def is_honest(self, outcome: Outcome) -> bool:
        """Whether a 503 says of a role that nobody is ready in it, and that was so."""
        answer = outcome.answer
        if answer.status != 503 or not answer.is_whole or answer.header("retry-after") is None:
            return False
        role = answer.error["stage"]
        empty = [
            *self._empty,
            *((r, since, float("inf")) for r, since in self._empty_since.items()),
        ]
        return any(
            role == r and begin <= outcome.ended and outcome.began <= end for r, begin, end in empty
        )


@asynccontextmanager
async def flapping(staying: int) -> AsyncIterator[Flapping]:
    """Three engines of each role, of which so many stay."""
    every = [Living(role, slowly(role, TIMES[role])) for role in STAGES for _ in range(3)]
    settled = [engine for number, engine in enumerate(every) if number % 3 < staying]
    async with living(*every):
        yield Flapping([engine for engine in every if engine not in settled], settled)


def check(one: Flapping, found: Load, staying: int) -> None:
    late = [call for engine in one.engines for call in engine.late]
    report(
        changes=one.changes,
        seconds=f"{one.seconds:.1f}",
        statuses=dict(found.statuses),
        late=len(late),
        calls=sum(len(engine.calls) for engine in one.engines),
    )
    assert late == []
    others = [outcome for outcome in found.bad if staying or not one.is_honest(outcome)]
    assert others == []
    assert found.statuses[200] > CALLERS
    assert sum(len(engine.calls) for engine in one.engines) > CALLERS
    # A machine with other work to do may be slower, but not so slow that this means nothing.
    assert one.changes / one.seconds > CHANGES_A_SECOND / 4


def specs(engines: Sequence[Living]) -> list[Spec]:
    return [Spec(role=Kind(engine.role), url=engine.url) for engine in engines]


async def run(one: Flapping, url: str, changes: Sequence[tuple[Change, Change]]) -> Load:
    """Callers and flapping together, for as long as there are changes to be made."""
    async with load(url, CALLERS) as found:
        await found.more(20)
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for seed, (add, remove) in enumerate(changes):
                group.create_task(one.flap(one.engines[seed::FLAPPERS], add, remove, seed))
        one.seconds = asyncio.get_running_loop().time() - began
    return found


@pytest.mark.parametrize("staying", [1, 0], ids=["one of each stays", "all come and go"])
async def test_flapping_in_the_registry_gives_200_or_honest_503_and_sends_nothing_to_the_removed(
    staying: int,
) -> None:
    async with flapping(staying) as one, AsyncExitStack() as stack:
        proxy = EPDProxy(
            config=config(dynamic_registration=True, admin_api_key=KEY, probe_interval=0.05)
        )
        proxy.registry.sync(API, specs([*one.engines, *one.settled]))

        async def add(engine: Living) -> None:
            proxy.registry.register(API, *specs([engine]))

        async def remove(engine: Living) -> None:
            assert proxy.registry.deregister(API, engine.url)

        url = await stack.enter_async_context(serving(proxy))
        log = stack.enter_context(Log())
        found = await run(one, url, [(add, remove)] * FLAPPERS)
        check(one, found, staying)
        assert {instance.load for instance in proxy.registry.instances()} == {0}
        assert [line for line in log.lines if " 503 " not in line] == []


@pytest.mark.parametrize("staying", [1, 0], ids=["one of each stays", "all come and go"])
async def test_flapping_by_the_api_gives_200_or_honest_503_and_sends_nothing_to_the_removed(
    staying: int,
) -> None:
    async with (
        flapping(staying) as one,
        serve("--dynamic-registration", "--probe-interval", "0.05", busy=True) as proxy,
        AsyncExitStack() as stack,
    ):
        lines = [await stack.enter_async_context(line(proxy.url)) for _ in range(FLAPPERS)]
        for engine in (*one.settled, *one.engines):
            assert await lines[0].register(engine.role, engine.url) == (200, {"registered": True})
        found = await run(one, proxy.url, [_changes(each) for each in lines])
        check(one, found, staying)


def _changes(api: Line) -> tuple[Change, Change]:
    async def add(engine: Living) -> None:
        assert await api.register(engine.role, engine.url) == (200, {"registered": True})

    async def remove(engine: Living) -> None:
        assert await api.remove(engine.url) == (200, {"removed": True})

    return add, remove
