"""
Engines that are restarted with care, and engines that are killed, under load.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from tests.faults.fleet import STAGES
from tests.fleet.engines import Living, living, slowly
from tests.fleet.load import load, report
from tests.fleet.proxies import UNMEASURED, Line, flags, line, serve

CALLERS = 40
TIMES = {"encode": 0.05, "prefill": 0.05, "decode": 0.2}


async def restart(api: Line, engine: Living, *, again: bool) -> None:
    """As a rollout does it; ``again``: the engine leaves the fleet, and registers when it is up."""
    assert await api.drain(engine.url) == (200, {"drained": True, "load": 0})
    assert await api.state(engine.url) == "draining"
    engine.seal()
    if again:
        assert await api.remove(engine.url) == (200, {"removed": True})
    await engine.stop()
    engine.unseal()
    await engine.start()
    if again:
        assert (await api.register(engine.role, engine.url))[0] == 200
    assert (await api.undrain(engine.url))[0] == 200
    assert await api.state(engine.url) == "live"


@pytest.mark.parametrize("again", [False, True], ids=["undrained", "registered again"])
async def test_a_rolling_restart_of_every_engine_under_load_loses_no_request(again: bool) -> None:
    engines = [Living(role, slowly(role, TIMES[role])) for role in STAGES for _ in range(2)]
    by_role = {role: [engine for engine in engines if engine.role == role] for role in STAGES}
    async with living(*engines):
        static = {} if again else {role: [e.url for e in by_role[role]] for role in STAGES}
        async with (
            serve("--dynamic-registration", *flags(**static), busy=True) as proxy,
            line(proxy.url) as api,
        ):
            for engine in engines if again else ():
                assert (await api.register(engine.role, engine.url))[0] == 200
            before = asyncio.get_running_loop().time()
            async with load(proxy.url, CALLERS) as found:
                await found.more(CALLERS)
                for engine in engines:
                    calls = len(engine.calls)
                    await restart(api, engine, again=again)
                    await found.more(CALLERS)
                    # It is at work again.
                    assert len(engine.calls) > calls
            seconds = asyncio.get_running_loop().time() - before
            report(requests=len(found.outcomes), lost=len(found.bad), seconds=f"{seconds:.1f}")
            assert found.bad == []
            assert [call for engine in engines for call in engine.late] == []


class Process:
    """An engine that can be killed."""

    def __init__(self, role: str) -> None:
        self.role = role
        words = [sys.executable, "-m", "tests.fleet.engines", role, str(TIMES[role])]
        env = {**os.environ, **UNMEASURED}
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env)
        self.url = ""

    def wait(self) -> None:
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def processes(number: int) -> Iterator[Sequence[Process]]:
    """So many engines of each role."""
    with ExitStack() as stack:
        found = [Process(role) for role in STAGES for _ in range(number)]
        for one in found:
            stack.callback(one.close)
        for one in found:
            one.wait()
        yield found


async def test_killing_one_of_three_of_each_role_loses_only_the_streams_that_had_begun_on_it() -> (
    None
):
    with processes(3) as engines:
        urls = {role: [one.url for one in engines if one.role == role] for role in STAGES}
        async with serve(*flags(**urls), busy=True) as proxy:
            async with load(proxy.url, CALLERS) as found:
                await found.more(5 * CALLERS)
                for one in engines[::3]:
                    one.kill()
                    await found.more(2 * CALLERS)
            victim = engines[::3][-1].url.removeprefix("http://")
            lost = found.bad
            report(requests=len(found.outcomes), lost=len(lost), statuses=dict(found.statuses))
            # The head had come, and said who it was that had begun.
            others = [one for one in lost if (one.answer.status, one.engine) != (200, victim)]
            assert others == []
            assert 0 < len(lost) <= CALLERS
            assert all(one.streamed and not one.answer.is_whole for one in lost)
            assert {one.engine for one in found.outcomes} >= {victim}
