"""
Engines that register themselves, and who may say so: section 13 of the contract.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from epd_proxy import Config, ConfigError, EPDProxy, Role
from epd_proxy.registry import API, Kind
from tests.backends import Backends, ask
from tests.driver import Reply, call, chat
from tests.fake_time import LEAPING, leaping

KEY = {"x-api-key": "secret"}
OPEN = {"dynamic_registration": True, "admin_api_key": "secret"}
D1 = {"role": "prefill_decode", "url": "http://d0:8000"}
D2 = {"role": "prefill_decode", "url": "http://d1:8000"}
E1 = {"role": "encode", "url": "http://e0:8000"}
P1 = {"role": "prefill", "url": "http://p0:8000"}
SPLIT = {"role": "decode", "url": "http://d0:8000"}
TEXT = {"type": "text", "text": "hello"}


@pytest.fixture
def anyio_backend() -> Any:
    return LEAPING


@pytest.fixture(autouse=True)
def in_fake_time(monkeypatch: pytest.MonkeyPatch) -> None:
    leaping(monkeypatch)


def opened(**options: Any) -> EPDProxy:
    """A proxy whose fleet is empty, and which probes nobody."""
    return Backends(encode=0, decode=0).proxy(**{**OPEN, "probe_interval": 0, **options})


async def instances(
    proxy: EPDProxy, method: str, body: Any = b"", headers: Any = KEY, path: str = "", **more: Any
) -> Reply:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await call(proxy, method, f"/instances{path}", content, headers, **more)


async def register(proxy: EPDProxy, body: Any, headers: Any = KEY, **more: Any) -> Reply:
    return await instances(proxy, "POST", body, headers, **more)


async def registered(proxy: EPDProxy, *bodies: Any) -> None:
    for body in bodies:
        reply = await register(proxy, body)
        assert (reply.status, reply.json()) == (200, {"registered": True})


def query(url: str) -> dict[str, Any]:
    return {"query_string": f"url={quote(url, safe='')}".encode()}


async def deregister(proxy: EPDProxy, url: str, headers: Any = KEY) -> Reply:
    return await instances(proxy, "DELETE", headers=headers, **query(url))


async def drain(proxy: EPDProxy, url: str, method: str = "POST", headers: Any = KEY) -> Reply:
    return await instances(proxy, method, headers=headers, path="/drain", **query(url))


async def listed(proxy: EPDProxy, headers: Any = None) -> dict[str, dict[str, list[str]]]:
    """Without what is empty."""
    reply = await instances(proxy, "GET", headers=headers or {})
    assert reply.status == 200
    found = {
        kind: {state: urls for state, urls in states.items() if urls}
        for kind, states in reply.json().items()
    }
    return {kind: states for kind, states in found.items() if states}


# Who may


@pytest.mark.parametrize("headers", [{}, {"x-api-key": ""}, {"x-api-key": "secreT"}])
async def test_without_the_right_key_whatever_changes_the_fleet_is_a_403(headers: Any) -> None:
    proxy = opened()
    await registered(proxy, D1)
    for reply in (
        await register(proxy, D2, headers),
        await deregister(proxy, D1["url"], headers),
        await drain(proxy, D1["url"], headers=headers),
        await drain(proxy, D1["url"], "DELETE", headers),
    ):
        assert (reply.status, reply.error["type"]) == (403, "authentication_error")
    assert await listed(proxy) == {"prefill_decode": {"live": [D1["url"]]}}


@pytest.mark.parametrize("options", [{}, {"admin_api_key": "secret"}])
async def test_where_registration_is_off_there_is_none_but_who_is_there_is_told(
    options: Any,
) -> None:
    proxy = Backends(encode=0).proxy(**options)
    for reply in (await register(proxy, D2), await deregister(proxy, D1["url"])):
        assert (reply.status, reply.error["type"]) == (404, "not_found_error")
    assert await listed(proxy) == {"prefill_decode": {"live": [D1["url"]]}}


async def test_without_an_admin_nobody_drains_and_with_one_a_fixed_fleet_can_be_drained() -> None:
    proxy = Backends(encode=0).proxy()
    for method in ("POST", "DELETE"):
        reply = await drain(proxy, D1["url"], method)
        assert (reply.status, reply.error["type"]) == (404, "not_found_error")
    proxy = Backends(encode=0).proxy(admin_api_key="secret")
    assert (await drain(proxy, D1["url"])).json() == {"drained": True, "load": 0}
    assert await listed(proxy) == {"prefill_decode": {"draining": [D1["url"]]}}


async def test_one_of_several_workers_without_a_registry_drains_nobody() -> None:
    config = Config(decode=D1["url"], admin_api_key="secret")
    proxy = EPDProxy(config=config, is_alone=False)
    for method in ("POST", "DELETE"):
        reply = await drain(proxy, D1["url"], method)
        assert (reply.status, reply.error["type"]) == (409, "invalid_request_error")
        assert "--registry" in reply.error["message"]
    assert await listed(proxy) == {"prefill_decode": {"live": [D1["url"]]}}
    await proxy.aclose()


def test_registration_without_a_key_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="--dynamic-registration: needs a key"):
        Config(dynamic_registration=True)


async def test_who_is_there_is_told_without_a_key_where_callers_need_none() -> None:
    proxy = opened()
    reply = await instances(proxy, "GET", headers={})
    empty: dict[str, list[str]] = {"live": [], "evicted": [], "draining": []}
    assert (reply.status, reply.json()) == (200, dict.fromkeys(Kind, empty))


async def test_where_callers_need_keys_who_is_there_is_told_to_them_and_to_the_admin() -> None:
    proxy = opened(api_key="mine")
    for headers in ({}, {"x-api-key": "mine"}, {"authorization": "Bearer secret"}):
        reply = await instances(proxy, "GET", headers=headers)
        assert (reply.status, reply.error["type"]) == (401, "authentication_error")
    for headers in (KEY, {"authorization": "Bearer mine"}):
        assert (await instances(proxy, "GET", headers=headers)).status == 200
    # It does not let callers do more than look.
    assert (await register(proxy, D1, {"authorization": "Bearer mine"})).status == 403


async def test_the_admins_key_may_hold_what_is_not_ascii() -> None:
    proxy = opened(admin_api_key="sécret")
    assert (await register(proxy, D1, {"x-api-key": "sécret"})).status == 200
    assert (await register(proxy, D1, {"x-api-key": "secret"})).status == 403


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
async def test_other_methods_are_a_405(method: str) -> None:
    reply = await instances(opened(), method)
    assert (reply.status, reply.header("allow")) == (405, "GET, POST, DELETE")


# Registration


async def test_an_engine_that_registers_is_live_at_once_and_known_the_next_time() -> None:
    backends = Backends(encode=0)
    proxy = backends.proxy(**OPEN, decode=())
    assert (await chat(proxy, ask(TEXT))).status == 503
    assert (await register(proxy, D1)).json() == {"registered": True}
    assert (await chat(proxy, ask(TEXT))).status == 200
    assert (await register(proxy, D1)).json() == {"registered": False}
    assert (await register(proxy, {**D1, "url": "http://D0:8000/"})).json() == {"registered": False}
    assert await listed(proxy) == {"prefill_decode": {"live": [D1["url"]]}}
    await proxy.aclose()


async def test_registering_again_changes_what_is_said_and_keeps_health_and_drain() -> None:
    proxy = opened(fail_threshold=1)
    await registered(proxy, D1, D2)
    first, second = proxy.registry.instances()
    proxy.registry.health[Role.DECODE].probed(first, False)
    await drain(proxy, D2["url"])
    more = {
        "weight": 2.5,
        "dp_size": 2,
        "ec_zmq_addrs": ["tcp://0", "tcp://1"],
        "models": ["a", "b"],
        "labels": {"zone": "z"},
        "unknown": [1],
    }
    for body in (D1, D2):
        assert (await register(proxy, {**body, **more})).json() == {"registered": False}
    assert await listed(proxy) == {
        "prefill_decode": {"evicted": [D1["url"]], "draining": [D2["url"]]}
    }
    assert proxy.registry.instances() == [first, second]
    assert (first.weight, first.models, first.labels) == (2.5, ("a", "b"), {"zone": "z"})
    assert {first.next_replica().ec_address for _ in range(2)} == {"tcp://0", "tcp://1"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no json",
        b"[]",
        b'{"role":"encode"}',
        b'{"url":"http://e"}',
        b"[" * 100_000,
        {**E1, "role": "boss"},
        {**E1, "role": 1},
        {**E1, "url": 1},
        {**E1, "url": "e0:8000"},
        {**E1, "url": "ftp://e0"},
        {**E1, "url": "http://"},
        {**E1, "url": "http://e0:0"},
        {**E1, "url": "http://e0:99999"},
        {**E1, "url": "http://user:word@e0"},
        {**E1, "url": "http://e0?x=1"},
        {**E1, "url": "http://e 0"},
        {**E1, "url": "dns+http://e0:8000"},
        {**E1, "url": "dns+srv+http://e0"},
        {**E1, "url": "http://-é-"},
        {**E1, "dp_size": 0},
        {**E1, "dp_size": -1},
        {**E1, "dp_size": "two"},
        {**D1, "ec_zmq_addrs": ["tcp://0", "tcp://1"]},
        {**D1, "dp_size": 2, "ec_zmq_addrs": ["tcp://0"]},
        {**D1, "ec_zmq_addrs": "tcp://0"},
        {**D1, "weight": 0},
        {**D1, "models": "m"},
        {**D1, "labels": {"a": 1}},
        {**D1, "ttl": 0},
        {**D1, "ttl": -1},
        {**D1, "ttl": "soon"},
        b'{"role":"encode","url":"http://e0","ttl":1e999}',
    ],
    ids=lambda body: str(body)[:60],
)
async def test_what_no_instance_can_be_like_is_a_422(body: Any) -> None:
    proxy = opened()
    reply = await register(proxy, body)
    assert (reply.status, reply.error["type"]) == (422, "invalid_request_error")
    assert await listed(proxy) == {}


@pytest.mark.parametrize("role", ["encode", "decode", "prefill"])
async def test_push_addresses_of_who_is_not_pushed_to_are_a_400(role: str) -> None:
    proxy = opened()
    reply = await register(proxy, {**E1, "role": role, "ec_zmq_addrs": ["tcp://0"]})
    assert (reply.status, reply.error["param"]) == (400, "ec_zmq_addrs")
    assert await listed(proxy) == {}


@pytest.mark.parametrize("role", ["encode", "decode"])
@pytest.mark.parametrize("addresses", [None, []])
async def test_no_push_addresses_are_for_everybody(role: str, addresses: Any) -> None:
    await registered(opened(), {**E1, "role": role, "ec_zmq_addrs": addresses})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (D1, P1),
        (P1, D1),
        ({**SPLIT, "url": "http://split"}, D1),
        (D1, {**SPLIT, "url": "http://split"}),
        (D1, SPLIT),
        (SPLIT, D1),
        (E1, {**E1, "role": "prefill"}),
        (E1, {**E1, "role": "prefill_decode"}),
    ],
)
async def test_what_cannot_be_together_is_a_409_also_where_the_other_is_out(
    first: Any, second: Any
) -> None:
    proxy = opened(fail_threshold=1)
    await registered(proxy, first)
    (instance,) = proxy.registry.instances()
    for state in ("live", "evicted"):
        reply = await register(proxy, second)
        assert (reply.status, reply.error["type"]) == (409, "invalid_request_error")
        assert await listed(proxy) == {first["role"]: {state: [first["url"]]}}
        proxy.registry.health[instance.role].probed(instance, False)


async def test_kinds_that_go_together_are_taken() -> None:
    await registered(opened(), E1, P1, SPLIT)
    await registered(opened(), E1, D1, D2)


async def test_a_configured_instance_may_register_too_and_keeps_its_own_say() -> None:
    proxy = Backends(encode=0).proxy(**OPEN, decode="http://d0:8000=3")
    assert (await register(proxy, D1)).json() == {"registered": False}
    assert proxy.registry.instances()[0].weight == 3
    assert (await register(proxy, {**D1, "role": "encode"})).status == 409


async def test_a_body_that_is_too_large_is_a_413() -> None:
    assert (await register(opened(), b" " * ((1 << 20) + 1))).status == 413


async def test_requests_go_to_whoever_serves_their_model_as_registered() -> None:
    backends = Backends(encode=0, decode=2)
    proxy = backends.proxy(**OPEN, decode=())
    await registered(proxy, {**D1, "models": ["m"]}, {**D2, "models": ["other"]})
    for _ in range(4):
        assert (await chat(proxy, ask(TEXT))).status == 200
    assert [len(engine.requests) for engine in backends.decode] == [4, 0]
    assert (await chat(proxy, ask(TEXT, model="third"))).status == 404
    await proxy.aclose()


# The end of a registration


async def test_deregistering_says_whether_there_was_anybody() -> None:
    proxy = opened()
    await registered(proxy, D1, D2)
    assert (await deregister(proxy, "http://D0:8000/")).json() == {"removed": True}
    assert (await deregister(proxy, D1["url"])).json() == {"removed": False}
    assert await listed(proxy) == {"prefill_decode": {"live": [D2["url"]]}}


async def test_an_instance_that_others_declare_cannot_be_deregistered() -> None:
    proxy = Backends(encode=0).proxy(**OPEN)
    await register(proxy, D1)
    reply = await deregister(proxy, D1["url"])
    assert (reply.status, reply.error["type"]) == (409, "invalid_request_error")
    assert "flags" in reply.error["message"]
    assert await listed(proxy) == {"prefill_decode": {"live": [D1["url"]]}}


@pytest.mark.parametrize(
    "given", [b"", b"url=", b"url=d0:8000", b"uri=http://d0", b"url=http%3A%2F%2Fd%200"]
)
@pytest.mark.parametrize(
    ("method", "path"), [("DELETE", ""), ("POST", "/drain"), ("DELETE", "/drain")]
)
async def test_a_query_without_a_url_is_a_422(given: bytes, method: str, path: str) -> None:
    reply = await instances(opened(), method, path=path, query_string=given)
    assert (reply.status, reply.error["param"]) == (422, "url")


async def test_whoever_has_gone_finishes_what_it_has_and_gets_nothing_new() -> None:
    backends = Backends(encode=0)
    proxy = backends.proxy(**OPEN, decode=())
    await registered(proxy, D1)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        begun.set()
        await go_on.wait()
        return httpx.Response(200, json={"choices": []})

    backends.decode[0].route.mock(side_effect=answer)
    running = asyncio.create_task(chat(proxy, ask(TEXT)))
    await begun.wait()
    await deregister(proxy, D1["url"])
    reply = await chat(proxy, ask(TEXT))
    assert (reply.status, reply.header("retry-after")) == (503, "1")
    go_on.set()
    assert (await running).status == 200
    assert len(backends.decode[0].requests) == 1
    await proxy.aclose()


async def test_whoever_returns_while_it_works_has_the_load_it_had() -> None:
    backends = Backends(encode=0)
    proxy = backends.proxy(**OPEN, decode=())
    await registered(proxy, D1)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        begun.set()
        await go_on.wait()
        return httpx.Response(200, json={"choices": []})

    backends.decode[0].route.mock(side_effect=answer)
    running = asyncio.create_task(chat(proxy, ask(TEXT)))
    await begun.wait()
    await deregister(proxy, D1["url"])
    await registered(proxy, D1)
    (instance,) = proxy.registry.instances()
    assert instance.load == 1
    go_on.set()
    await running
    assert instance.load == 0
    await proxy.aclose()


# Heartbeats


async def test_a_registration_lasts_as_long_as_it_says_unless_it_is_said_again() -> None:
    proxy = opened()
    await registered(proxy, {**D1, "ttl": 10}, {**D2, "ttl": 10})
    for _ in range(5):
        await asyncio.sleep(6)
        assert (await register(proxy, {**D2, "ttl": 10})).json() == {"registered": False}
    assert await listed(proxy) == {"prefill_decode": {"live": [D2["url"]]}}
    assert (await register(proxy, {**D1, "ttl": 10})).json() == {"registered": True}


async def test_a_heartbeat_without_a_time_makes_a_registration_last() -> None:
    proxy = opened()
    await registered(proxy, {**D1, "ttl": 10})
    await register(proxy, D1)
    await asyncio.sleep(1e6)
    assert await listed(proxy) == {"prefill_decode": {"live": [D1["url"]]}}


async def test_a_heartbeat_undoes_no_drain() -> None:
    proxy = opened()
    await registered(proxy, {**D1, "ttl": 10})
    await drain(proxy, D1["url"])
    await asyncio.sleep(5)
    await register(proxy, {**D1, "ttl": 10})
    await asyncio.sleep(9)
    assert await listed(proxy) == {"prefill_decode": {"draining": [D1["url"]]}}


async def test_an_instance_that_others_declare_stays_when_its_time_has_passed() -> None:
    proxy = Backends(encode=0).proxy(**OPEN, probe_interval=0)
    await register(proxy, {**D1, "ttl": 10})
    await asyncio.sleep(11)
    assert await listed(proxy) == {"prefill_decode": {"live": [D1["url"]]}}
    assert (await deregister(proxy, D1["url"])).status == 409


async def test_an_old_time_is_nothing_to_a_proxy_that_started_anew() -> None:
    proxy = opened()
    await registered(proxy, {**D1, "ttl": 10})
    await proxy.aclose()
    await asyncio.sleep(6)
    assert (await register(proxy, {**D1, "ttl": 10})).json() == {"registered": False}
    await asyncio.sleep(6)
    assert await listed(proxy) == {"prefill_decode": {"live": [D1["url"]]}}
    await asyncio.sleep(6)
    assert await listed(proxy) == {}


# Addresses


def served_at(host: str, port: int, named: str = "proxy.example", scheme: str = "http") -> Any:
    """How a request comes that was sent to ``named``."""
    headers = {**KEY, "host": named}
    return {"headers": headers, "server": (host, port), "scheme": scheme}


OWN = [
    ("http://127.0.0.1:8000", served_at("127.0.0.1", 8000)),
    ("http://localhost:8000/", served_at("127.0.0.1", 8000)),
    ("http://LOCALHOST:8000", served_at("127.0.0.1", 8000)),
    ("http://[::1]:8000", served_at("127.0.0.1", 8000)),
    ("http://[0:0::1]:8000", served_at("127.0.0.1", 8000)),
    ("http://127.0.0.1:8000", served_at("::1", 8000)),
    ("http://127.0.0.1:8000", served_at("10.0.0.9", 8000, "localhost:8000")),
    ("http://10.0.0.9:8000/llm", served_at("10.0.0.9", 8000)),
    ("http://10.0.0.9", served_at("10.0.0.9", 80)),
    ("https://10.0.0.9", served_at("10.0.0.9", 443)),
    ("http://proxy.example:8000", served_at("10.0.0.9", 8000, "proxy.example:8000")),
    ("http://Proxy.example:80", served_at("10.0.0.9", 8000)),
    ("https://proxy.example", served_at("10.0.0.9", 8000, scheme="https")),
    ("http://[fd00::9]:8000", served_at("10.0.0.9", 8000, "[fd00::9]:8000")),
]


@pytest.mark.parametrize(("url", "scope"), OWN)
async def test_the_proxys_own_url_is_refused(url: str, scope: Any) -> None:
    proxy = opened()
    reply = await register(proxy, {**E1, "url": url}, **scope)
    assert reply.status == 422
    assert "is the proxy itself" in reply.error["message"]
    assert await listed(proxy) == {}


@pytest.mark.parametrize(
    ("url", "scope"),
    [
        ("http://127.0.0.1:8001", served_at("127.0.0.1", 8000)),
        ("http://10.0.0.8:8000", served_at("10.0.0.9", 8000)),
        ("http://proxy.example:8001", served_at("10.0.0.9", 8000)),
        ("http+unix://%2Frun%2Fengine", served_at("10.0.0.9", 8000)),
        ("http://127.0.0.1:8000", {"headers": KEY}),
        ("http://e0", {"headers": KEY, "server": ("/run/proxy", None)}),
        ("http://e0", {"headers": KEY, "server": None}),
    ],
)
async def test_a_neighbour_of_the_proxy_is_not_the_proxy(url: str, scope: Any) -> None:
    assert (await register(opened(), {**E1, "url": url}, **scope)).status == 200


@pytest.mark.parametrize("host", ["[", "a:b:c", "h:99999"])
async def test_a_host_header_that_is_none_breaks_nothing(host: str) -> None:
    scope = served_at("10.0.0.9", 8000, host)
    assert (await register(opened(), E1, **scope)).status in (200, 422)


@pytest.mark.parametrize(
    "url", ["http://10.1.2.3:8000", "http://192.168.0.7", "http://[fd00:1::2]:8000"]
)
async def test_addresses_in_the_allowed_networks_are_taken(url: str) -> None:
    proxy = opened(allowed_instance_networks="10.0.0.0/8,192.168.0.7,fd00:1::/32")
    await registered(proxy, {**E1, "url": url})


@pytest.mark.parametrize(
    "url",
    [
        "http://11.0.0.1:8000",
        "http://192.168.0.8",
        "http://[fd00:2::2]:8000",
        "http://[::ffff:11.0.0.1]",
        "http://engine.example:8000",
        "http://localhost:8000",
        "http://167838211:8000",
        "http://0x0a010203:8000",
        "http://10.1:8000",
        "http+unix://%2Frun%2Fengine",
    ],
)
async def test_other_addresses_and_all_names_are_refused_where_networks_are_allowed(
    url: str,
) -> None:
    proxy = opened(allowed_instance_networks="10.0.0.0/8,192.168.0.7,fd00:1::/32")
    assert (await register(proxy, {**E1, "url": url})).status == 422
    assert await listed(proxy) == {}


@pytest.mark.parametrize("networks", ["10.0.0.0/33", "10.0.0.1/8", "engine.example"])
def test_networks_that_are_none_stop_the_start(networks: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-instance-networks"):
        opened(allowed_instance_networks=networks)


# Draining


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


async def test_draining_an_idle_instance_is_answered_at_once_and_may_be_repeated() -> None:
    proxy = opened()
    await registered(proxy, D1, D2)
    async with asyncio.timeout(0.5):
        for _ in range(2):
            reply = await drain(proxy, "http://D0:8000/")
            assert (reply.status, reply.json()) == (200, {"drained": True, "load": 0})
    assert await listed(proxy) == {"prefill_decode": {"live": [D2["url"]], "draining": [D1["url"]]}}
    assert [one.url for one in proxy.registry.ready(Role.DECODE)] == [D2["url"]]


async def test_a_drain_is_answered_when_the_running_work_has_ended() -> None:
    backends = Backends(encode=0, decode=2)
    proxy = backends.proxy(**OPEN, decode_selector="tests.test_calls:First", probe_interval=0)
    slow = Slow(backends)
    running = asyncio.create_task(chat(proxy, ask(TEXT)))
    await slow.has_begun.wait()
    draining = asyncio.create_task(drain(proxy, D1["url"]))
    await asyncio.sleep(30)
    assert not draining.done()
    # Meanwhile the others get what is new.
    assert (await chat(proxy, ask(TEXT))).status == 200
    assert len(backends.decode[1].requests) == 1
    slow.may_end.set()
    assert (await running).status == 200
    assert (await draining).json() == {"drained": True, "load": 0}
    await proxy.aclose()


async def test_a_drain_does_not_wait_for_longer_than_it_may_and_goes_on() -> None:
    backends = Backends(encode=0, decode=2)
    proxy = backends.proxy(
        **OPEN, decode_selector="tests.test_calls:First", drain_timeout=5, probe_interval=0
    )
    slow = Slow(backends)
    running = asyncio.create_task(chat(proxy, ask(TEXT)))
    await slow.has_begun.wait()
    began = asyncio.get_running_loop().time()
    reply = await drain(proxy, D1["url"])
    assert (reply.status, reply.json()) == (200, {"drained": False, "load": 1})
    assert 4.9 < asyncio.get_running_loop().time() - began < 5.2
    assert (await listed(proxy))["prefill_decode"]["draining"] == [D1["url"]]
    slow.may_end.set()
    assert (await running).status == 200
    assert (await drain(proxy, D1["url"])).json() == {"drained": True, "load": 0}
    await proxy.aclose()


async def test_without_a_limit_a_drain_waits_for_ever() -> None:
    proxy = opened(drain_timeout=0)
    await registered(proxy, D1)
    (instance,) = proxy.registry.instances()
    instance.load = 1
    draining = asyncio.create_task(drain(proxy, D1["url"]))
    await asyncio.sleep(1e6)
    assert not draining.done()
    instance.ease(1)
    assert (await draining).json() == {"drained": True, "load": 0}


async def test_a_drain_may_be_taken_back() -> None:
    proxy = opened()
    await registered(proxy, D1, D2)
    await drain(proxy, D1["url"])
    await drain(proxy, D2["url"])
    reply = await drain(proxy, D1["url"], "DELETE")
    assert (reply.status, reply.json()) == (200, {"drained": False, "load": 0})
    assert await listed(proxy) == {"prefill_decode": {"live": [D1["url"]], "draining": [D2["url"]]}}


async def test_a_configured_instance_can_be_drained() -> None:
    proxy = Backends(encode=0).proxy(**OPEN)
    assert (await drain(proxy, D1["url"])).json()["drained"]
    reply = await chat(proxy, ask(TEXT))
    assert (reply.status, reply.header("retry-after")) == (503, "1")


@pytest.mark.parametrize("method", ["POST", "DELETE"])
async def test_a_drain_of_nobody_is_a_404(method: str) -> None:
    reply = await drain(opened(), "http://nobody", method)
    assert (reply.status, reply.error["type"]) == (404, "not_found_error")


async def test_whoever_drained_and_went_and_came_back_is_live() -> None:
    proxy = opened()
    await registered(proxy, D1)
    await drain(proxy, D1["url"])
    await deregister(proxy, D1["url"])
    await registered(proxy, D1)
    assert await listed(proxy) == {"prefill_decode": {"live": [D1["url"]]}}
    assert proxy.registry.draining(API) == set()


# Who is there


async def test_the_list_tells_kinds_and_states() -> None:
    proxy = opened(fail_threshold=1)
    await registered(proxy, E1, P1, SPLIT, {**SPLIT, "url": "http://d9"})
    prefill = proxy.registry.find(P1["url"])
    assert prefill is not None
    proxy.registry.health[Role.PREFILL].probed(prefill, False)
    await drain(proxy, E1["url"])
    assert await listed(proxy) == {
        "encode": {"draining": [E1["url"]]},
        "prefill": {"evicted": [P1["url"]]},
        "decode": {"live": [SPLIT["url"], "http://d9"]},
    }


async def test_an_open_fleet_is_well_while_it_is_empty_and_not_while_all_are_out() -> None:
    backends = Backends(encode=0)
    proxy = backends.proxy(**OPEN, decode=(), probe_interval=0)
    reply = await call(proxy, "GET", "/health")
    assert (reply.status, reply.json()["decode_cluster"]) == (200, "empty")
    await registered(proxy, D1)
    route = backends.router.get("http://d0:8000/health").respond(503)
    assert (await call(proxy, "GET", "/health")).status == 503
    route.respond(200)
    assert (await call(proxy, "GET", "/health")).json()["decode_cluster"] == "healthy"
