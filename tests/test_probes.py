from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from epd_proxy.probes import Prober
from tests.test_admission import LeapingLoop


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": LeapingLoop}


class Fleet:
    """What the prober asks and tells: each probe takes ``takes`` seconds and says ``well``."""

    def __init__(self) -> None:
        self.takes: dict[str, float] = {}
        self.well: dict[str, bool | Exception] = {}
        self.begun: list[tuple[float, str]] = []
        self.reports: list[tuple[str, bool]] = []
        self.running: list[str] = []
        self.forgotten: list[str] = []
        self.on_forgotten: Callable[[str], object] = self.forgotten.append
        self.is_broken = False

    def times(self, one: str) -> list[float]:
        return [time for time, name in self.begun if name == one]

    async def probe(self, one: str) -> bool:
        self.begun.append((asyncio.get_running_loop().time(), one))
        assert one not in self.running
        self.running.append(one)
        try:
            await asyncio.sleep(self.takes.get(one, 0.001))
        finally:
            self.running.remove(one)
        well = self.well.get(one, True)
        if isinstance(well, Exception):
            raise well
        return well

    def report(self, one: str, ok: bool) -> bool:
        if self.is_broken:
            raise ZeroDivisionError
        self.reports.append((one, ok))
        return ok

    def forget(self, one: str) -> None:
        self.on_forgotten(one)


@asynccontextmanager
async def probing(
    fleet: Fleet,
    *members: str,
    interval: float = 10.0,
    evicted_ttl: float = 0.0,
    expires: bool = False,
) -> AsyncIterator[Prober[str]]:
    prober = Prober(
        fleet.probe,
        fleet.report,
        fleet.forget,
        interval=interval,
        evicted_ttl=evicted_ttl,
        rng=random.Random(5),
    )
    for one in members:
        prober.add(one, expires=expires)
    yield prober
    await prober.aclose()
    assert fleet.running == []


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


async def test_the_first_probe_comes_one_interval_after_the_instance_and_then_one_each() -> None:
    fleet = Fleet()
    async with probing(fleet, "a", "b"):
        await asyncio.sleep(1000)
    for one in "ab":
        waits = gaps([0.0, *fleet.times(one)])
        assert len(waits) > 90
        assert 8.999 < min(waits) < 9.2
        assert 10.8 < max(waits) < 11.001
    assert fleet.times("a")[0] != fleet.times("b")[0]


async def test_an_instance_that_comes_later_has_a_schedule_of_its_own() -> None:
    fleet = Fleet()
    async with probing(fleet, "a") as prober:
        await asyncio.sleep(500)
        prober.add("b")
        await asyncio.sleep(15)
    assert [509 < time < 511 for time in fleet.times("b")] == [True]


async def test_every_result_is_reported() -> None:
    fleet = Fleet()
    async with probing(fleet, "a"):
        await asyncio.sleep(12)
        fleet.well["a"] = False
        await asyncio.sleep(10)
        fleet.well["a"] = True
        await asyncio.sleep(10)
    assert fleet.reports == [("a", True), ("a", False), ("a", True)]


async def test_a_slow_probe_delays_nobody() -> None:
    fleet = Fleet()
    fleet.takes["slow"] = 1e6
    async with probing(fleet, "slow", "a"):
        await asyncio.sleep(200)
    assert len(fleet.times("slow")) == 1
    assert len(fleet.times("a")) >= 18


async def test_a_probe_that_outlasts_the_interval_makes_its_instance_skip_turns() -> None:
    fleet = Fleet()
    fleet.takes["a"] = 25
    async with probing(fleet, "a"):
        await asyncio.sleep(1000)
    # Never two at a time, which the fleet asserts, and never one right after the other.
    assert all(26 < gap < 34 for gap in gaps(fleet.times("a")))


async def test_the_time_that_a_probe_takes_is_part_of_the_interval() -> None:
    fleet = Fleet()
    fleet.takes["a"] = 8
    async with probing(fleet, "a"):
        await asyncio.sleep(1000)
    assert all(8.999 < gap < 11.001 for gap in gaps(fleet.times("a")))


