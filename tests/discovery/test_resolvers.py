from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import dns.asyncresolver
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest

from epd_proxy.discovery import NameSource
from epd_proxy.discovery.resolvers import DNSResolver, DNSThenSystem, Found, SystemResolver
from epd_proxy.registry import Kind, Spec
from tests.discovery.hearing import Ear, eventually, started

NAME = "encode.svc.test"


@pytest.fixture(
    params=[("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True})],
    ids=["asyncio", "uvloop"],
)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


class Server(asyncio.DatagramProtocol):
    """A DNS server on loopback, for a zone that can be changed at any time."""

    def __init__(self) -> None:
        self._sets: dict[tuple[str, str], dns.rrset.RRset] = {}
        self.codes: dict[str, dns.rcode.Rcode] = {}
        """By kind of record, where it is not to answer well."""
        self.asked: list[str] = []

    def say(self, kind: str, *records: str, ttl: int = 30, name: str = NAME) -> None:
        self._sets[name, kind] = dns.rrset.from_text(f"{name}.", ttl, "IN", kind, *records)

    def forget(self) -> None:
        self._sets.clear()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        query = dns.message.from_wire(data)
        name = query.question[0].name.to_text(omit_final_dot=True)
        kind = dns.rdatatype.to_text(query.question[0].rdtype)
        self.asked.append(f"{name} {kind}")
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        answer.set_rcode(self.codes.get(kind) or self._fill(answer, name, kind))
        self._transport.sendto(answer.to_wire(), address)

    def _fill(self, answer: dns.message.Message, name: str, kind: str) -> dns.rcode.Rcode:
        if alias := self._sets.get((name, "CNAME")):
            answer.answer.append(alias)
            name = alias[0].target.to_text(omit_final_dot=True)
        if found := self._sets.get((name, kind)):
            answer.answer.append(found)
        is_known = any(known == name for known, _ in self._sets)
        return dns.rcode.NOERROR if is_known else dns.rcode.NXDOMAIN


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Server, DNSResolver]]:
    """The server, and a resolver that asks it."""
    server = Server()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: server, ("127.0.0.1", 0))
    asking = dns.asyncresolver.Resolver(configure=False)
    asking.nameservers = ["127.0.0.1"]
    asking.port = transport.get_extra_info("sockname")[1]
    asking.search = [dns.name.from_text("svc.test.")]
    try:
        yield server, DNSThenSystem(asking)
    finally:
        transport.close()


async def test_addresses_of_both_families_are_found() -> None:
    async with serving() as (server, resolver):
        server.say("A", "10.0.0.1", "10.0.0.2", ttl=7)
        server.say("AAAA", "fd00::1", ttl=9)

        found = await resolver.addresses(NAME)

    assert found == Found(frozenset({"10.0.0.1", "10.0.0.2", "[fd00::1]"}), 7)


async def test_the_ttl_is_the_shortest_on_the_way() -> None:
    async with serving() as (server, resolver):
        server.say("CNAME", "real.svc.test.", ttl=3)
        server.say("A", "10.0.0.1", ttl=60, name="real.svc.test")

        assert await resolver.addresses(NAME) == Found(frozenset({"10.0.0.1"}), 3)


async def test_short_names_are_looked_up_in_the_search_domains() -> None:
    async with serving() as (server, resolver):
        server.say("A", "10.0.0.1")

        assert (await resolver.addresses("encode")).hosts == {"10.0.0.1"}


async def test_what_dns_does_not_know_the_system_may() -> None:
    async with serving() as (server, resolver):
        found = await resolver.addresses("localhost")
        assert found.hosts & {"127.0.0.1", "[::1]"}
        server.say("A", "10.0.0.1", name="localhost")
        assert (await resolver.addresses("localhost")).hosts == {"10.0.0.1"}


async def test_a_name_that_is_not_there_says_so() -> None:
    async with serving() as (_, resolver):
        with pytest.raises(OSError, match=r"^NXDOMAIN for A$"):
            await resolver.addresses(NAME)


async def test_a_name_without_addresses_gives_none() -> None:
    async with serving() as (server, resolver):
        server.say("TXT", "x")

        assert await resolver.addresses(NAME) == Found(frozenset(), 0)


async def test_what_one_family_lacks_by_a_failure_is_said() -> None:
    async with serving() as (server, resolver):
        server.say("A", "10.0.0.1")
        server.codes["AAAA"] = dns.rcode.SERVFAIL

        found = await resolver.addresses(NAME)

    assert found == Found(frozenset({"10.0.0.1"}), 30, "NoNameservers for AAAA")


async def test_service_records_of_the_lowest_priority_are_found_with_their_ports() -> None:
    async with serving() as (server, resolver):
        records = ("1 5 8000 pod-0.svc.test.", "1 9 8001 pod-1.svc.test.", "2 5 1 late.svc.test.")
        server.say("SRV", *records, ttl=4)

        found = await resolver.services(NAME)

    assert found == Found(frozenset({"pod-0.svc.test:8000", "pod-1.svc.test:8001"}), 4)


async def test_a_service_that_is_not_offered_has_no_hosts() -> None:
    async with serving() as (server, resolver):
        server.say("SRV", "0 0 0 .")

        assert (await resolver.services(NAME)).hosts == frozenset()


async def test_the_fleet_follows_the_records() -> None:
    ear = Ear()
    name = Spec(Kind.ENCODE, f"dns+http://{NAME}:8000")
    async with serving() as (server, resolver):
        server.say("A", "10.0.0.1", ttl=1)
        async with started(source := NameSource([name], ear, resolver=resolver)):
            assert ear.urls == ["http://10.0.0.1:8000"]

            server.say("A", "10.0.0.2", "10.0.0.1", ttl=1)
            await ear.until("http://10.0.0.1:8000", "http://10.0.0.2:8000", within=2)

            server.forget()
            await eventually(lambda: source.problem, within=2)
            assert source.problem == f"{name.url}: look-up failed: NXDOMAIN for A"
            assert len(ear.urls) == 2

            server.say("A", "10.0.0.3", ttl=0)
            await ear.until("http://10.0.0.3:8000", within=3)
            assert source.problem == ""


async def test_the_system_knows_localhost() -> None:
    found = await SystemResolver().addresses("localhost")

    assert found.hosts & {"127.0.0.1", "[::1]"}
    assert found.ttl == 5


async def test_the_system_says_what_it_does_not_know() -> None:
    # Too long for a name: nobody is asked.
    with pytest.raises((OSError, UnicodeError)):
        await SystemResolver().addresses("a" * 64)
    with pytest.raises(OSError, match="need dnspython"):
        await SystemResolver().services(NAME)


def test_the_resolver_of_the_system_is_asked_by_default() -> None:
    assert DNSResolver()._resolver.nameservers


async def test_a_server_that_is_not_there_is_a_failure_with_a_steady_reason() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        # Bound, so nobody else's; read by no one.
        taken.bind(("127.0.0.1", 0))
        asking = dns.asyncresolver.Resolver(configure=False)
        asking.nameservers = ["127.0.0.1"]
        asking.port = taken.getsockname()[1]
        resolver = DNSResolver(asking, lifetime=0.2)

        with pytest.raises(OSError, match=r"^LifetimeTimeout for A$"):
            await resolver.addresses(NAME)
