"""
Requests while the fleet changes under them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from msgspec import structs

from epd_proxy import Config, EPDProxy, Instance, Role
from epd_proxy import calls as module
from epd_proxy.health import RoleHealth
from epd_proxy.pool import ConnectionPool
from epd_proxy.registry import API, Kind, Spec
from tests.backends import Backends, ask, decoded, image, prefilled, streamed
from tests.driver import Reply, chat
from tests.fake_time import LEAPING, leaping
from tests.test_calls import FIRST, PUSH, REPORT, ROLES, counts, engines, fleet, loads, status
from tests.wire import LIMIT, Peer, serving

TEXT = {"type": "text", "text": "hello"}


@pytest.fixture
def anyio_backend() -> Any:
    return LEAPING


@pytest.fixture(autouse=True)
def in_fake_time(monkeypatch: pytest.MonkeyPatch) -> None:
    leaping(monkeypatch)
    monkeypatch.setattr(module, "backoff", lambda attempt, rng: 0.0)


def member(proxy: EPDProxy, role: str, number: int = 0) -> Instance:
    instance = proxy.registry.find(f"http://{role[0]}{number}:8000")
    assert instance is not None
    return instance


def when_asked(backends: Backends, role: str, act: Callable[[], object]) -> None:
    """The first engine of the role answers well, after ``act``."""
    good = {"encode": REPORT, "prefill": prefilled(), "decode": decoded()}

    def answer(request: httpx.Request) -> httpx.Response:
        act()
        return good[role]

    engines(backends, role)[0].route.mock(side_effect=answer)


def now() -> float:
    return asyncio.get_running_loop().time()


# Models


def modelled(backends: Backends, *models: list[str], **options: Any) -> EPDProxy:
    """A proxy whose decode servers declare these."""
    decode = [
        {"url": engine.url, "models": names}
        for engine, names in zip(backends.decode, models, strict=True)
    ]
    return backends.proxy(**{"decode": decode, **options})


async def test_a_model_that_nobody_serves_is_a_404_in_openais_shape_and_troubles_nobody() -> None:
    backends = fleet(decode=2)
    reply = await chat(modelled(backends, ["a"], ["b"]), ask(image(), model="c"))
    assert reply.status == 404
    assert reply.error.keys() >= {"message", "type", "param", "code"}
    assert (reply.error["param"], reply.error["code"]) == ("model", 404)
    assert "'c'" in reply.error["message"]
    assert [counts(backends, role) for role in ROLES] == [[0], [0], [0, 0]]


async def test_a_long_name_of_a_model_is_not_repeated_at_length() -> None:
    reply = await chat(modelled(fleet(), ["a"]), ask(TEXT, model="x" * 10_000))
    assert reply.status == 404
    assert len(reply.body) < 1000


async def test_requests_go_to_those_alone_that_serve_their_model() -> None:
    backends = fleet(encode=0, prefill=0, decode=3)
    proxy = modelled(backends, ["a"], ["a", "b"], ["b"])
    for _ in range(4):
        assert (await chat(proxy, ask(TEXT, model="a"))).status == 200
    assert counts(backends, "decode") == [2, 2, 0]
    for _ in range(4):
        assert (await chat(proxy, ask(TEXT, model="b"))).status == 200
    assert counts(backends, "decode") == [2, 4, 2]


@pytest.mark.parametrize("model", [None, ""])
async def test_who_names_no_model_is_served(model: Any) -> None:
    backends = fleet(encode=0, prefill=0, decode=2)
    proxy = modelled(backends, ["a"], ["b"])
    body = ask(TEXT)
    for content in ({**body, "model": model}, {"messages": body["messages"]}):
        assert (await chat(proxy, content)).status == 200
    assert counts(backends, "decode") == [1, 1]


async def test_every_stage_of_a_request_is_of_its_model() -> None:
    backends = fleet(encode=2, prefill=2, decode=2)
    tables = {
        role: [
            {"url": engine.url, "models": [name]}
            for engine, name in zip(engines(backends, role), "ab", strict=True)
        ]
        for role in ROLES
    }
    proxy = backends.proxy(**tables)
    for _ in range(3):
        assert (await chat(proxy, ask(image(), model="b"))).status == 200
    assert [counts(backends, role) for role in ROLES] == [[0, 3]] * 3


@pytest.mark.parametrize("failure", [status(500), httpx.ConnectError("refused")])
async def test_what_is_tried_again_is_tried_with_those_of_its_model(failure: Any) -> None:
    backends = fleet(encode=0, prefill=0, decode=3)
    backends.decode[0].answers(failure)
    proxy = modelled(backends, ["a"], ["b"], ["a"], **FIRST)
    assert (await chat(proxy, ask(TEXT, model="a"))).status == 200
    assert counts(backends, "decode") == [1, 0, 1]


async def test_a_model_whose_servers_are_all_out_is_a_503_and_not_unknown() -> None:
    backends = fleet(encode=0, prefill=0, decode=2)
    proxy = modelled(backends, ["a"], ["b"])
    proxy.registry.drain(API, {"http://d0:8000"})
    reply = await chat(proxy, ask(TEXT, model="a"))
    assert (reply.status, reply.header("retry-after")) == (503, "1")
    assert (await chat(proxy, ask(TEXT, model="b"))).status == 200


async def test_encoders_of_other_models_are_as_good_as_none() -> None:
    backends = fleet()
    proxy = backends.proxy(encode=[{"url": backends.encode[0].url, "models": ["other"]}])
    reply = await chat(proxy, ask(image()))
    assert (reply.status, reply.error["stage"]) == (503, "encode")
    assert (await chat(proxy, ask(TEXT))).status == 200


# Waiting for somebody to be ready


async def waited(proxy: EPDProxy, body: Any) -> tuple[Reply, float]:
    """The answer, and how long it took."""
    began = now()
    reply = await chat(proxy, body)
    return reply, now() - began


@pytest.mark.parametrize("role", ROLES)
async def test_a_request_waits_for_an_instance_and_is_served_as_soon_as_there_is_one(
    role: str,
) -> None:
    backends = fleet()
    proxy = backends.proxy(wait_for_ready=10, probe_interval=0)
    proxy.registry.drain(API, {member(proxy, role).url})
    asyncio.get_running_loop().call_later(4, proxy.registry.drain, API, set())
    reply, seconds = await waited(proxy, ask(image()))
    assert reply.status == 200
    assert 3.9 < seconds < 4.1
    assert [counts(backends, each) for each in ROLES] == [[1]] * 3
    assert proxy.registry._waiting == []


@pytest.mark.parametrize("role", ROLES)
async def test_whom_nobody_serves_in_time_gets_a_503_that_says_when_to_come_again(
    role: str,
) -> None:
    backends = fleet()
    proxy = backends.proxy(wait_for_ready=10, probe_interval=0)
    proxy.registry.drain(API, {member(proxy, role).url})
    # Others come and go meanwhile.
    asyncio.get_running_loop().call_later(5, proxy.registry.refresh)
    reply, seconds = await waited(proxy, ask(image()))
    assert (reply.status, reply.error["stage"], reply.header("retry-after")) == (503, role, "1")
    assert reply.error["type"] == "overloaded_error"
    assert 9.9 < seconds < 10.1
    assert [counts(backends, each) for each in ROLES] == [[0]] * 3


async def test_by_default_nobody_waits() -> None:
    proxy = fleet().proxy(probe_interval=0)
    proxy.registry.drain(API, {member(proxy, "decode").url})
    reply, seconds = await waited(proxy, ask(TEXT))
    assert (reply.status, seconds) == (503, 0)


async def test_a_request_waits_for_one_that_serves_its_model() -> None:
    backends = fleet(encode=0, prefill=0, decode=2)
    proxy = modelled(backends, ["m"], ["other"], wait_for_ready=10, probe_interval=0)
    proxy.registry.drain(API, {member(proxy, "decode").url})
    asyncio.get_running_loop().call_later(4, proxy.registry.drain, API, set())
    reply, seconds = await waited(proxy, ask(TEXT))
    assert (reply.status, counts(backends, "decode")) == (200, [1, 0])
    assert 3.9 < seconds < 4.1


async def test_a_request_waits_for_the_first_engine_that_registers() -> None:
    backends = fleet(encode=0, prefill=0)
    open_fleet = {"dynamic_registration": True, "admin_api_key": "k", "decode": ()}
    proxy = backends.proxy(**open_fleet, wait_for_ready=10, probe_interval=0)
    spec = Spec(Kind.PREFILL_DECODE, backends.decode[0].url)
    asyncio.get_running_loop().call_later(4, proxy.registry.register, API, spec)
    assert (await waited(proxy, ask(TEXT)))[0].status == 200


async def test_a_caller_who_leaves_while_it_waits_leaves_nothing_behind() -> None:
    proxy = fleet().proxy(wait_for_ready=100, probe_interval=0)
    proxy.registry.drain(API, {member(proxy, "decode").url})
    waiting = asyncio.create_task(chat(proxy, ask(TEXT)))
    await asyncio.sleep(1)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert proxy.registry._waiting == []
    await proxy.aclose()


async def test_the_callers_own_limit_ends_the_wait() -> None:
    proxy = fleet().proxy(wait_for_ready=100, probe_interval=0)
    proxy.registry.drain(API, {member(proxy, "decode").url})
    reply = await chat(proxy, ask(TEXT), {"x-request-timeout": "3"})
    assert reply.status == 504
    assert 2.9 < now() < 3.1


async def test_a_decode_server_that_needs_prefill_servers_and_has_none_is_a_503() -> None:
    backends = fleet(encode=0)
    proxy = backends.proxy(dynamic_registration=True, admin_api_key="k", decode=(), prefill=())
    proxy.registry.register(API, Spec(Kind.DECODE, backends.decode[0].url))
    reply = await chat(proxy, ask(TEXT))
    assert (reply.status, reply.error["stage"]) == (503, "prefill")
    proxy.registry.register(API, Spec(Kind.PREFILL, backends.prefill[0].url))
    assert (await chat(proxy, ask(TEXT))).status == 200
    assert counts(backends, "prefill") == counts(backends, "decode") == [1]
    await proxy.aclose()


async def test_an_open_fleet_serves_text_without_encoders_and_media_not_raw() -> None:
    backends = fleet(encode=0, prefill=0)
    proxy = backends.proxy(dynamic_registration=True, admin_api_key="k", probe_interval=0)
    assert (await chat(proxy, ask(TEXT))).status == 200
    reply = await chat(proxy, ask(image()))
    assert (reply.status, reply.error["stage"]) == (503, "encode")
    assert counts(backends, "decode") == [1]


# Whoever is removed


@pytest.mark.parametrize("role", ROLES)
async def test_one_that_is_removed_between_the_choice_and_the_sending_gets_nothing(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends = fleet(**{role: 2})
    proxy = backends.proxy(**FIRST)
    everybody = proxy.registry.instances()
    removed = member(proxy, role)
    pick = module.Calls.pick

    def pick_and_remove(self: module.Calls, asked: Role, key: str | None = None) -> Instance:
        chosen = pick(self, asked, key)
        if chosen is removed and not removed.is_removed:
            proxy.registry.remove(removed)
        return chosen

    monkeypatch.setattr(module.Calls, "pick", pick_and_remove)
    assert (await chat(proxy, ask(image()))).status == 200
    assert counts(backends, role) == [0, 1]
    assert [one.load for one in everybody] == [0] * 4


@pytest.mark.parametrize("role", ROLES)
async def test_where_the_last_is_removed_before_the_sending_it_is_an_honest_503(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends = fleet()
    proxy = backends.proxy()
    removed = member(proxy, role)
    pick = module.Calls.pick

    def pick_and_remove(self: module.Calls, asked: Role, key: str | None = None) -> Instance:
        chosen = pick(self, asked, key)
        if chosen is removed:
            proxy.registry.remove(removed)
        return chosen

    monkeypatch.setattr(module.Calls, "pick", pick_and_remove)
    reply = await chat(proxy, ask(image()))
    assert (reply.status, reply.error["stage"], reply.header("retry-after")) == (503, role, "1")
    assert counts(backends, role) == [0]
    assert removed.load == 0


async def test_of_items_that_are_assigned_already_those_of_a_removed_encoder_go_elsewhere() -> None:
    backends = fleet(encode=2, prefill=0)
    proxy = backends.proxy(encoder_batch_size=1)
    everybody = proxy.registry.instances()

    def echo(request: httpx.Request) -> httpx.Response:
        other = member_or_none(proxy, 1 if request.url.host == "e0" else 0)
        if other is not None:
            proxy.registry.remove(other)
        return REPORT

    for engine in backends.encode:
        engine.route.mock(side_effect=echo)
    pictures = [image(f"http://media/{number}") for number in range(2)]
    assert (await chat(proxy, ask(*pictures))).status == 200
    assert sorted(counts(backends, "encode")) == [0, 2]
    assert [one.load for one in everybody] == [0] * 3


def member_or_none(proxy: EPDProxy, number: int) -> Instance | None:
    return proxy.registry.find(f"http://e{number}:8000")


@pytest.mark.parametrize("role", ROLES)
async def test_one_that_is_removed_while_it_works_ends_its_work(role: str) -> None:
    backends = fleet(**{role: 2})
    proxy = backends.proxy(**FIRST)
    working = member(proxy, role)
    when_asked(backends, role, lambda: proxy.registry.remove(working))
    assert (await chat(proxy, ask(image()))).status == 200
    assert counts(backends, role) == [1, 0]
    assert working.load == 0
    assert (await chat(proxy, ask(image()))).status == 200
    assert counts(backends, role) == [1, 1]


async def test_one_that_is_removed_and_returns_while_it_works_keeps_an_exact_load() -> None:
    backends = fleet(encode=0, prefill=0)
    proxy = backends.proxy(dynamic_registration=True, admin_api_key="k", probe_interval=0)
    working = member(proxy, "decode")
    seen: list[int] = []

    def come_and_go() -> None:
        for _ in range(3):
            proxy.registry.remove(working)
            proxy.registry.register(API, Spec(Kind.PREFILL_DECODE, working.url))
            assert proxy.registry.find(working.url) is working
            seen.append(working.load)

    when_asked(backends, "decode", come_and_go)
    assert (await chat(proxy, ask(TEXT))).status == 200
    assert seen == [1, 1, 1]
    assert loads(proxy) == [0]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_whoever_waits_for_a_connection_to_one_that_is_removed_is_served_by_another(
    anyio_backend: Any,
) -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def busy(peer: Peer) -> None:
        while True:
            await peer.request()
            asked.set()
            await may_answer.wait()
            peer.send(ANSWER)

    async def free(peer: Peer) -> None:
        while True:
            await peer.request()
            peer.send(ANSWER)

    pool = ConnectionPool(max_connections=1)
    async with asyncio.timeout(LIMIT), serving(busy) as first, serving(free) as second:
        config = Config(
            decode=[first.url, second.url],
            decode_selector=FIRST["decode_selector"],
            probe_interval=0,
        )
        proxy = EPDProxy(config=config, transport=pool)
        async with proxy:
            running = asyncio.create_task(chat(proxy, ask(TEXT)))
            await asked.wait()
            waiting = asyncio.create_task(chat(proxy, ask(TEXT)))
            while "1 waiting" not in repr(pool):  # noqa: ASYNC110 - the pool sets no event
                await asyncio.sleep(0)
            asked.clear()
            removed = proxy.registry.instances()[0]
            proxy.registry.remove(removed)
            may_answer.set()
            replies = await asyncio.gather(running, waiting)
            assert [reply.status for reply in replies] == [200, 200]
            assert not asked.is_set()
            assert removed.load == 0
        await pool.aclose()
    assert len(second.peers) == 1


BODY = decoded().content
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)


# Whoever encoders push to


async def test_a_consumer_that_is_removed_after_it_was_named_has_everything_redone() -> None:
    backends = fleet(prefill=0, decode=2)
    proxy = backends.proxy(decode_retries=0, **PUSH, **FIRST)
    everybody = proxy.registry.instances()

    def remove() -> None:
        if (first := proxy.registry.find("http://d0:8000")) is not None:
            proxy.registry.remove(first)

    when_asked(backends, "encode", remove)
    assert (await chat(proxy, ask(image()))).status == 200
    pushed = [body["ec_transfer_params"]["consumer_zmq"] for body in backends.encode[0].bodies]
    assert pushed == ["tcp://0", "tcp://1"]
    assert counts(backends, "decode") == [0, 1]
    assert [one.load for one in everybody] == [0, 0, 0]


async def test_a_consumer_that_drains_after_it_was_named_is_kept() -> None:
    backends = fleet(prefill=0, decode=2)
    proxy = backends.proxy(**PUSH, **FIRST)
    when_asked(backends, "encode", lambda: proxy.registry.drain(API, {"http://d0:8000"}))
    assert (await chat(proxy, ask(image()))).status == 200
    assert counts(backends, "encode") == [1]
    assert counts(backends, "decode") == [1, 0]


async def test_where_the_last_consumer_is_removed_after_it_was_named_it_is_an_honest_503() -> None:
    backends = fleet(prefill=0)
    proxy = backends.proxy(ec_consumer_zmq_addrs="tcp://0")
    when_asked(backends, "encode", lambda: proxy.registry.remove(member(proxy, "decode")))
    reply = await chat(proxy, ask(image()))
    assert (reply.status, reply.error["stage"], reply.header("retry-after")) == (503, "decode", "1")
    assert counts(backends, "decode") == [0]
    assert loads(proxy) == [0]


async def test_where_the_last_consumer_to_push_to_is_removed_one_that_pulls_has_it_redone() -> None:
    backends = fleet(prefill=0, decode=2)
    proxy = backends.proxy(
        dynamic_registration=True, admin_api_key="k", decode=(), probe_interval=0, **FIRST
    )
    first, second = (Spec(Kind.PREFILL_DECODE, engine.url) for engine in backends.decode)
    proxy.registry.register(API, structs.replace(first, ec_zmq_addrs=("tcp://0",)))
    proxy.registry.register(API, second)
    removed = member(proxy, "decode")
    when_asked(backends, "encode", lambda: proxy.registry.deregister(API, removed.url))
    assert (await chat(proxy, ask(image()))).status == 200
    assert counts(backends, "decode") == [0, 1]
    params = [body.get("ec_transfer_params") for body in backends.encode[0].bodies]
    assert [bool(each) for each in params] == [True, False]
    assert removed.load == 0


async def test_a_consumer_that_registers_with_its_addresses_is_named_to_encoders() -> None:
    backends = fleet(prefill=0)
    proxy = backends.proxy(
        dynamic_registration=True, admin_api_key="k", decode=(), probe_interval=0
    )
    addresses = ("tcp://0", "tcp://1")
    spec = Spec(Kind.PREFILL_DECODE, backends.decode[0].url, dp_size=2, ec_zmq_addrs=addresses)
    proxy.registry.register(API, spec)
    for _ in range(2):
        assert (await chat(proxy, ask(image()))).status == 200
    pushed = [body["ec_transfer_params"]["consumer_zmq"] for body in backends.encode[0].bodies]
    ranks = [request.headers["x-data-parallel-rank"] for request in backends.decode[0].requests]
    assert sorted(pushed) == [*addresses]
    assert [f"tcp://{rank}" for rank in ranks] == pushed


# What calls tell of their instances


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is said of whom."""
    found: list[tuple[str, str]] = []

    def listen(name: str) -> None:
        def hear(self: RoleHealth[Instance], instance: Instance) -> None:
            found.append((instance.role, name))

        monkeypatch.setattr(RoleHealth, name, hear)

    for name in ("refused", "failed", "succeeded"):
        listen(name)
    return found


