"""
How ``epd-proxy serve`` ends, with one worker and with two.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import pytest

from tests.faults.callers import Caller
from tests.faults.engines import CONTENT, DONE, EVENTS, ROLE, STOP, Act, Call, hang, pause, streams
from tests.faults.engines import until as waits_for
from tests.faults.fleet import request
from tests.fleet.engines import Living, living
from tests.fleet.load import report
from tests.fleet.proxies import Line, Served, flags, line, serve, until

DELAY = 1.0
GRACE = 1.0
TEXT = request(images=0)
STREAM = request(True, images=0)


async def endless(call: Call) -> None:
    """Somebody who never stops talking."""
    steps: list[bytes | Act] = [CONTENT, pause(0.02)] * 10_000
    with suppress(ConnectionError):
        await streams(ROLE, *steps)(call)


class Busy:
    """A proxy with five finite streams, an endless one and a request in encode, all under way."""

    def __init__(self, proxy: Served) -> None:
        self.proxy = proxy
        self.encoder, self.decoder = Living("encode"), Living("decode")
        self.may_end = asyncio.Event()
        self.finite: list[Caller] = []
        self.endless: Caller
        self.encoding: Caller

    async def ask(self, body: bytes) -> Caller:
        caller = await Caller.connect(self.proxy.url)
        await caller.ask(body)
        return caller

    async def begin(self) -> None:
        finite = streams(ROLE, CONTENT, waits_for(self.may_end), STOP, DONE)
        self.decoder.then(*[finite] * 5, endless)
        self.encoder.then(hang)
        for _ in range(5):
            self.finite.append(await self.ask(STREAM))
            await self.decoder.call(len(self.finite) - 1)
        self.endless = await self.ask(STREAM)
        await self.decoder.call(5)
        self.encoding = await self.ask(request(True))
        await self.encoder.call()
        for caller in (*self.finite, self.endless):
            await caller.until(lambda caller=caller: CONTENT in caller.body)  # type: ignore[misc]

    async def nobody_listens(self) -> bool:
        return not await self.proxy.listens()

    async def close(self) -> None:
        for caller in (*self.finite, self.endless, self.encoding):
            await caller.close()


@asynccontextmanager
async def busy(workers: int, *words: str) -> AsyncIterator[Busy]:
    encoder, decoder = Living("encode"), Living("decode")
    async with living(encoder, decoder):
        urls = flags(encode=[encoder.url], decode=[decoder.url])
        async with serve(*urls, *words, workers=workers) as proxy:
            one = Busy(proxy)
            one.encoder, one.decoder = encoder, decoder
            await one.begin()
            try:
                yield one
            finally:
                await one.close()


async def check_red(lines: Sequence[Line]) -> None:
    """Every worker says that it is not ready, that it is alive, and still serves."""

    async def is_red() -> bool:
        said = [await one.ask("GET", "/health") for one in lines]
        return all(status == 503 and body["proxy"] == "shutting down" for status, body in said)

    await until(is_red, within=DELAY / 2)
    assert [(await one.send("GET", "/live"))[0] for one in lines] == [200] * len(lines)
    assert [await one.chat(TEXT) for one in lines] == [200] * len(lines)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_turns_health_red_ends_finite_streams_whole_and_cuts_the_rest_at_the_limit(
    number: signal.Signals, workers: int
) -> None:
    words = ("--shutdown-delay", str(DELAY), "--graceful-timeout", str(GRACE))
    now = asyncio.get_running_loop().time
    async with busy(workers, *words) as one, one.proxy.lines() as lines:
        assert (await lines[0].ask("GET", "/health"))[0] == 200
        one.proxy.process.signal(number)
        told = now()
        await check_red(lines)
        async with line(one.proxy.url) as newcomer:
            assert await newcomer.chat(TEXT) == 200
        assert now() - told < DELAY
        served = len(one.decoder.calls)

        closed = await until(one.nobody_listens, within=DELAY + 1)
        assert now() - told >= DELAY
        # Nor on connections that are open already.
        for each in lines:
            with pytest.raises(ConnectionError):
                await each.chat(TEXT)
        assert len(one.decoder.calls) == served

        one.may_end.set()
        for caller in one.finite:
            answer = await caller.answer()
            assert (answer.status, answer.is_whole) == (200, True)
            assert answer.body == b"".join(EVENTS)
        assert now() - told < DELAY + GRACE

        cut, unanswered = await one.endless.answer(), await one.encoding.answer()
        assert DELAY + GRACE - 0.2 <= now() - told < DELAY + GRACE + 1.5
        assert (cut.status, cut.is_whole) == (200, False)
        assert DONE not in cut.body
        # Nobody gets a 200 for what was never answered.
        assert unanswered.status in (0, 503)
        if unanswered.status:
            assert unanswered.error["type"] == "overloaded_error"
        assert await one.proxy.ended() == 0
        assert "Traceback" not in one.proxy.process.output
        report(red_until=f"{closed:.2f}", ended=f"{now() - told:.2f}", then=unanswered.status)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once(number: signal.Signals, workers: int) -> None:
    async with busy(workers, "--graceful-timeout", "60") as one:
        one.proxy.process.signal(number)
        for _ in range(workers):
            await one.proxy.printed("Shutting down")
        now = asyncio.get_running_loop().time
        before = now()
        one.proxy.process.signal(number)
        status = await one.proxy.ended()
        report(seconds=f"{now() - before:.2f}", status=status)
        assert now() - before < 1.5
        assert status == 0
        assert not (await one.endless.answer()).is_whole
        assert "Traceback" not in one.proxy.process.output


async def test_a_second_signal_in_the_delay_ends_it_at_once() -> None:
    async with busy(1, "--shutdown-delay", "60", "--graceful-timeout", "60") as one:
        one.proxy.process.signal(signal.SIGTERM)
        async with line(one.proxy.url) as operator:
            await check_red([operator])
        one.proxy.process.signal(signal.SIGTERM)
        async with asyncio.timeout(2):
            assert await one.proxy.ended() == 0


@pytest.mark.parametrize("workers", [1, 2])
async def test_an_idle_proxy_ends_soon_after_one_signal(workers: int) -> None:
    engine = Living("decode")
    async with (
        living(engine),
        serve("--decode", engine.url, "--graceful-timeout", "60", workers=workers) as proxy,
        line(proxy.url) as idle,
    ):
        assert await idle.chat(TEXT) == 200
        proxy.process.signal(signal.SIGTERM)
        async with asyncio.timeout(2):
            assert await proxy.ended() == 0


async def test_probes_and_pools_are_closed_at_the_end() -> None:
    engine = Living("decode")
    async with (
        living(engine),
        serve("--decode", engine.url, "--probe-interval", "0.05", "--keep-alive", "60") as proxy,
        line(proxy.url) as one,
    ):
        assert await one.chat(TEXT) == 200
        await engine.probed(3)
        assert engine.open_connections > 0
        proxy.process.signal(signal.SIGTERM)
        assert await proxy.ended() == 0
        await engine.all_gone()
        assert engine.open_connections == 0
        assert "Traceback" not in proxy.process.output
