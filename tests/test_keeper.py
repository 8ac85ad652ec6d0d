"""
What watches the fleet: probes of all, and the sources that say who is in it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import respx

from epd_proxy import Config, EPDProxy, Instance, Role
from epd_proxy.discovery.resolvers import Found
from epd_proxy.keeper import Keeper
from epd_proxy.registry import API, Kind, Registry, Spec
from epd_proxy.upstream import Upstream
from tests.backends import Backends, ask
from tests.driver import call, chat
from tests.fake_time import LEAPING, leaping

D1 = Spec(Kind.PREFILL_DECODE, "http://d0:8000")
TEXT = {"type": "text", "text": "hello"}


@pytest.fixture
def anyio_backend() -> Any:
    return LEAPING


@pytest.fixture(autouse=True)
def in_fake_time(monkeypatch: pytest.MonkeyPatch) -> None:
    leaping(monkeypatch)


class Engines:
    """Engines of which some are well, and who was asked."""

    def __init__(self) -> None:
        self.router = respx.Router(assert_all_called=False)
        self.router.get(path__regex="/health$").mock(side_effect=self._answer)
        self.ill: set[str] = set()
        self.hung: set[str] = set()
        self.asked: list[str] = []

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        url = str(request.url).removesuffix("/health")
        self.asked.append(url)
        if url in self.hung:
            await asyncio.Event().wait()
        if url in self.ill:
            raise httpx.ConnectError("refused")
        return httpx.Response(200)

    def upstream(self, config: Config) -> Upstream:
        return Upstream(httpx.MockTransport(self.router.async_handler), config)


File = tuple[Path, Callable[[Path], Config]]


class Kept:
    """A fleet that is watched."""

    def __init__(self, config: Config, file: File | None = None) -> None:
        self.engines = Engines()
        self.registry = Registry.of(config)
        upstream = self.engines.upstream(config)
        self.keeper = Keeper(config, self.registry, upstream, file)

    def urls(self, role: Role = Role.DECODE) -> list[str]:
        return [one.url for one in self.registry.ready(role)]

    def found(self, url: str) -> Instance:
        instance = self.registry.find(url)
        assert instance is not None
        return instance


@asynccontextmanager
async def keeping(file: File | None = None, **options: Any) -> AsyncIterator[Kept]:
    kept = Kept(Config(**options), file)
    before = asyncio.all_tasks()
    kept.keeper.start()
    async with asyncio.timeout(1):
        await kept.keeper.settled()
    yield kept
    await kept.keeper.aclose()
    assert asyncio.all_tasks() == before


# Probes


async def test_everybody_is_probed_those_who_were_configured_too() -> None:
    async with keeping(encode="http://e", prefill="http://p", decode="http://d") as kept:
        kept.registry.register(API, Spec(Kind.ENCODE, "http://new"))
        await asyncio.sleep(100)
        for url in ("http://e", "http://p", "http://d", "http://new"):
            assert 18 <= kept.engines.asked.count(url) <= 22


async def test_the_first_probe_comes_an_interval_after_the_instance_and_none_after_it_went() -> (
    None
):
    async with keeping(decode="http://d", probe_interval=10) as kept:
        await asyncio.sleep(100)
        kept.registry.register(API, Spec(Kind.ENCODE, "http://new"))
        await asyncio.sleep(8.9)
        assert "http://new" not in kept.engines.asked
        await asyncio.sleep(2.2)
        assert kept.engines.asked.count("http://new") == 1
        kept.registry.deregister(API, "http://new")
        await asyncio.sleep(100)
        assert kept.engines.asked.count("http://new") == 1


async def test_an_interval_of_nought_probes_nobody() -> None:
    async with keeping(decode="http://d", probe_interval=0) as kept:
        await asyncio.sleep(1000)
        assert kept.engines.asked == []


async def test_whoever_fails_so_many_probes_is_out_until_one_succeeds() -> None:
    async with keeping(decode="http://a,http://b", fail_threshold=2) as kept:
        kept.engines.ill.add("http://a")
        await asyncio.sleep(6)
        assert kept.urls() == ["http://a", "http://b"]
        await asyncio.sleep(6)
        assert kept.urls() == ["http://b"]
        assert kept.registry.state(kept.found("http://a")) == "evicted"
        kept.engines.ill.clear()
        await asyncio.sleep(6)
        assert kept.urls() == ["http://a", "http://b"]


@pytest.mark.parametrize("status", [204, 404, 500, 503])
async def test_only_200_is_well(status: int) -> None:
    kept = Kept(Config(decode="http://d"))
    instance = kept.found("http://d")
    kept.engines.router.routes.clear()
    route = kept.engines.router.get("http://d/health").respond(status)
    assert not await kept.keeper.is_well(instance)
    route.respond(200)
    assert await kept.keeper.is_well(instance)


async def test_whoever_does_not_answer_in_time_is_not_well_and_delays_nobody() -> None:
    async with keeping(decode="http://a,http://b", fail_threshold=1) as kept:
        kept.engines.hung.add("http://a")
        await asyncio.sleep(30)
        assert kept.urls() == ["http://b"]
        assert kept.engines.asked.count("http://b") >= 5


async def test_of_those_out_for_long_only_who_registered_is_forgotten() -> None:
    async with keeping(decode="http://flag", fail_threshold=1, evicted_ttl=60) as kept:
        both, registered = (Spec(D1.role, url) for url in ("http://flag", "http://api"))
        for spec in (both, registered):
            kept.registry.register(API, spec)
        kept.engines.ill |= {"http://flag", "http://api"}
        await asyncio.sleep(40)
        assert [one.url for one in kept.registry.instances()] == ["http://flag", "http://api"]
        await asyncio.sleep(40)
        assert [one.url for one in kept.registry.instances()] == ["http://flag"]
        asked = kept.engines.asked.count("http://api")
        await asyncio.sleep(1000)
        assert kept.engines.asked.count("http://api") == asked
        assert kept.engines.asked.count("http://flag") > 200
        kept.engines.ill.clear()
        await asyncio.sleep(6)
        assert kept.urls() == ["http://flag"]


async def test_whoever_was_forgotten_may_register_again_and_is_live_at_once() -> None:
    async with keeping(decode="http://flag", fail_threshold=1, evicted_ttl=60) as kept:
        kept.registry.register(API, D1)
        kept.engines.ill.add(D1.url)
        await asyncio.sleep(100)
        assert kept.registry.find(D1.url) is None
        assert kept.registry.register(API, D1)
        assert kept.urls() == ["http://flag", D1.url]


# Sources

DNS = "dns+http://decode:8000"


class Names:
    """A resolver in dnspython's place."""

    hosts: dict[str, list[str]] = {}
    failure: str = ""

    async def addresses(self, name: str) -> Found:
        await asyncio.sleep(0.1)
        if self.failure:
            raise OSError(self.failure)
        return Found(frozenset(self.hosts[name]), 5.0)

    async def services(self, name: str) -> Found:
        raise NotImplementedError


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> type[Names]:
    monkeypatch.setattr("epd_proxy.discovery.names.DNSThenSystem", Names)
    monkeypatch.setattr(Names, "hosts", {"decode": ["10.0.0.1"], "encode": ["10.0.0.9"]})
    monkeypatch.setattr(Names, "failure", "")
    return Names