async def test_an_interval_of_nought_is_never(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    async with probing(fleet, "a", interval=0) as prober:
        await asyncio.sleep(1000)
        prober.remove("a")
    assert fleet.begun == []
    assert caplog.records == []


async def test_an_instance_that_is_added_again_is_left_as_it_is() -> None:
    fleet = Fleet()
    async with probing(fleet, "a") as prober:
        for _ in range(100):
            prober.add("a")
            await asyncio.sleep(1)
    assert 8 < len(fleet.times("a")) < 12


async def test_removing_ends_the_probe_that_runs_and_reports_nothing() -> None:
    fleet = Fleet()
    fleet.takes["a"] = 5
    async with probing(fleet, "a", "b") as prober:
        await asyncio.sleep(12)
        assert fleet.running == ["a"]
        prober.remove("a")
        prober.remove("a")
        await asyncio.sleep(0)
        assert fleet.running == []
        await asyncio.sleep(100)
    assert "a" not in dict(fleet.reports)
    assert len(fleet.times("a")) == 1
    assert len(fleet.times("b")) > 8


async def test_an_instance_may_return_at_once_while_its_probe_still_ends() -> None:
    fleet = Fleet()
    fleet.takes["a"] = 5
    async with probing(fleet, "a") as prober:
        await asyncio.sleep(12)
        prober.remove("a")
        prober.add("a")
        await asyncio.sleep(18)
    assert fleet.reports == [("a", True)]


async def test_nothing_is_left_of_instances_that_were_removed() -> None:
    fleet = Fleet()
    async with probing(fleet) as prober:
        for number in range(200):
            prober.add(str(number))
            await asyncio.sleep(0.01)
            prober.remove(str(number))
            await asyncio.sleep(0.01)
        gc.collect()
        assert sum(isinstance(one, asyncio.Task) for one in gc.get_objects()) < 100


async def test_closing_waits_for_the_ends_of_all_probes() -> None:
    fleet = Fleet()
    fleet.takes["a"] = fleet.takes["b"] = 5
    async with probing(fleet, "a", "b") as prober:
        await asyncio.sleep(12)
        assert sorted(fleet.running) == ["a", "b"]
        prober.remove("b")
        await prober.aclose()
        assert fleet.running == []
        await prober.aclose()
    assert fleet.reports == []


async def test_a_bug_in_the_probe_is_a_failure_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = Fleet()
    fleet.well["a"] = fleet.well["b"] = KeyError("status")
    async with probing(fleet, "a", "b"):
        await asyncio.sleep(25)
        fleet.well["b"] = ValueError("number")
        await asyncio.sleep(10)
        fleet.well["a"] = True
        await asyncio.sleep(10)
    assert [ok for one, ok in fleet.reports if one == "a"] == [False, False, False, True]
    logged = [(record.levelno, record.exc_info and record.exc_info[0]) for record in caplog.records]
    assert logged == [(logging.ERROR, KeyError), (logging.ERROR, ValueError)]


async def test_a_bug_in_what_is_told_shows_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    fleet.is_broken = True
    async with probing(fleet, "a"):
        await asyncio.sleep(12)
    assert "'a' is not probed any more" in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_an_instance_that_stays_unhealthy_expires_and_is_probed_until_it_is_removed() -> None:
    fleet = Fleet()
    fleet.well["a"] = False
    async with probing(fleet, "a", "b", evicted_ttl=60, expires=True) as prober:
        await asyncio.sleep(110)
        probed = len(fleet.times("a"))
        prober.remove("a")
        await asyncio.sleep(1000)
    # Unhealthy since the first, so long enough with each that came 60 s later.
    due = [time for time in fleet.times("a") if time >= fleet.times("a")[0] + 60]
    assert 2 < len(due) < 6
    assert fleet.forgotten == ["a"] * len(due)
    assert len(fleet.times("a")) == probed
    assert len(fleet.times("b")) > 90


async def test_the_time_to_live_begins_anew_with_each_eviction() -> None:
    fleet = Fleet()
    fleet.well["a"] = False
    async with probing(fleet, "a", evicted_ttl=60, expires=True):
        await asyncio.sleep(55)
        fleet.well["a"] = True
        await asyncio.sleep(15)
        fleet.well["a"] = False
        await asyncio.sleep(50)
        assert fleet.forgotten == []
        await asyncio.sleep(50)
    assert "a" in fleet.forgotten


@pytest.mark.parametrize(("evicted_ttl", "expires"), [(60, False), (0, True)])
async def test_without_a_time_to_live_an_instance_is_probed_for_ever(
    evicted_ttl: float, expires: bool
) -> None:
    fleet = Fleet()
    fleet.well["a"] = False
    async with probing(fleet, "a", evicted_ttl=evicted_ttl, expires=expires):
        await asyncio.sleep(5000)
    assert fleet.forgotten == []
    assert len(fleet.times("a")) > 450


async def test_whoever_is_told_of_an_expiry_may_remove_the_instance_and_add_it_later() -> None:
    fleet = Fleet()
    fleet.well["a"] = False
    async with probing(fleet, "a", evicted_ttl=60, expires=True) as prober:
        fleet.on_forgotten = prober.remove
        await asyncio.sleep(200)
        before = len(fleet.times("a"))
        assert before < 10
        prober.add("a")
        await asyncio.sleep(100)
    assert len(fleet.times("a")) - before > 8
