"""
Many workers, and many proxies, that know one fleet.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.discovery.servers import RedisServer
from tests.driver import CHAT
from tests.faults.engines import CONTENT, DONE, ROLE, STOP, streams
from tests.faults.engines import until as waits_for
from tests.faults.fleet import request
from tests.fleet.engines import Living, living
from tests.fleet.load import report
from tests.fleet.proxies import KEY, Line, Served, all_say, flags, line, serve, until
from tests.processes import Process

WITHIN = 1.0
"""Seconds in which everybody must have seen a change."""
FUSED = "prefill_decode"


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@asynccontextmanager
async def two_proxies(redis: RedisServer) -> AsyncIterator[tuple[Line, Line]]:
    """A connection to each of two proxies with one fleet."""
    words = ("--dynamic-registration", "--registry", redis.url)
    async with AsyncExitStack() as stack:
        both = await asyncio.gather(*(stack.enter_async_context(serve(*words)) for _ in range(2)))
        first, second = [await stack.enter_async_context(line(one.url)) for one in both]
        yield first, second


async def served(lines: Sequence[Line], stream: bool = False) -> list[int]:
    return [await one.chat(request(stream, images=0)) for one in lines]


async def check_together(lines: Sequence[Line]) -> None:
    """What one is told of instances, by registration, draining and removal, all know soon."""
    one, *_, other = lines
    engine, rest = Living("decode"), Living("decode")
    async with living(engine, rest):
        assert await served(lines) == [503] * len(lines)
        assert await one.register(FUSED, engine.url) == (200, {"registered": True})
        registered = await all_say(lines, engine.url, "live", within=WITHIN)
        assert await served(lines) == [200] * len(lines)
        assert len(engine.calls) == len(lines)

        await other.register(FUSED, rest.url)
        await all_say(lines, rest.url, "live", within=WITHIN)
        assert await other.drain(engine.url) == (200, {"drained": True, "load": 0})
        drained = await all_say(lines, engine.url, "draining", within=WITHIN)
        engine.seal()
        assert await served([*lines, *lines]) == [200] * len(lines) * 2
        assert engine.late == []
        engine.unseal()
        await one.undrain(engine.url)
        await all_say(lines, engine.url, "live", within=WITHIN)

        assert await other.remove(engine.url) == (200, {"removed": True})
        removed = await all_say(lines, engine.url, "", within=WITHIN)
        engine.seal()
        assert await served([*lines, *lines]) == [200] * len(lines) * 2
        assert engine.late == []
        report(
            lines=len(lines),
            registered=f"{registered:.3f}",
            drained=f"{drained:.3f}",
            removed=f"{removed:.3f}",
        )


async def test_four_workers_with_redis_register_drain_and_lose_instances_within_a_second(
    redis: RedisServer,
) -> None:
    words = ("--dynamic-registration", "--registry", redis.url)
    async with serve(*words, workers=4) as proxy, proxy.lines() as lines:
        assert len(lines) == 4
        await check_together(lines)


async def test_two_proxies_with_one_redis_register_drain_and_lose_instances_within_a_second(
    redis: RedisServer,
) -> None:
    async with two_proxies(redis) as both:
        await check_together(both)


async def test_an_instance_without_its_heartbeat_is_lost_by_both_proxies_within_a_second(
    redis: RedisServer,
) -> None:
    engine = Living("decode")
    now = asyncio.get_running_loop().time
    async with living(engine), two_proxies(redis) as both:
        # Longer than its ttl, for as long as the heart beats.
        for beat in range(4):
            told = now()
            new = beat == 0
            assert await both[beat % 2].register(FUSED, engine.url, ttl=1) == (
                200,
                {"registered": new},
            )
            await all_say(both, engine.url, "live", within=WITHIN)
            if beat < 3:
                await asyncio.sleep(0.4)
        await all_say(both, engine.url, "", within=3)
        engine.seal()
        assert 1 <= now() - told < 1 + WITHIN
        report(lost_after=f"{now() - told:.2f}")
        assert await served(both) == [503, 503]
        assert engine.late == []


async def test_draining_by_one_proxy_waits_for_a_stream_of_the_other_which_ends_whole(
    redis: RedisServer,
) -> None:
    engine, may_end = Living("decode"), asyncio.Event()
    engine.always(streams(ROLE, CONTENT, waits_for(may_end), STOP, DONE))
    async with living(engine), two_proxies(redis) as (one, other), line(other.url) as operator:
        await one.register(FUSED, engine.url)
        await all_say([one, other], engine.url, "live", within=WITHIN)
        stream = asyncio.create_task(one.send("POST", CHAT, request(True, images=0)))
        await engine.call()
        drain = asyncio.create_task(operator.drain(engine.url))
        await all_say([other], engine.url, "draining", within=WITHIN)
        assert await other.chat(request(images=0)) == 503
        assert not drain.done()
        may_end.set()
        status, body = await stream
        assert status == 200
        assert body.endswith(DONE)
        assert await drain == (200, {"drained": True, "load": 0})


async def health(one: Line) -> tuple[int, Any]:
    return await one.ask("GET", "/health")


async def test_without_redis_both_proxies_go_on_and_say_so_and_with_it_they_are_in_sync_again(
    redis: RedisServer,
) -> None:
    engine, later = Living("decode"), Living("decode")
    async with living(engine, later), two_proxies(redis) as both:
        await both[0].register(FUSED, engine.url)
        await all_say(both, engine.url, "live", within=WITHIN)
        assert [(await health(one))[1].get("sources") for one in both] == [None, None]

        redis.kill()

        async def all_complain() -> bool:
            said = [await health(one) for one in both]
            return all("Redis" in str(body.get("sources")) for _, body in said)

        complained = await until(all_complain, within=3)
        # They have a fleet that serves, so they are ready.
        assert [(await health(one))[0] for one in both] == [200, 200]
        assert await served(both) == [200, 200]
        assert (await both[0].register(FUSED, later.url))[0] == 503
        assert await served(both) == [200, 200]

        await asyncio.to_thread(redis.start)

        async def nobody_complains() -> bool:
            return not any([(await health(one))[1].get("sources") for one in both])

        recovered = await until(nobody_complains, within=5)
        # Redis has lost everything; the proxies have not.
        assert [await one.state(engine.url) for one in both] == ["live", "live"]
        await both[1].register(FUSED, later.url)
        await all_say(both, later.url, "live", within=WITHIN)
        await both[0].remove(engine.url)
        await all_say(both, engine.url, "", within=WITHIN)
        assert await served(both) == [200, 200]
        report(complained=f"{complained:.2f}", recovered=f"{recovered:.2f}")


async def test_a_proxy_that_starts_later_knows_the_fleet_before_it_serves(
    redis: RedisServer,
) -> None:
    engine = Living("decode")
    words = ("--dynamic-registration", "--registry", redis.url)
    async with living(engine), serve(*words) as first, line(first.url) as one:
        await one.register(FUSED, engine.url)
        async with serve(*words) as second, line(second.url) as other:
            assert await served([other]) == [200]


async def test_twelve_requests_to_four_fresh_workers_reach_all_three_decode_servers() -> None:
    engines = [Living("decode") for _ in range(3)]
    async with living(*engines):
        words = flags(decode=[engine.url for engine in engines])
        async with serve(*words, workers=4) as proxy:
            for _ in range(12):
                async with line(proxy.url) as one:
                    assert await served([one]) == [200]
            counts = [len(engine.calls) for engine in engines]
            report(counts=counts)
            assert sum(counts) == 12
            assert 12 not in counts
            assert 0 not in counts


async def first_picks(proxy: Served, engines: Sequence[Living]) -> list[int]:
    """The engine to which each worker sends its first request."""
    found = []
    async with proxy.lines() as lines:
        for one in lines:
            before = [len(engine.calls) for engine in engines]
            assert await served([one]) == [200]
            after = [len(engine.calls) for engine in engines]
            found.append(
                next(n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a < b)
            )
    return found


async def test_four_fresh_workers_begin_their_rotations_at_different_servers() -> None:
    # So many that four who begin anywhere never meet at one place.
    engines = [Living("decode") for _ in range(64)]
    async with living(*engines):
        words = flags(decode=[engine.url for engine in engines])
        async with serve(*words, workers=4) as proxy:
            assert len(set(await first_picks(proxy, engines))) > 1


async def test_a_worker_that_dies_is_replaced_and_the_others_serve_on() -> None:
    engine = Living("decode")
    async with living(engine), serve("--decode", engine.url, workers=2) as proxy:
        async with proxy.lines() as (doomed, other):
            os.kill(proxy.pids[0], signal.SIGKILL)
            assert await served([other]) == [200]
            proxy.pids[0] = int((await proxy.printed(r"Started server process \[(\d+)\]"))[1])
            await proxy.printed("Application startup complete")
            with pytest.raises(ConnectionError):
                await doomed.chat(request())
        async with proxy.lines() as lines:
            assert await served(lines) == [200, 200]


def test_registration_with_two_workers_and_no_redis_is_refused_with_the_reason() -> None:
    process = Process(
        "serve", "--workers", "2", "--dynamic-registration", env={"ADMIN_API_KEY": KEY}
    )
    try:
        assert process.wait() == 2
    finally:
        process.stop()
    assert process.output == (
        "epd-proxy: --workers: engines would register with one of them alone: give them a"
        " --registry\n"
    )