async def test_names_are_looked_up_before_the_first_request_and_followed(
    names: type[Names],
) -> None:
    async with keeping(decode=f"{DNS}/v,http://d") as kept:
        assert kept.urls() == ["http://d", "http://10.0.0.1:8000/v"]
        names.hosts["decode"] = ["10.0.0.2", "10.0.0.1"]
        await asyncio.sleep(6)
        assert kept.urls() == ["http://d", "http://10.0.0.1:8000/v", "http://10.0.0.2:8000/v"]
        await asyncio.sleep(6)
        assert "http://10.0.0.2:8000/v" in kept.engines.asked
        assert kept.keeper.problems() == {}


async def test_a_look_up_that_fails_keeps_the_last_answer_and_is_told(names: type[Names]) -> None:
    async with keeping(decode=DNS) as kept:
        names.failure = "SERVFAIL"
        await asyncio.sleep(6)
        assert kept.urls() == ["http://10.0.0.1:8000"]
        assert "SERVFAIL" in kept.keeper.problems()["DNS"]
        names.failure = ""
        await asyncio.sleep(6)
        assert kept.keeper.problems() == {}


async def test_where_a_first_look_up_fails_the_start_goes_on_and_the_role_is_missing(
    names: type[Names],
) -> None:
    names.failure = "SERVFAIL"
    async with keeping(encode="dns+http://encode", decode="http://d") as kept:
        assert kept.registry.is_configured(Role.ENCODE)
        assert kept.urls(Role.ENCODE) == []
        names.failure = ""
        await asyncio.sleep(6)
        assert kept.urls(Role.ENCODE) == ["http://10.0.0.9"]


