from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis

from epd_proxy.discovery import Away, Entry, Store
from epd_proxy.errors import ConfigError, Conflict
from epd_proxy.registry import Kind, Spec
from tests.discovery.hearing import Ear, eventually, started
from tests.discovery.servers import RedisServer, Wire

A, B, C = (Spec(Kind.DECODE, f"http://{name}:8000") for name in "abc")
SECOND = 1.0


@pytest.fixture(
    params=[("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True})],
    ids=["asyncio", "uvloop"],
)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@asynccontextmanager
async def following(url: str) -> AsyncIterator[tuple[Store, Ear]]:
    ear = Ear()
    async with started(store := Store(url, ear)):
        yield store, ear


@asynccontextmanager
async def resting(url: str) -> AsyncIterator[Store]:
    """A store that does what it is asked, but does not follow."""
    store = Store(url, Ear())
    try:
        yield store
    finally:
        await store.aclose()


@asynccontextmanager
async def asking(server: RedisServer) -> AsyncIterator[Redis]:
    """An operator's own client."""
    async with Redis(port=server.port, decode_responses=True) as client:
        yield client


async def test_what_was_registered_before_has_been_told_when_start_returns(
    server: RedisServer,
) -> None:
    full = Spec(
        Kind.ENCODE, "http://e:1", 2.0, 2, ("tcp://e:1", "tcp://e:2"), ("m",), {"zone": "a"}
    )
    async with following(server.url) as (store, _):
        await store.register(A)
        await store.register(full)

    async with following(server.url) as (store, ear):
        assert ear.fleets == [[A, full]]
        assert store.problem == ""


async def test_two_stores_see_each_others_changes_within_a_second(server: RedisServer) -> None:
    async with (
        following(server.url) as (one, heard_by_one),
        following(server.url) as (other, heard_by_other),
    ):
        await one.register(A)
        await heard_by_other.until(A.url, within=SECOND)
        await other.register(B)
        await heard_by_one.until(A.url, B.url, within=SECOND)
        await one.deregister(B.url)
        await heard_by_other.until(A.url, within=SECOND)


async def test_what_is_asked_of_a_store_has_been_told_by_it_when_the_call_returns(
    server: RedisServer,
) -> None:
    async with following(server.url) as (store, ear):
        await store.register(A)
        assert ear.urls == [A.url]
        await store.deregister(A.url)
        assert ear.urls == []


async def test_register_says_whether_the_instance_is_new(server: RedisServer) -> None:
    async with following(server.url) as (store, ear):
        assert await store.register(A)
        assert not await store.register(A)
        assert len(ear.fleets) == 2

        heavier = Spec(A.role, A.url, 3)
        assert not await store.register(heavier)
        assert ear.fleet == [heavier]


async def test_deregister_says_whether_there_was_one_whatever_its_spelling(
    server: RedisServer,
) -> None:
    async with following(server.url) as (store, _):
        await store.register(A)

        assert await store.deregister("http://A:8000/")
        assert not await store.deregister(A.url)


async def test_all_gives_what_is_registered_in_the_order_of_the_urls(server: RedisServer) -> None:
    async with following(server.url) as (store, _):
        await store.register(B, 60)
        await store.register(A)
        await store.drain(A.url, True)

        assert await store.all() == [Entry(A, draining=True), Entry(B, 60)]


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf")])
async def test_a_ttl_that_is_none_is_refused(server: RedisServer, ttl: float) -> None:
    async with following(server.url) as (store, _):
        with pytest.raises(ValueError, match="ttl"):
            await store.register(A, ttl)


async def test_an_instance_whose_heartbeats_end_is_lost_by_all_within_a_second(
    server: RedisServer,
) -> None:
    async with following(server.url) as (one, heard), following(server.url) as (_, heard_too):
        await one.register(B)
        await one.register(A, ttl=1)
        await heard_too.until(A.url, B.url)

        async with asyncio.timeout(1 + SECOND):
            await heard.until(B.url)
            await heard_too.until(B.url)
        assert [entry.spec for entry in await one.all()] == [B]


async def test_heartbeats_keep_an_instance_and_tell_nobody(server: RedisServer) -> None:
    async with following(server.url) as (store, ear), asking(server) as client:
        await store.register(A, ttl=60)
        before = await client.hget("epd-proxy:state", "version")
        await client.pexpire(f"epd-proxy:instance:{A.url}", 1000)

        assert not await store.register(A, ttl=60)
        assert await client.pttl(f"epd-proxy:instance:{A.url}") > 50_000
        assert await client.hget("epd-proxy:state", "version") == before
        assert ear.fleets == [[], [A]]


async def test_an_instance_registered_again_without_a_ttl_stays(server: RedisServer) -> None:
    async with following(server.url) as (store, _), asking(server) as client:
        await store.register(A, ttl=60)
        await store.register(A)

        assert await client.pttl(f"epd-proxy:instance:{A.url}") == -1


async def test_none_of_many_that_register_at_once_is_lost(server: RedisServer) -> None:
    specs = [Spec(Kind.DECODE, f"http://d{number:03}:8000") for number in range(200)]
    async with (
        following(server.url) as (one, _),
        following(server.url) as (other, _),
        following(server.url) as (_, ear),
    ):
        calls = [(one, other)[number % 2].register(spec) for number, spec in enumerate(specs)]
        assert all(await asyncio.gather(*calls))

        await ear.until(*(spec.url for spec in specs), within=SECOND)


@pytest.mark.parametrize(
    ("there", "new"),
    [
        (Kind.PREFILL, Kind.PREFILL_DECODE),
        (Kind.PREFILL_DECODE, Kind.DECODE),
        (Kind.DECODE, Kind.PREFILL_DECODE),
    ],
)
async def test_split_roles_beside_whole_ones_are_a_conflict(
    server: RedisServer, there: Kind, new: Kind
) -> None:
    async with following(server.url) as (store, ear):
        await store.register(Spec(Kind.ENCODE, "http://e:1"))
        await store.register(Spec(there, "http://a:1"))

        with pytest.raises(Conflict) as refused:
            await store.register(Spec(new, "http://b:1"))
        assert refused.value.status == 409
        assert refused.value.message == f"{new} cannot be mixed with {there}, which http://a:1 is"
        assert ear.urls == ["http://a:1", "http://e:1"]

        await store.deregister("http://a:1")
        assert await store.register(Spec(new, "http://b:1"))


async def test_another_role_for_a_known_url_is_a_conflict(server: RedisServer) -> None:
    async with following(server.url) as (store, ear):
        await store.register(A)

        with pytest.raises(Conflict, match="http://a:8000 is registered as decode"):
            await store.register(Spec(Kind.ENCODE, A.url))
        assert ear.fleet == [A]


async def test_of_two_that_contradict_at_the_same_moment_one_wins(server: RedisServer) -> None:
    async with following(server.url) as (one, _), following(server.url) as (other, _):
        for _ in range(20):
            results = await asyncio.gather(
                one.register(Spec(Kind.PREFILL, "http://p:1")),
                other.register(Spec(Kind.PREFILL_DECODE, "http://pd:1")),
                return_exceptions=True,
            )
            assert sorted(type(result).__name__ for result in results) == ["Conflict", "bool"]
            await one.deregister("http://p:1")
            await one.deregister("http://pd:1")


async def test_draining_is_told_to_all_within_a_second_and_can_be_ended(
    server: RedisServer,
) -> None:
    drained: list[frozenset[str]] = []
    told = asyncio.Event()

    def hear(urls: frozenset[str]) -> None:
        drained.append(urls)
        told.set()

    other = Store(server.url, Ear(), hear)
    async with following(server.url) as (store, _), started(other):
        assert await store.drain("http://from-a-file:1/", True)
        assert not await store.drain("http://from-a-file:1", True)
        await asyncio.wait_for(told.wait(), SECOND)
        assert drained == [{"http://from-a-file:1"}]

        told.clear()
        assert await store.drain("http://from-a-file:1", False)
        await asyncio.wait_for(told.wait(), SECOND)
        assert drained[-1] == frozenset()


async def test_a_draining_instance_is_never_told_before_its_draining(server: RedisServer) -> None:
    async with following(server.url) as (store, _):
        await store.register(A)
        await store.drain(A.url, True)
    order: list[Any] = []

    async with started(Store(server.url, order.append, order.append)):
        assert order == [{A.url}, [A]]


async def test_draining_outlasts_a_heartbeat_but_not_the_instance(server: RedisServer) -> None:
    async with following(server.url) as (store, ear), asking(server) as client:
        await store.register(A, ttl=60)
        await store.register(B)
        await store.drain(A.url, True)
        await store.drain(B.url, True)
        await store.register(A, ttl=60)
        assert await store.all() == [Entry(A, 60, draining=True), Entry(B, draining=True)]

        await store.deregister(B.url)
        await store.register(B)
        await client.pexpire(f"epd-proxy:instance:{A.url}", 1)
        await ear.until(B.url)
        await store.register(A)
        assert await store.all() == [Entry(A), Entry(B)]


async def test_prefixes_keep_fleets_apart(server: RedisServer) -> None:
    async with (
        following(f"{server.url}/0?prefix=blue&socket_timeout=5") as (blue, _),
        following(f"{server.url}/0?prefix=green:") as (green, heard),
        asking(server) as client,
    ):
        await blue.register(A)
        await blue.drain(A.url, True)

        assert await green.all() == []
        assert heard.fleets == [[]]
        assert len(await client.keys()) == len(await client.keys("blue:*")) == 4


async def test_without_redis_at_the_start_the_proxy_starts_and_waits_for_it(
    mortal: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(mortal.url) as (store, ear):
        assert store.problem.startswith("cannot be used: ")
        assert ear.fleets == []
        with pytest.raises(Away):
            await store.register(A)

        mortal.start()
        await ear.until(within=2 * SECOND)
        await eventually(lambda: store.problem == "")
        assert await store.register(A)
        (line,) = [text for text in caplog.messages if "going on with what is known" in text]
        assert line.startswith(f"Redis 127.0.0.1:{mortal.port}: cannot be used: ")


async def test_while_redis_is_away_the_fleet_stays_and_writes_say_so(mortal: RedisServer) -> None:
    mortal.start()
    async with following(mortal.url) as (store, ear):
        await store.register(A)
        await store.register(B, ttl=1)
        mortal.kill()

        await eventually(lambda: store.problem, within=SECOND)
        with pytest.raises(Away) as refused:
            await store.deregister(A.url)
        assert refused.value.status == 503
        headers, body = refused.value.answer("id")
        assert (b"retry-after", b"1") in headers
        assert str(mortal.port).encode() not in body
        await asyncio.sleep(1.1)
        assert ear.urls == [A.url, B.url]


async def test_a_redis_that_comes_back_with_nothing_is_told_what_was_there(
    mortal: RedisServer,
) -> None:
    mortal.start()
    async with following(mortal.url) as (one, _), following(mortal.url) as (other, heard):
        await one.register(A)
        await one.register(B, ttl=60)
        await one.drain(A.url, True)
        await heard.until(A.url, B.url)
        fleets = len(heard.fleets)
        mortal.kill()
        await eventually(lambda: one.problem and other.problem)

        mortal.start()
        await eventually(lambda: not one.problem and not other.problem, within=2 * SECOND)
        assert await other.all() == [Entry(A, draining=True), Entry(B, 60)]
        assert len(heard.fleets) == fleets
        async with asking(mortal) as client:
            assert 0 < await client.pttl(f"epd-proxy:instance:{B.url}") <= 60_000

        await one.register(C)
        await heard.until(A.url, B.url, C.url, within=SECOND)


async def test_a_redis_that_comes_back_with_old_data_is_told_what_is_missing(
    mortal: RedisServer,
) -> None:
    mortal.start()
    async with following(mortal.url) as (store, _):
        await store.register(A)
        async with asking(mortal) as client:
            await client.save()
        await store.register(B)
        mortal.kill()
        await eventually(lambda: store.problem)

        mortal.start()
        await eventually(lambda: not store.problem, within=2 * SECOND)
        assert await store.all() == [Entry(A), Entry(B)]


async def test_heartbeats_that_could_not_come_cost_no_instance(mortal: RedisServer) -> None:
    mortal.start()
    async with following(mortal.url) as (store, ear):
        await store.register(A, ttl=1)
        await store.drain(A.url, True)
        async with asking(mortal) as client:
            await client.save()
        mortal.kill()
        await asyncio.sleep(1.1)
        mortal.start()

        await eventually(lambda: not store.problem, within=2 * SECOND)
        assert await store.all() == [Entry(A, 1, draining=True)]
        assert ear.fleets == [[], [A]]
        # But now they could.
        await ear.until(within=1 + SECOND)


async def test_what_was_flushed_is_put_back_within_a_second(server: RedisServer) -> None:
    async with (
        following(server.url) as (one, heard),
        following(server.url) as (other, _),
        asking(server) as client,
    ):
        await one.register(A)
        await other.register(B)
        await other.drain(B.url, True)
        await client.flushall()

        await eventually(lambda: client.exists("epd-proxy:roles"), within=SECOND)
        assert await one.all() == [Entry(A), Entry(B, draining=True)]
        assert heard.fleets == [[], [A], [A, B]]


async def test_who_registers_first_after_a_flush_loses_nothing(server: RedisServer) -> None:
    first = Spec(Kind.PREFILL, "http://p:1")
    async with (
        resting(server.url) as store,
        resting(server.url) as newcomer,
        asking(server) as client,
    ):
        await store.register(A)
        await client.flushall()
        await newcomer.register(first)
        await store.register(B)

        assert await store.all() == await newcomer.all() == [Entry(A), Entry(B), Entry(first)]


async def test_what_contradicts_those_who_came_first_after_a_flush_is_not_put_back(
    server: RedisServer,
) -> None:
    first = Spec(Kind.PREFILL_DECODE, "http://pd:1")
    async with (
        resting(server.url) as store,
        resting(server.url) as newcomer,
        asking(server) as client,
    ):
        await store.register(A)
        await client.flushall()
        await newcomer.register(first)

        assert await store.all() == [Entry(first)]


async def test_who_was_cut_off_learns_what_the_others_did(server: RedisServer) -> None:
    wire = Wire(server.port)
    await wire.join()
    async with following(server.url) as (here, _), following(wire.url) as (far, heard):
        await here.register(A)
        await here.register(B)
        await heard.until(A.url, B.url)
        await wire.cut()
        await eventually(lambda: far.problem)
        await here.deregister(A.url)
        assert heard.urls == [A.url, B.url]

        await wire.join()
        await heard.until(B.url, within=2 * SECOND)
        assert await here.all() == [Entry(B)]
        assert far.problem == ""
    await wire.cut()


async def test_a_redis_that_hangs_is_away_within_two_seconds(mortal: RedisServer) -> None:
    mortal.start()
    async with following(mortal.url) as (store, ear):
        await store.register(A)
        mortal.freeze()
        async with asyncio.timeout(2.5):
            with pytest.raises(Away):
                await store.register(B)
        await eventually(lambda: store.problem)

        mortal.thaw()
        await eventually(lambda: not store.problem)
        assert A.url in ear.urls


async def test_a_subscription_that_breaks_is_taken_up_again(server: RedisServer) -> None:
    async with following(server.url) as (_, ear), asking(server) as client:
        await eventually(lambda: client.client_kill_filter(_type="pubsub"))
        async with resting(server.url) as other:
            await other.register(A)
        await ear.until(A.url, within=SECOND)


async def test_an_entry_that_cannot_be_read_is_left_out(server: RedisServer) -> None:
    async with following(server.url) as (store, ear), asking(server) as client:
        await store.register(A)
        await store.register(B)
        await client.set(f"epd-proxy:instance:{A.url}", '{"spec": 1}')

        await ear.until(B.url, within=SECOND)
        assert store.problem.startswith("an entry is left out: Expected `object`")

        await store.register(A)
        assert ear.urls == [A.url, B.url]
        assert store.problem == ""


async def test_a_fleet_that_was_refused_is_told_again_until_it_is_taken(
    server: RedisServer,
) -> None:
    async with following(server.url) as (store, ear):
        ear.refusal = ValueError("prefill_decode beside prefill")
        await store.register(A)
        assert store.problem == "the fleet was refused: prefill_decode beside prefill"

        ear.refusal = None
        await ear.until(A.url, within=SECOND)
        assert store.problem == ""


async def test_a_store_may_be_started_again(server: RedisServer) -> None:
    ear = Ear()
    store = Store(server.url, ear)
    async with started(store):
        await store.register(A)
    async with started(store):
        await store.register(B)
        assert ear.urls == [A.url, B.url]


async def test_no_password_is_told(mortal: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    url = f"redis://user:secret@127.0.0.1:{mortal.port}/3"

    async with started(store := Store(url, Ear())):
        assert store.name == f"Redis 127.0.0.1:{mortal.port}/3"
        assert store.problem
        assert "secret" not in caplog.text + store.problem


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://localhost", "must specify one of the following schemes"),
        ("redis://localhost:port", "Port could not be cast"),
        ("redis://localhost?colour=blue", "unexpected keyword argument 'colour'"),
        ("redis://localhost?socket_timeout=soon", "socket_timeout"),
    ],
)
def test_a_url_that_is_none_stops_the_start(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^--registry: .*{reason}"):
        Store(url, Ear())


def test_a_missing_package_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)

    with pytest.raises(ConfigError, match=r"^--registry: .*epd-proxy\[redis\]"):
        Store("redis://localhost", Ear())
