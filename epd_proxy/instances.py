"""
``/instances``: engines that register themselves, as with vLLM's proxy, and who drains them.

    POST   /instances           {"role", "url", "dp_size", "ec_zmq_addrs", "weight", "models",
                                 "labels", "ttl"}; again and again as a heartbeat
    DELETE /instances?url=      nothing new goes there once this is answered
    GET    /instances           who is live, evicted or draining, by kind
    POST   /instances/drain?url=    no new work; answered when the running work has ended
    DELETE /instances/drain?url=    work again

The first three are those of vLLM 0.33.0's proxy.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import parse_qs, urlsplit

import msgspec
from msgspec import Struct

from epd_proxy.admission import AdminKey, Keys
from epd_proxy.asgi import Exchange, Patience
from epd_proxy.config import Config, is_name, normalised_url
from epd_proxy.errors import Conflict, Forbidden, NotFound, RawHeaders, RequestError, Unprocessable
from epd_proxy.keeper import Keeper
from epd_proxy.payload import NO_JSON
from epd_proxy.registry import API, FleetConflict, Instance, Kind, Registry, Spec
from epd_proxy.upstream import check_address

_JSON: RawHeaders = [(b"content-type", b"application/json")]
_MOST_BYTES = 1 << 20
_PORTS = {"http": 80, "https": 443}
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Registration(Struct):
    """The body of a registration. Keys that are not known are passed over."""

    role: Kind
    url: str
    dp_size: int = 1
    ec_zmq_addrs: tuple[str, ...] | None = None
    weight: float = 1.0
    models: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    ttl: float | None = None

    def spec(self) -> Spec:
        """Raises ValueError."""
        return Spec(
            role=self.role,
            url=self.url,
            weight=self.weight,
            dp_size=self.dp_size,
            ec_zmq_addrs=self.ec_zmq_addrs or (),
            models=self.models,
            labels=self.labels,
        )


class Instances:
    """The handlers of these paths."""

    def __init__(
        self, config: Config, registry: Registry, keys: Keys, keeper: Keeper, *, is_alone: bool
    ) -> None:
        self._registry = registry
        self._keys = keys
        self._keeper = keeper
        self._reaches_all = is_alone or keeper.store is not None
        self._store = keeper.store
        self._key = AdminKey(config.admin_api_key)
        self._is_open = config.dynamic_registration
        self._networks = [ipaddress.ip_network(each) for each in config.allowed_instance_networks]
        self._drain_timeout = config.drain_timeout or None
        self._patience = Patience(config.body_timeout)

    async def show(self, exchange: Exchange) -> None:
        """Raises Unauthorized (401) where callers need keys; the admin's will do as well."""
        if not self._is_admin(exchange):
            self._keys.owner(exchange.header(b"authorization"))
        found: dict[str, dict[str, list[str]]] = {
            kind: {"live": [], "evicted": [], "draining": []} for kind in Kind
        }
        for instance in self._registry.instances():
            found[instance.kind][self._registry.state(instance)].append(instance.url)
        await self._answer(exchange, found)

    async def register(self, exchange: Exchange) -> None:
        """Raises Forbidden (403), RequestError (400), Conflict (409), Unprocessable (422)."""
        self._check_registrar(exchange)
        body = await exchange.read(_MOST_BYTES, self._patience)
        try:
            given = msgspec.json.decode(body, type=Registration)
            spec = given.spec()
            if given.ttl is not None and not 0 < given.ttl < float("inf"):
                raise ValueError(f"a ttl of {given.ttl:g} seconds")
            if is_name(spec.url):
                raise ValueError(f"{spec.url} is a name to look up, not an engine's own URL")
            check_address(Instance.of(spec))
            self._check_address(spec.url, exchange)
        except NO_JSON as exc:
            raise Unprocessable(str(exc)) from None
        # Push to prefill servers is not supported yet.
        if spec.ec_zmq_addrs and spec.role is not Kind.PREFILL_DECODE:
            raise RequestError(f"ec_zmq_addrs are not for {spec.role}", param="ec_zmq_addrs")
        try:
            self._registry.check(API, spec)
            if self._store is not None:
                is_new = await self._store.register(spec, given.ttl)
            else:
                is_new = self._registry.register(API, spec)
                self._registry.expire(spec.url, given.ttl)
        except FleetConflict as exc:
            raise Conflict(str(exc)) from None
        await self._answer(exchange, {"registered": is_new})

    async def deregister(self, exchange: Exchange) -> None:
        """Raises Forbidden (403), Conflict (409) if others declare it, Unprocessable (422)."""
        self._check_registrar(exchange)
        url = _url_of(exchange)
        try:
            self._registry.check_out(API, url)
            if self._store is not None:
                removed = await self._store.deregister(url)
            else:
                removed = self._registry.deregister(API, url)
        except FleetConflict as exc:
            raise Conflict(str(exc)) from None
        await self._answer(exchange, {"removed": removed})

    async def drain(self, exchange: Exchange) -> None:
        """
        ``drained`` tells whether the running work has ended within ``--drain-timeout``.

        Raises Forbidden (403), NotFound (404), Unprocessable (422).
        """
        self._check_admin(exchange)
        instance = self._find(_url_of(exchange))
        await self._set_draining(instance.url, True)
        drained = False
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_timeout):
                await self._keeper.idle(instance)
                drained = True
        await self._answer(exchange, {"drained": drained, "load": instance.load})

    async def undrain(self, exchange: Exchange) -> None:
        self._check_admin(exchange)
        instance = self._find(_url_of(exchange))
        await self._set_draining(instance.url, False)
        await self._answer(exchange, {"drained": False, "load": instance.load})

    async def _set_draining(self, url: str, on: bool) -> None:
        if self._store is not None:
            await self._store.drain(url, on)
            return
        others = self._registry.draining(API) - {url}
        self._registry.drain(API, others | {url} if on else others)

    def _find(self, url: str) -> Instance:
        instance = self._registry.find(url)
        if instance is None:
            raise NotFound(f"there is no instance at {url}")
        return instance

    def _is_admin(self, exchange: Exchange) -> bool:
        return self._key.matches(exchange.header(b"x-api-key"))

    def _check_admin(self, exchange: Exchange) -> None:
        if not self._key:
            raise NotFound("there is no admin: ADMIN_API_KEY is not set")
        if not self._is_admin(exchange):
            raise Forbidden("this needs the right X-API-Key")
        if not self._reaches_all:
            raise Conflict("one of several workers would know: give them a --registry")

    def _check_registrar(self, exchange: Exchange) -> None:
        if not self._is_open:
            raise NotFound("registration is off: --dynamic-registration switches it on")
        self._check_admin(exchange)

    def _check_address(self, url: str, exchange: Exchange) -> None:
        """Raises ValueError for the proxy's own URL, and for networks that are not allowed."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        if self._networks:
            # A name is not looked up: what it stands for may change behind the check.
            address = ipaddress.ip_address(host)
            if not any(address in network for network in self._networks):
                raise ValueError(f"{host} is in none of the networks that are allowed")
        given = urlsplit(f"//{exchange.header(b'host')}")
        default = 443 if exchange.scope.get("scheme") == "https" else 80
        for own, port in (
            exchange.scope.get("server") or ("", None),
            (given.hostname, given.port or default),
        ):
            hosts = _LOOPBACK if own in _LOOPBACK else (own,)
            if host in hosts and port == (parts.port or _PORTS.get(parts.scheme)):
                raise ValueError(f"{url} is the proxy itself")

    async def _answer(self, exchange: Exchange, content: Mapping[str, object]) -> None:
        await exchange.respond(200, _JSON, msgspec.json.encode(content))


def _url_of(exchange: Exchange) -> str:
    """The query's ``url``. Raises Unprocessable (422)."""
    query = parse_qs(exchange.scope.get("query_string", b"").decode("latin-1"))
    try:
        return normalised_url(query["url"][0])
    except KeyError:
        raise Unprocessable("the query must hold url=", param="url") from None
    except ValueError as exc:
        raise Unprocessable(str(exc), param="url") from None