Told = list[tuple[str, str]]


async def test_what_went_well_is_told_of_everybody_who_served(told: Told) -> None:
    await chat(fleet().proxy(), ask(image()))
    assert told == [(role, "succeeded") for role in ROLES]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("failure", "word"),
    [
        (httpx.ConnectError("refused"), ["refused"]),
        (httpx.ConnectTimeout("5 s"), ["refused"]),
        # That is our own limit.
        (httpx.PoolTimeout("full"), []),
        (httpx.ReadError("reset"), ["failed"]),
        (httpx.RemoteProtocolError("closed"), ["failed"]),
        (httpx.ReadTimeout("late"), ["failed"]),
        *((status(code), ["failed"]) for code in (500, 502, 503, 504, 529)),
        *((status(code), ["succeeded"]) for code in (400, 401, 404, 409, 422, 429, 501)),
    ],
)
async def test_what_went_wrong_is_told_of_whom_it_speaks_against(
    role: str, failure: Any, word: list[str], told: Told
) -> None:
    backends = fleet()
    engines(backends, role)[0].answers(failure)
    await chat(backends.proxy(decode_retries=0, encode_retries=0), ask(image()))
    assert [said for whom, said in told if whom == role] == word


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("decode-stream-role-only.sse", "failed"),
        ("decode-stream-error-after-role.sse", "failed"),
        ("decode-stream.sse", "succeeded"),
    ],
)
async def test_a_stream_that_is_stillborn_speaks_against_its_server(
    name: str, word: str, told: Told
) -> None:
    backends = fleet(encode=0, prefill=0)
    backends.decode[0].answers(streamed(name))
    await chat(backends.proxy(decode_retries=0), ask(TEXT, stream=True))
    assert told == [("decode", word)]


