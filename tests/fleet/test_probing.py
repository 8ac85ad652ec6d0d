"""
Engines that fall ill while requests run, over real sockets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from epd_proxy import EPDProxy
from epd_proxy.registry import Role
from tests.driver import CHAT
from tests.faults.engines import answers, hang
from tests.faults.engines import until as waits_for
from tests.faults.fleet import config, request, serving
from tests.fleet.engines import Living, living
from tests.fleet.load import report
from tests.fleet.proxies import Line, line, until

TEXT = request(images=0)
FAILS = answers(500, b'{"error":{"message":"out of memory","type":"InternalServerError"}}')


class One:
    """A proxy in this process in front of decode engines, and a connection to it."""

    def __init__(self, proxy: EPDProxy, engines: Sequence[Living], api: Line) -> None:
        self.proxy = proxy
        self.engines = engines
        self.api = api

    @property
    def counts(self) -> list[int]:
        return [len(engine.calls) for engine in self.engines]

    def is_ready(self, engine: Living) -> bool:
        ready = self.proxy.registry.ready(Role.DECODE)
        return any(instance.url == engine.url for instance in ready)

    async def changed(self) -> None:
        """Until others are ready than now."""
        before = self.proxy.registry.ready(Role.DECODE)
        while self.proxy.registry.ready(Role.DECODE) is before:
            await self.proxy.registry.changed()

    async def chat(self, number: int) -> list[int]:
        """So many requests, one after another: their statuses."""
        return [await self.api.chat(TEXT) for _ in range(number)]


@asynccontextmanager
async def proxied(number: int, **fields: Any) -> AsyncIterator[One]:
    engines = [Living("decode") for _ in range(number)]
    async with living(*engines):
        proxy = EPDProxy(config=config(decode=[engine.url for engine in engines], **fields))
        async with serving(proxy) as url, line(url) as api:
            assert await api.chat(TEXT) == 200
            yield One(proxy, engines, api)


@pytest.mark.parametrize("ill", [hang, answers(503), answers(204)], ids=["silent", "503", "204"])
async def test_an_engine_is_out_after_three_failed_probes_and_back_after_one_good_one(
    ill: Any,
) -> None:
    async with proxied(3, probe_interval=0.05, probe_timeout=0.1, fail_threshold=3) as one:
        engine, *others = one.engines
        await engine.probed(2)
        engine.health = ill
        before = engine.probes
        await one.changed()
        # One that had been answered well may have been under way.
        assert engine.probes - before in (3, 4)
        assert not one.is_ready(engine)
        assert all(one.is_ready(other) for other in others)
        calls = len(engine.calls)
        assert await one.chat(12) == [200] * 12
        assert len(engine.calls) == calls

        engine.health = answers(200)
        bad = engine.probes
        await one.changed()
        assert engine.probes - bad in (1, 2)
        assert one.is_ready(engine)
        assert await one.chat(6) == [200] * 6
        assert len(engine.calls) == calls + 2


async def test_a_slow_probe_delays_nobody_and_is_the_only_one_of_its_instance() -> None:
    async with proxied(3, probe_interval=0.05, probe_timeout=60) as one:
        slow, *others = one.engines
        free = asyncio.Event()
        slow.health = waits_for(free)
        await slow.probed(slow.probes + 1)
        asked = slow.probes
        await asyncio.gather(*(other.probed(other.probes + 5) for other in others))
        assert slow.probes == asked
        slow.health = answers(200)
        free.set()


async def test_when_all_are_ill_it_is_503_with_retry_after_and_a_request_may_wait_for_one() -> None:
    fields = {"probe_interval": 0.05, "probe_timeout": 0.1, "fail_threshold": 1}
    async with proxied(2, **fields) as one:
        for engine in one.engines:
            engine.health = hang
        await until(_nobody_is_ready(one))
        status, body = await one.api.send("POST", CHAT, TEXT)
        assert (status, b"no decode server is ready" in body) == (503, True)
        assert (await one.api.ask("GET", "/health"))[0] == 503
    async with proxied(2, wait_for_ready=10, **fields) as one:
        for engine in one.engines:
            engine.health = hang
        await until(_nobody_is_ready(one))
        before = one.counts
        waiting = asyncio.create_task(one.api.chat(TEXT))
        await asyncio.sleep(0.1)
        assert one.counts == before
        one.engines[1].health = answers(200)
        assert await waiting == 200
        assert one.counts == [before[0], before[1] + 1]


def _nobody_is_ready(one: One) -> Any:
    async def holds() -> bool:
        return not one.proxy.registry.ready(Role.DECODE)

    return holds


@contextmanager
def lines_of(level: int) -> Iterator[list[str]]:
    """What the proxy logs."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = logging.getLogger("epd_proxy"), Handler()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


