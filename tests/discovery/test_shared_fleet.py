"""
Several proxies with one Redis: what one is told, all do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from epd_proxy import Config, ConfigError, EPDProxy, Role
from epd_proxy.discovery import Away, Store
from tests.backends import Backends, ask
from tests.discovery.hearing import LIMIT, eventually
from tests.discovery.servers import RedisServer
from tests.driver import call, chat
from tests.test_instances import (
    D1,
    D2,
    E1,
    OPEN,
    SPLIT,
    deregister,
    drain,
    listed,
    register,
    registered,
)

SECOND = 1.0
TEXT = {"type": "text", "text": "hello"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Pair:
    """Two proxies, each with engines of its own that answer at the same addresses."""

    def __init__(self, url: str, **options: Any) -> None:
        self.backends = [Backends(encode=0, decode=2) for _ in range(2)]
        settings = {**OPEN, "decode": (), "probe_interval": 0, "registry": url, **options}
        self.one, self.other = (each.proxy(**settings) for each in self.backends)

    def ready(self) -> list[list[str]]:
        """By proxy."""
        return [
            [one.url for one in proxy.registry.ready(Role.DECODE)]
            for proxy in (self.one, self.other)
        ]

    async def until(self, *urls: str) -> None:
        await eventually(lambda: self.ready() == [[*urls]] * 2, within=SECOND)


@asynccontextmanager
async def pair(url: str, **options: Any) -> AsyncIterator[Pair]:
    both = Pair(url, **options)
    async with both.one, both.other:
        yield both


@asynccontextmanager
async def single(url: str, **options: Any) -> AsyncIterator[EPDProxy]:
    async with Pair(url, **options).one as proxy:
        yield proxy


async def test_two_proxies_register_drain_and_lose_instances_together_within_a_second(
    server: RedisServer,
) -> None:
    async with pair(server.url) as both:
        await registered(both.one, D1)
        await both.until(D1["url"])
        await registered(both.other, D2)
        await both.until(D1["url"], D2["url"])
        assert (await register(both.one, D2)).json() == {"registered": False}
        draining = asyncio.create_task(drain(both.one, D1["url"]))
        await both.until(D2["url"])
        assert (await draining).json() == {"drained": True, "load": 0}
        for proxy in (both.one, both.other):
            states = (await listed(proxy))["prefill_decode"]
            assert states == {"live": [D2["url"]], "draining": [D1["url"]]}
        assert (await drain(both.other, D1["url"], "DELETE")).status == 200
        await both.until(D1["url"], D2["url"])
        assert (await deregister(both.other, D1["url"])).json() == {"removed": True}
        assert (await deregister(both.other, D1["url"])).json() == {"removed": False}
        await both.until(D2["url"])
        assert (await register(both.one, {**D2, "ttl": 0.2})).status == 200
        await eventually(lambda: both.ready() == [[], []], within=0.2 + SECOND)


async def test_what_was_registered_before_a_proxy_starts_is_there_with_its_first_request(
    server: RedisServer,
) -> None:
    async with single(server.url) as proxy:
        await registered(proxy, D1)
    async with single(server.url) as proxy:
        assert (await chat(proxy, ask(TEXT))).status == 200


async def test_a_registration_that_was_answered_is_live_and_a_removal_is_done(
    server: RedisServer,
) -> None:
    both = Pair(server.url)
    async with both.one:
        for _ in range(10):
            await registered(both.one, D1)
            assert (await chat(both.one, ask(TEXT))).status == 200
            await deregister(both.one, D1["url"])
            assert (await chat(both.one, ask(TEXT))).status == 503
        assert len(both.backends[0].decode[0].requests) == 10


@pytest.mark.parametrize(
    ("first", "second"), [(E1, {**E1, "role": "prefill"}), (D1, {**SPLIT, "url": "http://split"})]
)
async def test_what_cannot_be_together_is_a_409_whoever_of_them_is_told(
    first: Any, second: Any, server: RedisServer
) -> None:
    async with pair(server.url) as both:
        await registered(both.one, first)
        # The other may not have heard of it yet.
        for proxy in (both.other, both.one):
            reply = await register(proxy, second)
            assert (reply.status, reply.error["type"]) == (409, "invalid_request_error")


async def test_an_instance_that_flags_declare_cannot_be_deregistered_in_redis(
    server: RedisServer,
) -> None:
    async with single(server.url, decode=D1["url"]) as proxy:
        assert (await register(proxy, D1)).status == 200
        assert (await deregister(proxy, D1["url"])).status == 409
        assert (await register(proxy, {**SPLIT, "url": "http://split"})).status == 409


async def test_a_heartbeat_undoes_no_drain_and_a_new_registration_is_live(
    server: RedisServer,
) -> None:
    async with pair(server.url) as both:
        await registered(both.one, D1)
        await drain(both.one, D1["url"])
        await register(both.other, {**D1, "ttl": 30})
        assert (await listed(both.other))["prefill_decode"] == {"draining": [D1["url"]]}
        await deregister(both.other, D1["url"])
        await both.until()
        await registered(both.other, D1)
        await both.until(D1["url"])


class Slow:
    """A decode server that works until it is told to end."""

    def __init__(self, backends: Backends) -> None:
        self.has_begun = asyncio.Event()
        self.may_end = asyncio.Event()
        backends.decode[0].route.mock(side_effect=self)

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.has_begun.set()
        await self.may_end.wait()
        return httpx.Response(200, json={"choices": []})


async def test_a_drain_waits_for_the_work_of_all_proxies(server: RedisServer) -> None:
    async with asyncio.timeout(LIMIT), pair(server.url) as both:
        await registered(both.one, D1)
        await both.until(D1["url"])
        slow = Slow(both.backends[1])
        running = asyncio.create_task(chat(both.other, ask(TEXT)))
        await slow.has_begun.wait()
        draining = asyncio.create_task(drain(both.one, D1["url"]))
        # Longer than anything that was said once is remembered.
        await asyncio.sleep(4)
        assert not draining.done()
        slow.may_end.set()
        assert (await running).status == 200
        assert (await draining).json() == {"drained": True, "load": 0}


async def test_a_drain_is_not_held_up_by_a_proxy_that_was_killed(server: RedisServer) -> None:
    async with asyncio.timeout(LIMIT), single(server.url) as proxy:
        await registered(proxy, D1)
        dead = Store(server.url, lambda specs: None)
        await dead.mark(D1["url"], "dead", 2.0)
        await dead.aclose()
        began = asyncio.get_running_loop().time()
        assert (await drain(proxy, D1["url"])).json() == {"drained": True, "load": 0}
        assert asyncio.get_running_loop().time() - began > 1.5


async def test_a_drain_of_work_elsewhere_ends_with_its_limit(server: RedisServer) -> None:
    async with asyncio.timeout(LIMIT), pair(server.url, drain_timeout=1.5) as both:
        await registered(both.one, D1)
        await both.until(D1["url"])
        slow = Slow(both.backends[1])
        running = asyncio.create_task(chat(both.other, ask(TEXT)))
        await slow.has_begun.wait()
        assert (await drain(both.one, D1["url"])).json() == {"drained": False, "load": 0}
        slow.may_end.set()
        await running


async def test_work_that_is_told_of_ends_with_the_proxy(server: RedisServer) -> None:
    before = asyncio.all_tasks()
    async with pair(server.url) as both:
        await registered(both.one, D1)
        await both.until(D1["url"])
        (instance,) = both.other.registry.instances()
        instance.load = 1
        draining = asyncio.create_task(drain(both.one, D1["url"]))
        await both.until()
        draining.cancel()
    await asyncio.wait([draining])
    assert asyncio.all_tasks() == before


async def test_who_was_forgotten_for_being_out_does_not_return_with_the_next_change(
    server: RedisServer,
) -> None:
    options = {"probe_interval": 0.05, "fail_threshold": 1, "evicted_ttl": 0.1}
    both = Pair(server.url, **options)
    async with both.one as proxy:
        health = both.backends[0].router.get("http://d0:8000/health").respond(503)
        both.backends[0].router.get("http://d1:8000/health").respond(200)
        await registered(proxy, D1)
        await eventually(lambda: proxy.registry.find(D1["url"]) is None)
        async with Redis(port=server.port) as client:
            await eventually(partial(_is_empty, client))
        await registered(proxy, D2)
        assert await listed(proxy) == {"prefill_decode": {"live": [D2["url"]]}}
        health.respond(200)
        await registered(proxy, D1)


async def _is_empty(client: Redis) -> bool:
    return not await client.exists("epd-proxy:roles")


# Redis away


@pytest.mark.parametrize("is_known", [False, True])
async def test_while_redis_is_away_what_would_change_the_fleet_is_a_503_and_requests_go_on(
    mortal: RedisServer, is_known: bool
) -> None:
    mortal.start()
    both = Pair(mortal.url, expose_topology=True)
    async with asyncio.timeout(LIMIT), both.one as proxy:
        both.backends[0].router.get("http://d0:8000/health").respond(200)
        await registered(proxy, D1)
        mortal.kill()
        body = D1 if is_known else D2
        for reply in (
            await register(proxy, body),
            await deregister(proxy, body["url"]),
            await drain(proxy, D1["url"]),
            await drain(proxy, D1["url"], "DELETE"),
        ):
            assert (reply.status, reply.header("retry-after")) == (503, "1")
            assert reply.error["type"] == "overloaded_error"
        assert (await chat(proxy, ask(TEXT))).status == 200
        assert await listed(proxy) == {"prefill_decode": {"live": [D1["url"]]}}
        reply = await call(proxy, "GET", "/health")
        assert reply.status == 200
        ((name, problem),) = reply.json()["sources"].items()
        assert name == f"Redis 127.0.0.1:{mortal.port}"
        assert problem.startswith("cannot be used")


async def test_a_drain_that_began_before_redis_went_is_a_503(mortal: RedisServer) -> None:
    mortal.start()
    async with asyncio.timeout(LIMIT), single(mortal.url) as proxy:
        await registered(proxy, D1)
        draining = asyncio.create_task(drain(proxy, D1["url"]))
        await eventually(lambda: proxy.registry.ready(Role.DECODE) == ())
        mortal.kill()
        assert (await draining).status == 503


async def test_where_redis_is_away_work_is_told_of_when_it_is_back(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(server.url) as both:
        await registered(both.one, D1)
        await both.until(D1["url"])
        (instance,) = both.other.registry.instances()
        instance.load = 1
        monkeypatch.setattr(Store, "mark", _away)
        draining = asyncio.create_task(drain(both.one, D1["url"]))
        await both.until()
        monkeypatch.setattr(Store, "unmark", _away)
        instance.ease(1)
        assert (await draining).status == 200


async def _away(self: Store, *words: Any) -> None:
    raise Away("the registry cannot be used")


async def test_forgetting_that_redis_does_not_hear_of_is_told_in_the_log(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"probe_interval": 0.05, "fail_threshold": 1, "evicted_ttl": 0.1}
    both = Pair(server.url, **options)
    async with both.one as proxy:
        both.backends[0].router.get("http://d0:8000/health").respond(503)
        await registered(proxy, D1)
        monkeypatch.setattr(Store, "deregister", _away)
        await eventually(lambda: "the registry cannot be used" in caplog.text)


# The start


@pytest.mark.parametrize("url", ["http://127.0.0.1", "redis://127.0.0.1:port", "127.0.0.1"])
async def test_a_registry_that_is_none_stops_the_start_and_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^--registry: "):
        async with EPDProxy(config=Config(registry=url)):
            pass


@pytest.mark.parametrize("key", ["", "secret"])
async def test_without_dynamic_registration_engines_are_known_but_nobody_registers_here(
    key: str, server: RedisServer
) -> None:
    async with single(server.url) as proxy:
        await registered(proxy, D1)
        async with single(server.url, dynamic_registration=False, admin_api_key=key) as follower:
            assert await listed(follower) == {"prefill_decode": {"live": [D1["url"]]}}
            assert (await register(follower, D2)).status == 404