async def test_a_stream_that_breaks_later_speaks_against_its_server(told: Told) -> None:
    async def broken() -> Any:
        yield b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
        raise httpx.ReadError("reset")

    backends = fleet(encode=0, prefill=0)
    headers = {"content-type": "text/event-stream"}
    backends.decode[0].answers(httpx.Response(200, headers=headers, content=broken()))
    with pytest.raises(Exception, match="broke the connection"):
        await chat(backends.proxy(), ask(TEXT, stream=True))
    assert told == [("decode", "failed")]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("by", ["leaving", "limit"])
async def test_a_caller_who_leaves_or_has_no_time_speaks_against_nobody(
    role: str, by: str, told: Told
) -> None:
    has_begun = asyncio.Event()

    async def hang(request: httpx.Request) -> httpx.Response:
        has_begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    backends = fleet()
    engines(backends, role)[0].route.mock(side_effect=hang)
    proxy = backends.proxy(probe_interval=0)
    headers = {"x-request-timeout": "5"} if by == "limit" else {}
    asking = asyncio.create_task(chat(proxy, ask(image()), headers))
    await has_begun.wait()
    if by == "leaving":
        asking.cancel()
    await asyncio.wait([asking])
    assert [said for whom, said in told if whom == role] == []
    await proxy.aclose()