async def test_one_refused_connection_takes_an_engine_out_and_no_request_fails() -> None:
    async with proxied(3, probe_interval=0.3) as one:
        engine, *_ = one.engines
        with lines_of(logging.INFO) as logged:
            await engine.stop()
            assert await one.chat(12) == [200] * 12
        refused = [text for text in logged if engine.url in text]
        assert len(refused) == 1
        assert "could not be reached" in refused[0]
        assert not one.is_ready(engine)
        await engine.start()
        calls = len(engine.calls)
        # The first probe that succeeds.
        await one.changed()
        assert one.is_ready(engine)
        assert engine.probes >= 1
        assert await one.chat(6) == [200] * 6
        assert len(engine.calls) == calls + 2


async def test_twelve_callers_at_once_meet_a_refusing_engine_and_none_fails() -> None:
    async with proxied(3, probe_interval=0) as one:
        await one.engines[0].stop()
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(_one_chat(one.api.url)) for _ in range(12)]
        assert [call.result() for call in calls] == [200] * 12


async def _one_chat(url: str) -> int:
    async with line(url) as own:
        return await own.chat(TEXT)


async def test_engines_that_fail_everything_get_twenty_calls_then_a_trial_and_return_if_well() -> (
    None
):
    async with proxied(4, probe_interval=0) as one:
        failing, recovering, *_ = one.engines
        before = one.counts
        for engine in (failing, recovering):
            engine.always(FAILS)
        # Not all are done again: that is held to a fifth of the requests.
        assert set(await one.chat(130)) <= {200, 500}
        first = [after - calls for after, calls in zip(one.counts, before, strict=True)]
        # At twenty calls it is seen that they fail more than their peers.
        assert all(19 <= calls <= 20 for calls in first[:2])
        assert not one.is_ready(failing)
        assert not one.is_ready(recovering)

        recovering.restore()
        while not (one.is_ready(failing) and one.is_ready(recovering)):
            await one.changed()
        before = one.counts
        assert await one.chat(40) == [200] * 40
        trials, *rest = [after - calls for after, calls in zip(one.counts, before, strict=True)]
        report(first=first[:2], trials=trials, rest=rest)
        assert trials == 1
        assert not one.is_ready(failing)
        assert all(12 <= calls <= 14 for calls in rest)


@pytest.mark.parametrize("answer", [FAILS, answers(400, b"{}")], ids=["500", "400"])
async def test_when_all_fail_alike_none_is_ejected(answer: Any) -> None:
    async with proxied(3, probe_interval=0, decode_retries=0) as one:
        for engine in one.engines:
            engine.always(answer)
        before = one.counts
        assert len(set(await one.chat(120))) == 1
        assert all(one.is_ready(engine) for engine in one.engines)
        assert [after - calls for after, calls in zip(one.counts, before, strict=True)] == [40] * 3


async def test_refusals_that_are_the_callers_fault_do_not_eject_one_of_three() -> None:
    async with proxied(3, probe_interval=0) as one:
        engine, *_ = one.engines
        engine.always(answers(400, b"{}"))
        statuses = await one.chat(90)
        assert one.is_ready(engine)
        assert statuses.count(400) == 30


async def test_the_last_one_is_not_ejected() -> None:
    async with proxied(1, probe_interval=0, decode_retries=0) as one:
        (engine,) = one.engines
        engine.always(FAILS)
        assert await one.chat(40) == [500] * 40
        assert one.is_ready(engine)
