"""
DNS names that stand for instances.

* ``dns+http://encode.default.svc:8000/prefix``: an instance at every A and AAAA record
* ``dns+srv+http://_http._tcp.encode.default.svc``: one at every SRV record of the lowest priority,
  at the port it says; needs dnspython, the extra ``dns``
* ``dns+srv+https://...``: likewise. There is no ``dns+https``: the instances' URLs would hold
  addresses, for which no certificate is made out. SRV records lead to names.

A name is looked up again when its TTL has passed, or every five seconds without dnspython.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

from msgspec import structs

from epd_proxy.config import flag_name, is_name, normalised_url
from epd_proxy.discovery.resolvers import DNSThenSystem, Found, Resolver, SystemResolver
from epd_proxy.discovery.sources import Source, Tell
from epd_proxy.errors import ConfigError
from epd_proxy.registry import Kind, Spec

_DNS, _SRV = "dns+", "srv+"

_SHORTEST, _LONGEST = 1.0, 60.0
"""Seconds between two look-ups, whatever the TTL."""
_AFTER_A_FAILURE = 2.0
_LIMIT = 5.0
"""Seconds for one look-up."""


def normalised_name(text: str) -> str:
    """Raises ValueError with the reason if ``text`` cannot stand for instances."""
    name = _Name.of(text)
    return f"{_DNS}{_SRV if name.is_service else ''}{name.url}"


class _Name(NamedTuple):
    """``url`` is that of an instance, but for the name in place of a host."""

    url: str
    is_service: bool

    @classmethod
    def of(cls, text: str) -> _Name:
        words = text.removeprefix(_DNS)
        url = words.removeprefix(_SRV)
        if not is_name(text) or not url.startswith(("http://", "https://")):
            raise ValueError(f"{text!r} must start with dns+http:// or dns+srv+http://")
        name = cls(normalised_url(url), is_service=words != url)
        if not name.is_service and name.url.startswith("https:"):
            raise ValueError(
                f"{text!r}: DNS gives addresses, and certificates are made out to names;"
                " write https://, or dns+srv+https:// for SRV records"
            )
        if name.is_service and urlsplit(name.url).port is not None:
            raise ValueError(f"{text!r} must not hold a port: SRV records have their own")
        if _is_address(name.host):
            raise ValueError(f"{text!r} holds an address, not a name")
        return name

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    def at(self, host: str) -> str:
        """The URL of the instance at a host, with its port if it is a service's."""
        parts = urlsplit(self.url)
        port = f":{parts.port}" if parts.port else ""
        return normalised_url(f"{parts.scheme}://{host}{port}{parts.path}")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class _Watched:
    """What is known of a name."""

    def __init__(self, spec: Spec, urls: frozenset[str] = frozenset()) -> None:
        try:
            self.name = _Name.of(spec.url)
        except ValueError as exc:
            raise ConfigError(_flag(spec), str(exc)) from None
        if spec.ec_zmq_addrs:
            reason = f"{spec.url!r}: instances behind one name cannot share push addresses"
            raise ConfigError(_flag(spec), reason)
        self.spec = spec
        self.urls = urls
        self.pause = _AFTER_A_FAILURE

    def specs(self) -> list[Spec]:
        return [structs.replace(self.spec, url=url) for url in sorted(self.urls)]


def _flag(spec: Spec) -> str:
    return flag_name("decode" if spec.role is Kind.PREFILL_DECODE else spec.role)


class NameSource(Source):
    """
    The instances that names stand for; ``names`` are specs whose URLs begin with ``dns+``.

    What else a spec says holds for each of its instances. They are told in the order of the names
    and, within one, of their URLs. A look-up that fails or finds nothing leaves a name's instances
    as they are; one that is incomplete adds some and takes none away.

    Raises ConfigError for names that cannot stand for instances.
    """

    def __init__(
        self, names: Sequence[Spec], tell: Tell, *, resolver: Resolver | None = None
    ) -> None:
        super().__init__("DNS", tell)
        self._watched = [_Watched(spec) for spec in names]
        self._resolver = resolver or self._best_resolver()
        self._turn = asyncio.Lock()

    def _best_resolver(self) -> Resolver:
        try:
            return DNSThenSystem()
        except ImportError:
            for one in self._watched:
                if one.name.is_service:
                    reason = f"{one.spec.url} needs dnspython: pip install 'epd-proxy[dns]'"
                    raise ConfigError(_flag(one.spec), reason) from None
            return SystemResolver()

    async def start(self) -> None:
        await self.watch([one.spec for one in self._watched])

    async def watch(self, names: Sequence[Spec]) -> None:
        """
        Other names from now on, told as one change when the new ones have been looked up.

        Raises ConfigError like the constructor; then nothing has changed.
        """
        async with self._turn:
            known = {one.spec.url: one.urls for one in self._watched}
            watched = [_Watched(spec, known.get(spec.url, frozenset())) for spec in names]
            await asyncio.gather(*map(self._look, watched))
            await self.aclose()
            self._watched = watched
            for gone in known.keys() - {one.spec.url for one in watched}:
                self._note(gone, "")
            self._say(self._specs())
            for one in watched:
                self._repeat(partial(self._look_again, one))

    async def _look_again(self, one: _Watched) -> None:
        await asyncio.sleep(one.pause)
        await self._look(one)
        self._say(self._specs())

    async def _look(self, one: _Watched) -> None:
        topic = one.spec.url
        try:
            async with asyncio.timeout(_LIMIT):
                found = await self._ask(one.name)
            urls = frozenset(map(one.name.at, found.hosts))
        except TimeoutError:
            one.pause = _AFTER_A_FAILURE
            self._note(topic, f"{topic}: no answer in time")
        except (OSError, ValueError) as exc:
            one.pause = _AFTER_A_FAILURE
            self._note(topic, f"{topic}: look-up failed: {exc}")
        else:
            problem = found.problem or ("" if urls else "nothing was found")
            one.urls = urls | one.urls if problem else urls
            one.pause = min(max(found.ttl, _SHORTEST), _LONGEST)
            self._note(topic, f"{topic}: {problem}" if problem else "")

    async def _ask(self, name: _Name) -> Found:
        if name.is_service:
            return await self._resolver.services(name.host)
        return await self._resolver.addresses(name.host)

    def _specs(self) -> list[Spec]:
        """Two names may lead to one instance, which then has the role that the first one says."""
        found: dict[str, Spec] = {}
        wrong = ""
        for one in self._watched:
            for spec in one.specs():
                first = found.setdefault(spec.url, spec)
                if first.role is not spec.role:
                    wrong = f"{spec.url} is found as {first.role} and as {spec.role}"
        self._note("roles", wrong)
        return list(found.values())