async def test_one_that_refused_a_connection_gets_nothing_for_five_seconds() -> None:
    backends = fleet(encode=0, prefill=0, decode=2)
    backends.decode[0].answers(httpx.ConnectError("refused"), decoded())
    async with backends.proxy(**FIRST, probe_interval=0) as proxy:
        for _ in range(5):
            assert (await chat(proxy, ask(TEXT))).status == 200
        assert counts(backends, "decode") == [1, 5]
        await asyncio.sleep(5.1)
        assert (await chat(proxy, ask(TEXT))).status == 200
        assert counts(backends, "decode") == [2, 5]


async def test_one_that_fails_most_of_its_calls_is_ejected_and_returns_on_trial() -> None:
    backends = fleet(encode=0, prefill=0, decode=2)
    backends.decode[0].answers(status(504))
    async with backends.proxy(probe_interval=0) as proxy:
        failures = 0
        for _ in range(100):
            failures += (await chat(proxy, ask(TEXT))).status == 504
        assert failures == 20
        await asyncio.sleep(5.1)
        for _ in range(10):
            failures += (await chat(proxy, ask(TEXT))).status == 504
        assert failures == 21
        backends.decode[0].answers(decoded())
        await asyncio.sleep(5.1)
        before = counts(backends, "decode")[0]
        for _ in range(20):
            assert (await chat(proxy, ask(TEXT))).status == 200
        assert counts(backends, "decode")[0] - before == 10