class Reader:
    """What a file says, by its lines: URLs of decode servers, or of others behind their role."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, *lines: str) -> None:
        self.path.write_text("\n".join(lines))

    def __call__(self, path: Path) -> Config:
        said: dict[str, Any] = {"decode": []}
        for line in path.read_text().split():
            role, _, url = line.rpartition("=")
            said.setdefault(role or "decode", []).append(url)
        return Config(**said)

    @property
    def file(self) -> File:
        return self.path, self


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    reader = Reader(tmp_path / "fleet")
    reader.write("http://a")
    return reader


async def test_a_file_that_changes_takes_the_place_of_what_was_configured(reader: Reader) -> None:
    async with keeping(reader.file, decode="http://a") as kept:
        stays = kept.found("http://a")
        kept.registry.register(API, D1)
        reader.write("http://a", "http://b", "encode=http://e")
        await asyncio.sleep(2)
        assert kept.urls() == ["http://a", D1.url, "http://b"]
        assert kept.urls(Role.ENCODE) == ["http://e"]
        assert kept.found("http://a") is stays
        reader.write("http://b")
        await asyncio.sleep(2)
        assert kept.urls() == [D1.url, "http://b"]
        assert not kept.registry.is_configured(Role.ENCODE)


async def test_a_reload_reads_the_file_now_and_is_nothing_without_one(reader: Reader) -> None:
    async with keeping(reader.file, decode="http://a") as kept:
        reader.write("http://b")
        kept.keeper.reload()
        assert kept.urls() == ["http://b"]
    async with keeping(decode="http://a") as kept:
        kept.keeper.reload()
        assert kept.urls() == ["http://a"]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], "--decode"),
        (["ftp://x"], "must start with http"),
        (["http://a", "encode=http://a"], "http://a is given as --encode already"),
    ],
)
async def test_a_bad_file_is_refused_with_the_reason_and_the_old_fleet_stays(
    lines: list[str], reason: str, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    async with keeping(reader.file, decode="http://a") as kept:
        reader.write(*lines)
        await asyncio.sleep(2)
        assert kept.urls() == ["http://a"]
        (problem,) = kept.keeper.problems().values()
        assert reason in problem
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert reason in caplog.text
        reader.write("http://b", "http://c")
        await asyncio.sleep(2)
        assert kept.urls() == ["http://b", "http://c"]
        assert kept.keeper.problems() == {}


async def test_a_file_that_conflicts_with_who_registered_is_refused_while_it_does(
    reader: Reader,
) -> None:
    async with keeping(reader.file, decode="http://a") as kept:
        kept.registry.register(API, D1)
        reader.write("prefill=http://p", "http://a")
        await asyncio.sleep(2)
        assert [one.url for one in kept.registry.instances()] == ["http://a", D1.url]
        (problem,) = kept.keeper.problems().values()
        assert "cannot be mixed" in problem
        kept.registry.deregister(API, D1.url)
        await asyncio.sleep(2)
        assert kept.urls(Role.PREFILL) == ["http://p"]
        assert kept.keeper.problems() == {}


async def test_names_in_a_file_that_changes_are_looked_up_and_forgotten(
    reader: Reader, names: type[Names]
) -> None:
    async with keeping(reader.file, decode="http://a") as kept:
        reader.write("http://a", DNS, "encode=dns+http://encode:1")
        await asyncio.sleep(2)
        assert kept.urls() == ["http://a", "http://10.0.0.1:8000"]
        assert kept.urls(Role.ENCODE) == ["http://10.0.0.9:1"]
        names.hosts["decode"] = ["10.0.0.2"]
        await asyncio.sleep(6)
        assert kept.urls() == ["http://a", "http://10.0.0.2:8000"]
        reader.write("http://a")
        await asyncio.sleep(2)
        assert kept.urls() == ["http://a"]
        assert not kept.registry.is_configured(Role.ENCODE)


@pytest.mark.parametrize("bad", ["dns+http://10.0.0.1:8000", "dns+srv+http://decode:8000"])
async def test_a_file_with_a_name_that_cannot_stand_for_instances_is_refused_as_a_whole(
    bad: str, reader: Reader, names: type[Names]
) -> None:
    async with keeping(reader.file, decode="http://a") as kept:
        reader.write("http://b", bad)
        await asyncio.sleep(2)
        assert kept.urls() == ["http://a"]
        assert any("dns+" in problem for problem in kept.keeper.problems().values())


async def test_a_keeper_that_is_closed_while_it_starts_leaves_nothing_behind(
    names: type[Names],
) -> None:
    kept = Kept(Config(decode=DNS))
    before = asyncio.all_tasks()
    kept.keeper.start()
    await asyncio.sleep(0)
    await kept.keeper.aclose()
    assert asyncio.all_tasks() == before
    assert kept.registry.watchers == []


async def test_a_keeper_that_is_closed_follows_nobody(reader: Reader) -> None:
    async with keeping(reader.file, decode="http://a") as kept:
        await asyncio.sleep(6)
    asked = len(kept.engines.asked)
    kept.registry.register(API, D1)
    reader.write("http://b")
    await asyncio.sleep(100)
    assert len(kept.engines.asked) == asked
    assert kept.urls() == ["http://a", D1.url]


async def test_whoever_waits_for_an_instance_here_waits_for_its_work() -> None:
    async with keeping(decode="http://d") as kept:
        instance = kept.found("http://d")
        await kept.keeper.idle(instance)
        instance.load = 1
        waiting = asyncio.create_task(kept.keeper.idle(instance))
        await asyncio.sleep(10)
        assert not waiting.done()
        instance.ease(1)
        async with asyncio.timeout(1):
            await waiting


# As the proxy has it


async def test_health_tells_which_sources_are_in_trouble_and_why_where_that_may_be_told(
    names: type[Names],
) -> None:
    backends = Backends(encode=0)
    backends.router.get("http://d0:8000/health").respond(200)
    names.failure = "SERVFAIL of 10.9.9.9"
    decode = ["http://d0:8000", "dns+http://secret"]
    for is_told in (False, True):
        proxy = backends.proxy(decode=decode, expose_topology=is_told)
        async with proxy:
            reply = await call(proxy, "GET", "/health")
        assert reply.status == 200
        assert reply.json()["sources"].keys() == {"DNS"}
        assert (b"10.9.9.9" in reply.body) == (b"secret" in reply.body) == is_told


async def test_media_waits_for_no_name_and_is_not_sent_raw_meanwhile(names: type[Names]) -> None:
    backends = Backends(encode=0)
    names.failure = "SERVFAIL"
    async with backends.proxy(encode="dns+http://encode") as proxy:
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        reply = await chat(proxy, ask(picture))
        assert (reply.status, reply.error["stage"]) == (503, "encode")
        assert (await chat(proxy, ask(TEXT))).status == 200


async def test_a_reload_of_the_proxy_reads_its_file(reader: Reader) -> None:
    proxy = EPDProxy(config=Config(decode="http://a"), file=reader.file)
    async with proxy:
        reader.write("http://b")
        proxy.reload()
        assert [one.url for one in proxy.registry.ready(Role.DECODE)] == ["http://b"]


def run(*works: Callable[[], Any]) -> None:
    """Each in an event loop of its own."""
    for work in works:
        with asyncio.Runner(loop_factory=LEAPING[1]["loop_factory"]) as runner:
            runner.run(work())


def test_in_two_event_loops_one_fleet_is_watched_by_each_in_its_time() -> None:
    engines = Engines()
    config = Config(decode="http://a,http://b", fail_threshold=1)
    transport = httpx.MockTransport(engines.router.async_handler)

    async def fall_ill() -> None:
        async with proxy:
            engines.ill.add("http://a")
            await asyncio.sleep(6)
            assert ready() == ["http://b"]

    async def recover() -> None:
        async with proxy:
            assert ready() == ["http://b"]
            engines.ill.clear()
            await asyncio.sleep(6)
            assert ready() == ["http://a", "http://b"]

    def ready() -> Sequence[str]:
        return [one.url for one in proxy.registry.ready(Role.DECODE)]

    async def make() -> EPDProxy:
        return EPDProxy(config=config, transport=transport)

    with asyncio.Runner(loop_factory=LEAPING[1]["loop_factory"]) as runner:
        proxy = runner.run(make())
    run(fall_ill, recover)


def test_whoever_registered_for_a_time_in_a_loop_that_has_gone_is_forgotten_in_the_next() -> None:
    async def register() -> EPDProxy:
        proxy = EPDProxy(config=Config(decode="http://a", probe_interval=0))
        async with proxy:
            proxy.registry.register(API, D1)
            proxy.registry.expire(D1.url, 10)
        return proxy

    async def look() -> None:
        async with proxy:
            await asyncio.sleep(11)
            assert proxy.registry.find(D1.url) is None

    with asyncio.Runner(loop_factory=LEAPING[1]["loop_factory"]) as runner:
        proxy = runner.run(register())
    run(look)
