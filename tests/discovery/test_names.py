from __future__ import annotations

import asyncio
import logging
import sys
from collections import defaultdict
from typing import Any

import pytest

from epd_proxy.discovery import NameSource, normalised_name
from epd_proxy.discovery.resolvers import DNSResolver, Found, SystemResolver
from epd_proxy.errors import ConfigError
from epd_proxy.registry import Kind, Spec
from tests.discovery.hearing import Ear, started
from tests.test_admission import LeapingLoop

ENCODE = Spec(Kind.ENCODE, "dns+http://encode.svc:8000")
SERVICE = Spec(Kind.DECODE, "dns+srv+http://_http._tcp.decode.svc")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Time passes at once: only the order of events counts."""
    return "asyncio", {"loop_factory": LeapingLoop}


class Scripted:
    """Answers as it is told, and counts."""

    def __init__(self) -> None:
        self.found: dict[str, Found | Exception] = {}
        self.asked: defaultdict[str, int] = defaultdict(int)
        self.is_mute = False

    async def addresses(self, name: str) -> Found:
        self.asked[name] += 1
        if self.is_mute:
            await asyncio.Event().wait()
        found = self.found[name]
        if isinstance(found, Exception):
            raise found
        return found

    async def services(self, name: str) -> Found:
        return await self.addresses(name)

    def say(self, name: str, *hosts: str, ttl: float = 30, problem: str = "") -> None:
        self.found[name] = Found(frozenset(hosts), ttl, problem)


@pytest.fixture
def resolver() -> Scripted:
    resolver = Scripted()
    resolver.say("encode.svc", "10.0.0.1", "10.0.0.2")
    return resolver


@pytest.mark.parametrize(
    ("text", "spelling"),
    [
        ("dns+http://Encode.default.svc:8000/", "dns+http://encode.default.svc:8000"),
        ("dns+http://encode:80/prefix/", "dns+http://encode/prefix"),
        ("dns+srv+http://_http._tcp.Encode", "dns+srv+http://_http._tcp.encode"),
        ("dns+srv+https://_http._tcp.encode/v", "dns+srv+https://_http._tcp.encode/v"),
    ],
)
def test_a_name_has_one_spelling(text: str, spelling: str) -> None:
    assert normalised_name(text) == spelling
    assert normalised_name(spelling) == spelling


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("dns+https://encode:8000", "certificates are made out to names"),
        ("dns+srv+http://_http._tcp.encode:8000", "must not hold a port"),
        ("dns+http://10.0.0.1:8000", "holds an address, not a name"),
        ("dns+http://[fd00::1]:8000", "holds an address, not a name"),
        ("dns+http+unix://%2Fsocket", "must start with"),
        ("dns+encode:8000", "must start with"),
        ("http://encode:8000", "must start with"),
        ("dns+http://", "has no host"),
        ("dns+http://a b", "blanks"),
    ],
)
def test_a_name_that_cannot_stand_for_instances_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        normalised_name(text)


def test_instances_behind_one_name_cannot_share_push_addresses(resolver: Scripted) -> None:
    name = Spec(Kind.PREFILL_DECODE, ENCODE.url, ec_zmq_addrs=("tcp://a:1",))

    with pytest.raises(ValueError, match="cannot share push addresses"):
        NameSource([name], Ear(), resolver=resolver)


async def test_every_address_is_an_instance_with_what_its_name_says(resolver: Scripted) -> None:
    ear = Ear()
    name = Spec(
        Kind.ENCODE, "dns+http://encode.svc:8000/p", 2.5, models=("m",), labels={"zone": "a"}
    )
    resolver.say("encode.svc", "10.0.0.1", "[fd00::1]")

    async with started(source := NameSource([name], ear, resolver=resolver)):
        assert ear.fleet == [
            Spec(Kind.ENCODE, f"http://{host}:8000/p", 2.5, models=("m",), labels={"zone": "a"})
            for host in ("10.0.0.1", "[fd00::1]")
        ]
        assert source.problem == ""


async def test_every_service_record_is_an_instance_at_its_own_port(resolver: Scripted) -> None:
    ear = Ear()
    resolver.say("_http._tcp.decode.svc", "pod-1.decode:8001", "pod-0.decode:80")

    async with started(NameSource([SERVICE], ear, resolver=resolver)):
        assert ear.urls == ["http://pod-0.decode", "http://pod-1.decode:8001"]


async def test_the_order_of_the_records_changes_nothing(resolver: Scripted) -> None:
    ear = Ear()
    hosts = [f"10.0.0.{n}" for n in range(9)]
    resolver.say("encode.svc", *hosts, ttl=1)

    async with started(NameSource([ENCODE], ear, resolver=resolver)):
        resolver.say("encode.svc", *reversed(hosts), ttl=1)
        await asyncio.sleep(5)

        assert resolver.asked["encode.svc"] > 3
        assert len(ear.fleets) == 1


async def test_names_are_told_in_their_order_and_an_instance_once(resolver: Scripted) -> None:
    ear = Ear()
    other = Spec(Kind.ENCODE, "dns+http://another.svc:8000", 9)
    resolver.say("another.svc", "10.0.0.2", "10.0.0.0")

    async with started(NameSource([ENCODE, other], ear, resolver=resolver)):
        assert [(spec.role, spec.url, spec.weight) for spec in ear.fleet] == [
            ("encode", "http://10.0.0.1:8000", 1),
            ("encode", "http://10.0.0.2:8000", 1),
            ("encode", "http://10.0.0.0:8000", 9),
        ]


async def test_an_instance_that_is_found_in_two_roles_keeps_the_first(resolver: Scripted) -> None:
    ear = Ear()
    decode = Spec(Kind.DECODE, "dns+http://another.svc:8000")
    resolver.say("another.svc", "10.0.0.2", "10.0.0.3", ttl=1)

    async with started(source := NameSource([ENCODE, decode], ear, resolver=resolver)):
        assert [spec.role for spec in ear.fleet] == ["encode", "encode", "decode"]
        assert source.problem == "http://10.0.0.2:8000 is found as encode and as decode"

        resolver.say("another.svc", "10.0.0.3")
        await asyncio.sleep(2)
        assert source.problem == ""


async def test_other_names_are_told_as_one_change_that_keeps_what_is_known(
    resolver: Scripted,
) -> None:
    ear = Ear()
    gone = Spec(Kind.PREFILL, "dns+http://gone.svc:1")
    new = Spec(Kind.DECODE, "dns+http://new.svc:1")
    resolver.found["gone.svc"] = OSError("NXDOMAIN for A")
    resolver.say("new.svc", "10.0.0.9", ttl=1)

    async with started(source := NameSource([ENCODE, gone], ear, resolver=resolver)):
        resolver.found["encode.svc"] = OSError("SERVFAIL for A")
        await source.watch([Spec(Kind.ENCODE, ENCODE.url, 3), new])

        assert len(ear.fleets) == 2
        assert [(spec.url, spec.weight) for spec in ear.fleet] == [
            ("http://10.0.0.1:8000", 3),
            ("http://10.0.0.2:8000", 3),
            ("http://10.0.0.9:1", 1),
        ]
        assert source.problem == f"{ENCODE.url}: look-up failed: SERVFAIL for A"
        asked = resolver.asked["gone.svc"]
        resolver.say("new.svc", "10.0.0.8")
        await asyncio.sleep(10)
        assert ear.urls[-1] == "http://10.0.0.8:1"
        assert resolver.asked["gone.svc"] == asked


async def test_names_that_cannot_be_watched_change_nothing(resolver: Scripted) -> None:
    async with started(source := NameSource([ENCODE], ear := Ear(), resolver=resolver)):
        with pytest.raises(ConfigError, match=r"^--decode: .*an address"):
            await source.watch([Spec(Kind.PREFILL_DECODE, "dns+http://10.0.0.1")])

        resolver.say("encode.svc", "10.0.0.7")
        await asyncio.sleep(31)
        assert ear.urls == ["http://10.0.0.7:8000"]


@pytest.mark.parametrize(("ttl", "seconds"), [(0, 1), (1, 1), (20, 20), (60, 60), (86400, 60)])
async def test_a_name_is_looked_up_again_when_its_ttl_has_passed_between_1_and_60_s(
    resolver: Scripted, ttl: float, seconds: float
) -> None:
    ear = Ear()
    resolver.say("encode.svc", "10.0.0.1", ttl=ttl)

    async with started(NameSource([ENCODE], ear, resolver=resolver)):
        resolver.say("encode.svc", "10.0.0.2", ttl=ttl)
        await asyncio.sleep(seconds - 0.1)
        assert resolver.asked["encode.svc"] == 1

        await asyncio.sleep(0.2)
        assert resolver.asked["encode.svc"] == 2
        assert ear.urls == ["http://10.0.0.2:8000"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (OSError("NXDOMAIN for A"), "look-up failed: NXDOMAIN for A"),
        (UnicodeError("label too long"), "look-up failed: label too long"),
        (Found(frozenset(), 30), "nothing was found"),
        (Found(frozenset({"pod-0:0"}), 30), "look-up failed: .*port 0"),
    ],
)
async def test_a_look_up_that_gives_nothing_of_use_keeps_the_last_answer(
    resolver: Scripted,
    caplog: pytest.LogCaptureFixture,
    answer: Found | Exception,
    reason: str,
) -> None:
    caplog.set_level(logging.INFO, "epd_proxy")
    ear = Ear()
    name = Spec(Kind.ENCODE, "dns+srv+http://encode.svc")
    resolver.say("encode.svc", "pod-0:8000", "pod-1:8000", ttl=1)

    async with started(source := NameSource([name], ear, resolver=resolver)):
        resolver.found["encode.svc"] = answer
        await asyncio.sleep(60)
        assert len(ear.fleets) == 1
        assert source.problem.startswith("dns+srv+http://encode.svc: ")
        (line,) = [record.getMessage() for record in caplog.records]
        assert line == f"DNS: {source.problem}; going on with what is known"
        with pytest.raises(ValueError, match=reason):
            raise ValueError(source.problem)

        resolver.say("encode.svc", "pod-2:8000")
        await asyncio.sleep(3)
        assert source.problem == ""
        assert ear.urls == ["http://pod-2:8000"]


async def test_an_incomplete_answer_adds_instances_but_takes_none_away(resolver: Scripted) -> None:
    ear = Ear()
    resolver.say("encode.svc", "10.0.0.1", "[fd00::1]", ttl=1)

    async with started(source := NameSource([ENCODE], ear, resolver=resolver)):
        resolver.say("encode.svc", "10.0.0.2", ttl=1, problem="NoNameservers for AAAA")
        await asyncio.sleep(2)

        hosts = ("10.0.0.1", "10.0.0.2", "[fd00::1]")
        assert ear.urls == [f"http://{host}:8000" for host in hosts]
        assert source.problem == f"{ENCODE.url}: NoNameservers for AAAA"


async def test_a_name_that_fails_at_the_start_does_not_hold_back_the_others(
    resolver: Scripted,
) -> None:
    ear = Ear()
    missing = Spec(Kind.DECODE, "dns+http://missing.svc:1")
    resolver.found["missing.svc"] = OSError("NXDOMAIN for A")

    async with started(source := NameSource([missing, ENCODE], ear, resolver=resolver)):
        assert ear.urls == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
        assert source.problem == "dns+http://missing.svc:1: look-up failed: NXDOMAIN for A"

        resolver.say("missing.svc", "10.0.0.9")
        await asyncio.sleep(3)
        assert ear.urls[0] == "http://10.0.0.9:1"


async def test_a_resolver_that_is_mute_is_given_up_after_five_seconds(resolver: Scripted) -> None:
    resolver.is_mute = True
    begun = asyncio.get_running_loop().time()

    async with started(source := NameSource([ENCODE], Ear(), resolver=resolver)):
        assert asyncio.get_running_loop().time() - begun < 5.1
        assert source.problem == f"{ENCODE.url}: no answer in time"


def test_dnspython_is_asked_where_it_is_installed() -> None:
    assert isinstance(NameSource([SERVICE], Ear())._resolver, DNSResolver)


def test_the_system_is_asked_without_dnspython(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dns.asyncresolver", None)

    assert isinstance(NameSource([ENCODE], Ear())._resolver, SystemResolver)


def test_service_records_without_dnspython_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dns.asyncresolver", None)

    with pytest.raises(ConfigError, match=r"^--decode: .* needs dnspython.*epd-proxy\[dns\]"):
        NameSource([ENCODE, SERVICE], Ear())