async def test_a_refusal_ejects_nobody() -> None:
    backends = fleet(encode=0, prefill=0, decode=2)
    backends.decode[0].answers(status(400))
    proxy = backends.proxy(probe_interval=0)
    for _ in range(100):
        await chat(proxy, ask(TEXT))
    assert counts(backends, "decode") == [50, 50]


# A fleet that flaps


async def test_a_fleet_that_flaps_gives_200_and_honest_503_and_asks_nobody_who_has_gone() -> None:
    backends = fleet(encode=3, prefill=0, decode=3)
    registered = {"dynamic_registration": True, "admin_api_key": "k", "probe_interval": 0}
    proxy = backends.proxy(**registered, encode=(), decode=())
    specs = [
        Spec(kind, engine.url)
        for kind, role in ((Kind.ENCODE, "encode"), (Kind.PREFILL_DECODE, "decode"))
        for engine in engines(backends, role)
    ]
    seen: set[Instance] = set()
    gone: set[str] = {spec.url for spec in specs}

    def answer(good: httpx.Response) -> Callable[[httpx.Request], Any]:
        async def act(request: httpx.Request) -> httpx.Response:
            assert f"http://{request.url.host}:8000" not in gone
            await asyncio.sleep(0.01)
            return httpx.Response(good.status_code, content=good.content)

        return act

    for engine in backends.encode:
        engine.route.mock(side_effect=answer(REPORT))
    for engine in backends.decode:
        engine.route.mock(side_effect=answer(decoded()))

    async def flap() -> None:
        for number in range(300):
            spec = specs[number * 5 % len(specs)]
            if spec.url in gone:
                gone.discard(spec.url)
                proxy.registry.register(API, spec)
                seen.update(proxy.registry.instances())
            else:
                proxy.registry.deregister(API, spec.url)
                gone.add(spec.url)
            await asyncio.sleep(0.005)

    async def keep_asking() -> list[int]:
        found = []
        while not flapping.done():
            found.append((await chat(proxy, ask(image()))).status)
            await asyncio.sleep(0.001)
        return found

    flapping = asyncio.create_task(flap())
    answers = await asyncio.gather(*(keep_asking() for _ in range(8)))
    await flapping
    statuses = [status for found in answers for status in found]
    assert set(statuses) == {200, 503}
    assert statuses.count(200) > 100
    assert {one.load for one in seen} == {0}
    await proxy.aclose()
