"""
Who is asked for the addresses behind a name: dnspython, which knows TTLs, or the system.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver as DNSPython
    from dns.resolver import Answer

_SYSTEM_TTL = 5.0
_LIFETIME = 4.0
"""Seconds for one query, repetitions included."""


class Found(NamedTuple):
    """
    What a look-up found.

    ``hosts`` are ``10.0.0.1``, ``[fd00::1]`` or, from SRV records, ``pod-0.example:8000``. Where
    there is a ``problem`` some may be missing.
    """

    hosts: frozenset[str]
    ttl: float
    problem: str = ""


class Resolver(Protocol):
    """Raises OSError with the reason if a look-up fails; what changes needs no new reason."""

    async def addresses(self, name: str) -> Found: ...

    async def services(self, name: str) -> Found: ...


class SystemResolver:
    """``getaddrinfo``: knows ``/etc/hosts`` too, but neither TTLs nor SRV records."""

    async def addresses(self, name: str) -> Found:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return Found(_hosts(str(address[0]) for *_, address in found), _SYSTEM_TTL)

    async def services(self, name: str) -> Found:
        raise OSError("SRV records need dnspython")


class DNSResolver:
    """
    dnspython, by default with the servers and search domains of ``/etc/resolv.conf``.

    Raises ImportError without dnspython.
    """

    def __init__(self, resolver: DNSPython | None = None, *, lifetime: float = _LIFETIME) -> None:
        import dns.asyncresolver
        from dns.exception import DNSException

        self._failure = DNSException
        self._resolver = resolver or dns.asyncresolver.Resolver()
        self._lifetime = lifetime

    async def addresses(self, name: str) -> Found:
        asked = await asyncio.gather(
            self._ask(name, "A"), self._ask(name, "AAAA"), return_exceptions=True
        )
        answers = [one for one in asked if not isinstance(one, BaseException)]
        errors = [one for one in asked if isinstance(one, BaseException)]
        if not answers:
            raise errors[0]
        hosts = _hosts(record.address for answer in answers for record in answer)
        return Found(hosts, _ttl(answers), str(errors[0]) if errors else "")

    async def services(self, name: str) -> Found:
        answer = await self._ask(name, "SRV")
        records = [one for one in answer if one.target.to_text() != "."]
        first = min((one.priority for one in records), default=0)
        hosts = {
            f"{one.target.to_text(omit_final_dot=True)}:{one.port}"
            for one in records
            if one.priority == first
        }
        return Found(frozenset(hosts), _ttl([answer]))

    async def _ask(self, name: str, kind: str) -> Answer:
        try:
            return await self._resolver.resolve(
                name, kind, raise_on_no_answer=False, lifetime=self._lifetime, search=True
            )
        except self._failure as exc:
            # Its own words tell times and servers, other ones each time.
            raise OSError(f"{type(exc).__name__} for {kind}") from exc


class DNSThenSystem(DNSResolver):
    """What DNS does not know the system may: ``localhost``, and the names of ``/etc/hosts``."""

    async def addresses(self, name: str) -> Found:
        try:
            return await super().addresses(name)
        except OSError as exc:
            try:
                return await SystemResolver().addresses(name)
            except OSError:
                raise exc from None


def _hosts(addresses: Iterable[str]) -> frozenset[str]:
    return frozenset(f"[{one}]" if ":" in one else one for one in addresses)


def _ttl(answers: Iterable[Answer]) -> float:
    """Of the records and what leads to them; that nothing is there may change at any time."""
    return min((one.chaining_result.minimum_ttl for one in answers if one.rrset), default=0)
