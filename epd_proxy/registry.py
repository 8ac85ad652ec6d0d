"""
The fleet: which instances play which role, who declares them, and which of them are ready.

Ready instances are immutable tuples that are swapped, never edited, so that whoever holds one
may iterate it across an await.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import Literal, NamedTuple, Self

import msgspec

from epd_proxy.config import Config, engine_url, is_name
from epd_proxy.health import RoleHealth

_MOST_MODELS = 1000

FLAGS = "flags"
"""The source that stands for the configuration."""
API = "api"
"""The source of those who registered, here or in Redis."""


class Role(StrEnum):
    """The stage that an instance serves."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


class Kind(StrEnum):
    """What an instance is registered as."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"
    """Needs prefill servers beside it."""
    PREFILL_DECODE = "prefill_decode"
    """A decode server that prefills for itself."""

    @property
    def role(self) -> Role:
        return Role.DECODE if self is Kind.PREFILL_DECODE else Role(self.value)


class Replica(NamedTuple):
    """One data-parallel replica of an instance."""

    rank: int | None
    """For ``X-data-parallel-rank``; None where there is but one."""
    ec_address: str | None
    """Where encoders push embeddings to; None where the consumer pulls."""


class Spec(msgspec.Struct, frozen=True):
    """
    What is said of an instance, by whomever. Raises ValueError if no instance can be like that.

    ``models``: the names it serves; none given: any. ``ec_zmq_addrs``: where encoders push
    embeddings to, one address for each of ``dp_size`` replicas.
    """

    role: Kind
    url: str
    weight: float = 1.0
    dp_size: int = 1
    ec_zmq_addrs: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    labels: dict[str, str] = {}

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "url", engine_url(self.url))
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"{self.url}: weight {self.weight:g} is not above 0, or not finite")
        if self.dp_size < 1:
            raise ValueError(f"{self.url}: dp_size {self.dp_size} is below 1")
        if self.ec_zmq_addrs and len(self.ec_zmq_addrs) != self.dp_size:
            given = len(self.ec_zmq_addrs)
            raise ValueError(f"{self.url}: {given} ec_zmq_addrs for {self.dp_size} replicas")


class FleetConflict(ValueError):
    """A fleet cannot hold both of these."""


class Instance:
    """
    One engine in one role.

    ``load`` is the work in progress, calls or, for encoders, bytes of media; selectors may read it.
    Instances compare by identity, so that a selector can key its state by them.
    """

    __slots__ = (
        "__weakref__",
        "_idle",
        "_replicas",
        "_turns",
        "is_removed",
        "kind",
        "labels",
        "load",
        "models",
        "role",
        "url",
        "weight",
    )

    def __init__(self, role: Role, url: str, weight: float = 1.0) -> None:
        self.url = url
        self.load = 0
        self.is_removed = False
        self._idle: asyncio.Future[None] | None = None
        self.become(Spec(role=Kind(role.value), url=url, weight=weight))

    @classmethod
    def of(cls, spec: Spec) -> Instance:
        instance = cls(spec.role.role, spec.url)
        instance.become(spec)
        return instance

    def become(self, spec: Spec) -> None:
        """The same engine, of which other things are said."""
        self.kind = spec.role
        self.role = spec.role.role
        self.weight = spec.weight
        self.models = spec.models
        self.labels = spec.labels
        addresses, size = spec.ec_zmq_addrs, spec.dp_size
        self._replicas = [
            Replica(rank if size > 1 else None, addresses[rank] if addresses else None)
            for rank in range(size)
        ]
        self._turns = itertools.count(random.randrange(size))

    async def idle(self) -> None:
        """Until no work is in progress."""
        while self.load:
            self._idle = self._idle or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

    def ease(self, load: int) -> None:
        """So much work has ended."""
        self.load -= load
        if self._idle is not None and not self.load:
            self._idle.set_result(None)
            self._idle = None

    @property
    def is_pushed_to(self) -> bool:
        return any(replica.ec_address for replica in self._replicas)

    def is_gone(self) -> bool:
        """Whether it was removed: then it gets nothing new, though it may have been chosen."""
        return self.is_removed

    def next_replica(self) -> Replica:
        """Replicas take turns, from a random one on."""
        return self._replicas[next(self._turns) % len(self._replicas)]

    def __repr__(self) -> str:
        return f"<Instance {self.role} {self.url} weight={self.weight:g} load={self.load}>"


class Lease:
    """A share in the load of one instance, given back at the end; a context manager."""

    __slots__ = ("_instance", "_load")

    def __init__(self) -> None:
        self._instance: Instance | None = None
        self._load = 0

    def take(self, instance: Instance, load: int = 1) -> Instance:
        """A share, or more of it: all of the same instance."""
        instance.load += load
        self._instance = instance
        self._load += load
        return instance

    def move(self, other: Instance) -> None:
        """To another instance, which does the work in its place."""
        load = self._load
        self.give_back()
        self.take(other, load)

    def give_back(self) -> None:
        instance, load = self._instance, self._load
        if instance is not None:
            self._instance, self._load = None, 0
            instance.ease(load)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.give_back()


class Entry:
    """An instance, and who declares it."""

    __slots__ = ("instance", "specs")

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.specs: dict[str, Spec] = {}
        """By source; the first that declared it has the say."""


class Registry:
    """
    The instances of each role.

    ``is_open``: instances may come while the proxy runs, so a role that has none is missing, not
    left out. Sources are ``flags``, ``file``, ``api``, and so on; each declares its instances, and
    one that several declare stays until the last has withdrawn it.
    """

    def __init__(
        self, specs: Iterable[Spec] = (), *, is_open: bool = False, fail_threshold: int = 3
    ) -> None:
        self._is_open = is_open
        self._entries: dict[str, Entry] = {}
        self._draining: dict[str, frozenset[str]] = {}
        self.expected: frozenset[Kind] = frozenset()
        """What names stand for, which may not have been looked up yet."""
        self._deadlines: dict[str, float] = {}
        self._expiry: asyncio.TimerHandle | None = None
        self._missed: set[Kind] = set()
        """What was taken out by hand: what is gone is missing, not left out."""
        self._configured: frozenset[Role] = frozenset()
        self._declares_models = False
        self.pushes = False
        """Whether encoders push to some consumer."""
        # An instance that returns while calls to it are in progress is the same one.
        self._gone: weakref.WeakValueDictionary[str, Instance] = weakref.WeakValueDictionary()
        self.health: dict[Role, RoleHealth[Instance]] = {
            role: RoleHealth(fail_threshold, partial(self._refresh, role)) for role in Role
        }
        self._ready: dict[Role, tuple[Instance, ...]] = dict.fromkeys(Role, ())
        self._by_model: dict[tuple[Role, str], tuple[Instance, ...]] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self._timers: dict[Role, asyncio.TimerHandle] = {}
        self.watchers: list[Callable[[], None]] = []
        """Called after instances have come or gone."""
        self.sync(FLAGS, list(specs))

    @classmethod
    def of(cls, config: Config) -> Registry:
        """What is declared by names comes later, when they have been looked up."""
        specs = specs_of(config)
        found = [spec for spec in specs if not is_name(spec.url)]
        registry = cls(found, is_open=config.is_open, fail_threshold=config.fail_threshold)
        registry.expect(specs)
        return registry

    def expect(self, specs: Iterable[Spec]) -> None:
        """Which roles the names among these are to fill."""
        self.expected = frozenset(spec.role for spec in names_among(specs))
        self.refresh()

    # What is asked

    def is_configured(self, role: Role) -> bool:
        """Whether the role is part of the topology, even if none of its instances is ready."""
        return role in self._configured

    def ready(self, role: Role, model: str = "") -> tuple[Instance, ...]:
        """Those that calls may go to; for a ``model``, those that serve it."""
        if not model or not self._declares_models:
            return self._ready[role]
        return self._by_model.get((role, model)) or self._ready_for(role, model)

    def serves(self, model: str) -> bool:
        """Whether some decode server, ready or not, does not rule the model out; empty: any."""
        if not model or not self._declares_models:
            return True
        decoders = self.members(Role.DECODE)
        return not decoders or any(_serves(one, model) for one in decoders)

    def instances(self) -> list[Instance]:
        """All there are, ready or not."""
        return [entry.instance for entry in self._entries.values()]

    def members(self, role: Role) -> list[Instance]:
        """All that play a role, ready or not."""
        return [one for one in self.instances() if one.role is role]

    def find(self, url: str) -> Instance | None:
        """``url`` in its one spelling."""
        entry = self._entries.get(url)
        return entry.instance if entry else None

    def state(self, instance: Instance) -> Literal["live", "evicted", "draining"]:
        if self._is_draining(instance.url):
            return "draining"
        return "live" if instance in self._ready[instance.role] else "evicted"

    def is_registered(self, instance: Instance) -> bool:
        """Whether it is here only because it registered."""
        return self._entries[instance.url].specs.keys() == {API}

    async def changed(self) -> None:
        """Until another instance is ready, or fewer are."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        finally:
            self._waiting.remove(future)

    # What is said

    def sync(self, source: str, specs: Sequence[Spec]) -> None:
        """Replaces what the source has declared. Raises FleetConflict; then nothing has changed."""
        declared = {spec.url: spec for spec in specs}
        self._check(source, declared)
        self._missed.clear()
        for url, entry in list(self._entries.items()):
            if source in entry.specs and url not in declared:
                self._withdraw(entry, source)
        for spec in declared.values():
            self._declare(source, spec)
        self._refresh_all()

    def register(self, source: str, spec: Spec) -> bool:
        """
        Adds one instance, or says other things of one; whether it is new. Raises FleetConflict.

        The news does not touch its health.
        """
        self.check(source, spec)
        is_new = spec.url not in self._entries
        self.sync(source, [*{**self._declared(source), spec.url: spec}.values()])
        return is_new

    def deregister(self, source: str, url: str) -> bool:
        """
        Whether it was there. Once this has returned, nothing new goes to the instance.

        Calls in progress end as they would. Raises FleetConflict if another source declares it.
        """
        self.check_out(source, url)
        entry = self._entries.get(url)
        if entry is None:
            return False
        self._withdraw(entry, source)
        self._refresh_all()
        return True

    def check(self, source: str, spec: Spec) -> None:
        """Raises FleetConflict if the source could not declare this as well."""
        entry = self._entries.get(spec.url)
        if entry is not None and entry.instance.kind is not spec.role:
            raise FleetConflict(f"{spec.url} is there already, as {entry.instance.kind}")
        self._check(source, {**self._declared(source), spec.url: spec})

    def check_out(self, source: str, url: str) -> None:
        """Raises FleetConflict if the source alone could not withdraw this."""
        entry = self._entries.get(url)
        if entry is not None and (others := entry.specs.keys() - {source}):
            raise FleetConflict(f"{url} is declared by {', '.join(sorted(others))}")

    def _declared(self, source: str) -> dict[str, Spec]:
        return {
            url: entry.specs[source]
            for url, entry in self._entries.items()
            if source in entry.specs
        }

    def expire(self, url: str, ttl: float | None) -> None:
        """Whoever registered at the URL is forgotten after so many seconds; None: never."""
        self._deadlines.pop(url, None)
        if ttl is not None:
            self._deadlines[url] = asyncio.get_running_loop().time() + ttl
        self._arm()

    def _arm(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if self._deadlines:
            # Outside of a loop, whoever watches in one arms it when it starts.
            with suppress(RuntimeError):
                loop = asyncio.get_running_loop()
                self._expiry = loop.call_at(min(self._deadlines.values()), self._expire, loop)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._expiry = None
        due = [url for url, deadline in self._deadlines.items() if deadline <= loop.time()]
        for url in due:
            del self._deadlines[url]
            # What others declare as well stays.
            self._withdraw(self._entries[url], API)
        self._arm()
        self._refresh_all()

    def remove(self, instance: Instance) -> None:
        """Whoever declares it."""
        entry = self._entries[instance.url]
        self._missed.add(instance.kind)
        for source in list(entry.specs):
            self._withdraw(entry, source)
        self._refresh_all()

    def drain(self, source: str, urls: AbstractSet[str]) -> None:
        """All that the source drains: they end what they have and get nothing new."""
        self._draining[source] = frozenset(urls)
        self._refresh_all()

    def draining(self, source: str) -> frozenset[str]:
        return self._draining.get(source, frozenset())

    def _is_draining(self, url: str) -> bool:
        return any(url in urls for urls in self._draining.values())

    def _check(self, source: str, declared: dict[str, Spec]) -> None:
        kinds: dict[str, Kind] = {}
        for url, entry in self._entries.items():
            for other, spec in entry.specs.items():
                if other != source:
                    kinds[url] = spec.role
        for url, spec in declared.items():
            if kinds.setdefault(url, spec.role) is not spec.role:
                raise FleetConflict(f"{url} is there already, as {kinds[url]}")
        split = {Kind.PREFILL, Kind.DECODE}.intersection(kinds.values())
        if split and Kind.PREFILL_DECODE in kinds.values():
            raise FleetConflict("prefill_decode cannot be mixed with prefill and decode servers")

    def _declare(self, source: str, spec: Spec) -> None:
        entry = self._entries.get(spec.url)
        if entry is None:
            instance = self._gone.pop(spec.url, None) or Instance.of(spec)
            entry = self._entries[spec.url] = Entry(instance)
            instance.is_removed = False
            instance.become(spec)
            self.health[instance.role].add(instance)
        known = entry.specs.get(source)
        entry.specs[source] = spec
        if spec != known and next(iter(entry.specs)) == source:
            self._become(entry.instance, spec)

    def _become(self, instance: Instance, spec: Spec) -> None:
        role = instance.role
        instance.become(spec)
        if instance.role is not role:
            self.health[role].remove(instance)
            self.health[instance.role].add(instance)

    def _withdraw(self, entry: Entry, source: str) -> None:
        del entry.specs[source]
        instance = entry.instance
        if entry.specs:
            self._become(instance, next(iter(entry.specs.values())))
            return
        del self._entries[instance.url]
        self._deadlines.pop(instance.url, None)
        # If it comes back, it is a new one.
        self._draining = {by: urls - {instance.url} for by, urls in self._draining.items()}
        instance.is_removed = True
        self._gone[instance.url] = instance
        self.health[instance.role].remove(instance)

    # What follows

    def refresh(self) -> None:
        """Looks again who is ready, and when that will change by itself."""
        self._configured = self._topology()
        self.pushes = any(entry.instance.is_pushed_to for entry in self._entries.values())
        self._declares_models = any(entry.instance.models for entry in self._entries.values())
        for role in Role:
            self._refresh(role)
        self._arm()

    def _topology(self) -> frozenset[Role]:
        kinds = {entry.instance.kind for entry in self._entries.values()} | self.expected
        roles = {Role.DECODE}
        # A decode server that does not prefill for itself needs one.
        if kinds & {Kind.PREFILL, Kind.DECODE}:
            roles.add(Role.PREFILL)
        if self._is_open or Kind.ENCODE in kinds | self._missed:
            roles.add(Role.ENCODE)
        return frozenset(roles)

    def _refresh_all(self) -> None:
        self.refresh()
        for watcher in self.watchers:
            watcher()

    def _refresh(self, role: Role) -> None:
        """Swaps the tuples; whoever waits for a change looks again."""
        ready = self.health[role].ready(self._enabled(role))
        # The same tuple for the same instances: selectors keep what they know by it.
        if ready != self._ready[role]:
            self._ready[role] = ready
        self._by_model.clear()
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._look_again(role)

    def _enabled(self, role: Role) -> list[Instance]:
        return [one for one in self.members(role) if not self._is_draining(one.url)]

    def _look_again(self, role: Role) -> None:
        """When an instance will return by itself."""
        timer = self._timers.pop(role, None)
        if timer is not None:
            timer.cancel()
        change = self.health[role].next_change()
        if change is None:
            return
        # Outside of a loop, whoever watches in one has a look when it starts.
        with suppress(RuntimeError):
            loop = asyncio.get_running_loop()
            # Both are seconds of the monotonic clock, which loops may count from elsewhere.
            delay = max(0.0, change - time.monotonic())
            self._timers[role] = loop.call_later(delay, self._refresh, role)

    def _ready_for(self, role: Role, model: str) -> tuple[Instance, ...]:
        serving = [one for one in self._enabled(role) if _serves(one, model)]
        if len(self._by_model) >= _MOST_MODELS:
            self._by_model.clear()
        ready = self._by_model[role, model] = self.health[role].best_of(serving)
        return ready

    def close(self) -> None:
        """Ends its timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None


def _serves(instance: Instance, model: str) -> bool:
    return not instance.models or model in instance.models


def names_among(specs: Iterable[Spec]) -> list[Spec]:
    """Those that stand for any number of instances."""
    return [spec for spec in specs if is_name(spec.url)]


def specs_of(config: Config) -> list[Spec]:
    """What the configuration declares, names that stand for instances among them."""
    size, addresses = config.ec_consumer_dp_size, config.ec_consumer_zmq_addrs
    decode = Kind.DECODE if config.prefill else Kind.PREFILL_DECODE
    found = [
        Spec(role=kind, url=one.url, weight=one.weight, models=one.models, labels=one.labels)
        for kind, instances in ((Kind.ENCODE, config.encode), (Kind.PREFILL, config.prefill))
        for one in instances
    ]
    for index, one in enumerate(config.decode):
        found.append(
            Spec(
                role=decode,
                url=one.url,
                weight=one.weight,
                dp_size=size,
                ec_zmq_addrs=addresses[index * size : (index + 1) * size],
                models=one.models,
                labels=one.labels,
            )
        )
    return found
