"""
Who serves a call: the ``Selector`` protocol and the selectors that come with the proxy.

A selector sees the ready instances of one role, never the network. Each role has one of its own,
and it lives as long as the proxy does, so rotations go on across requests. ``ready`` may be any
subset of the fleet (an instance is left out when it has just failed, when it is away), so state is
kept by instance, never by position.
"""

from __future__ import annotations

import collections
import hashlib
import math
import pkgutil
import random
import struct
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Protocol, TypeVar

from epd_proxy.config import Config, flag_name
from epd_proxy.errors import ConfigError, NoInstance
from epd_proxy.registry import Instance, Registry, Role

State = TypeVar("State")


class Selector(Protocol):
    """
    Chooses one instance out of those that are ready.

    Any object with this method will do; there is nothing to subclass.
    """

    def pick(self, ready: tuple[Instance, ...], key: str | None) -> Instance:
        """
        Called once for every call to an engine, for encode once for every media item.

        ``ready`` is never empty. ``key`` is the content key of the item to encode, else None.
        Must return an element of ``ready`` and must not wait.
        """
        ...


class RoundRobin:
    """
    Takes turns: whoever has waited longest is next.

    Starts at a random place, so that many processes do not all begin with the same instance. An
    instance that joins or returns gets the next turn, and no more than that.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._line: collections.deque[Instance] = collections.deque()
        """Who has waited longest stands first."""
        self._ready: tuple[Instance, ...] = ()
        """The last that were just those in line."""

    def pick(self, ready: tuple[Instance, ...], key: str | None) -> Instance:
        if ready is self._ready:
            chosen = self._line[0]
            self._line.rotate(-1)
            return chosen
        if not set(ready) <= set(self._line):
            self._seat(ready)
        line = self._line
        if len(ready) == len(line):
            self._ready = ready
        chosen = next(instance for instance in line if instance in ready)
        line.remove(chosen)
        line.append(chosen)
        return chosen

    def _seat(self, ready: tuple[Instance, ...]) -> None:
        """Gives newcomers places before everybody else, in their order, from a random one on."""
        newcomers = [instance for instance in ready if instance not in self._line]
        start = self._rng.randrange(len(newcomers))
        # The line must not grow with every instance that ever was.
        others = [instance for instance in self._line if instance in ready]
        self._line = collections.deque([*newcomers[start:], *newcomers[:start], *others])
        self._ready = ()


class Random:
    """Picks at random, each instance with the same chance."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def pick(self, ready: tuple[Instance, ...], key: str | None) -> Instance:
        return self._rng.choice(ready)


class Weighted:
    """
    Smooth weighted round robin: shares in proportion to the weights, evenly spread over time.

    At each pick every instance gains its weight in credit, and the richest pays for all. With
    weights 5, 1, 1 that gives a a b a c a a, not five in a row. Starts at a random place.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._credit: dict[Instance, float] = {}

    def pick(self, ready: tuple[Instance, ...], key: str | None) -> Instance:
        if not self._credit:
            self._credit = dict.fromkeys(ready, 0.0)
            for _ in range(self._rng.randrange(4 * len(ready))):
                self._next(ready)
        elif any(instance not in self._credit for instance in ready):
            newcomers = dict.fromkeys(ready, 0.0)
            self._credit = newcomers | _without_strangers(self._credit, ready)
        return self._next(ready)

    def _next(self, ready: tuple[Instance, ...]) -> Instance:
        credit = self._credit
        total = 0.0
        for instance in ready:
            credit[instance] += instance.weight
            total += instance.weight
        chosen = max(ready, key=credit.__getitem__)
        credit[chosen] -= total
        return chosen


class LeastBusy:
    """
    Of two taken at random, the one with less load for its weight.

    Two are enough to keep clear of the busiest, and, unlike the least loaded of all, are not the
    same for every proxy at once. No instance gets more than two of ``len(ready)`` picks, however
    large its weight.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._random = (rng or random.Random()).random

    def pick(self, ready: tuple[Instance, ...], key: str | None) -> Instance:
        count = len(ready)
        if count == 1:
            return ready[0]
        place = int(self._random() * count)
        one = ready[place]
        # Any but the first, each with the same chance; so a tie, too, falls at random.
        other = ready[place - 1 - int(self._random() * (count - 1))]
        return other if other.load * one.weight < one.load * other.weight else one


class Affinity:
    """
    The same key goes to the same instance, unless that has more than its share of the load.

    Rendezvous hashing: every key has an order of its own over all instances, in which each comes
    first with a chance in proportion to its weight, and an instance that comes or goes leaves the
    order of the others as it was. The order follows from key, URLs and weights alone, so all
    proxies agree. The first instance wins that has at most ``bound`` times the average load for its
    weight; so none ever gets beyond that by more than one item, and a key that many ask for spills
    over, always to the same ones. Without a key it is ``LeastBusy``.
    """

    def __init__(self, rng: random.Random | None = None, *, bound: float = 1.25) -> None:
        self._keyless = LeastBusy(rng)
        self._bound = bound
        self._rankings: list[_Ranking] = []
        self._ready: tuple[Instance, ...] = ()
        self._away: Collection[Instance] = ()
        self._weight = 0.0

    def pick(self, ready: tuple[Instance, ...], key: str | None) -> Instance:
        if key is None:
            return self._keyless.pick(ready, key)
        if ready is not self._ready:
            self._adopt(ready)
        limit = None
        for instance in self._rankings[0].order(key):
            if instance in self._away:
                continue
            if not instance.load:
                return instance
            if limit is None:
                load = sum([one.load for one in ready])
                limit = load * self._bound / self._weight
            if instance.load <= limit * instance.weight:
                return instance
        # With a bound of 1 or less nobody may be within it.
        return self._keyless.pick(ready, key)

    def _adopt(self, ready: tuple[Instance, ...]) -> None:
        """
        Finds or makes a ranking that has all of ``ready``, and puts it first.

        What is left out, by a retry or because it is away, is skipped in the order of a ranking
        that has it, so that neither costs the orders that are known.
        """
        weights = {instance: instance.weight for instance in ready}
        for ranking in self._rankings:
            if weights.items() <= ranking.weights.items():
                others = [other for other in self._rankings if other is not ranking]
                break
        else:
            known = {url: draws for one in self._rankings for url, draws in one.draws.items()}
            ranking = _Ranking(weights, known)
            others = [one for one in self._rankings if not one.weights.keys() <= weights.keys()]
        self._rankings = [ranking, *others[: _RANKINGS - 1]]
        self._ready = ready
        self._away = ranking.weights.keys() - weights.keys()
        self._weight = sum(weights.values())


_RANKINGS = 8  # stay known: fleets of which none holds another, as those of several models
_SLOTS = 16381  # a prime, so that every digit of a key counts; 64 instances get 256 each, +- 16


class _Ranking:
    """
    The orders of some instances.

    Keys share slots, and it is slots that have orders: a rendezvous of 64 instances takes tens of
    microseconds, so each is made once, when it is first asked for. At worst that is 64 KiB of draws
    and 32 KiB of orders for each instance.
    """

    def __init__(self, weights: Mapping[Instance, float], known: Mapping[str, bytes]) -> None:
        self.weights = weights
        self.draws = {one.url: known.get(one.url) or _draws_of(one.url) for one in weights}
        # The order of a tie must not be that of the tuple.
        self._instances = sorted(weights, key=lambda instance: instance.url)
        self._terms = [(self.draws[one.url], -1 / one.weight) for one in self._instances]
        self._orders: dict[int, array[int]] = {}

    def order(self, key: str) -> Iterator[Instance]:
        slot = _slot_of(key)
        try:
            order = self._orders[slot]
        except KeyError:
            order = self._orders[slot] = self._rank(slot)
        return map(self._instances.__getitem__, order)

    def _rank(self, slot: int) -> array[int]:
        """Each waits for a random time with the mean 1 / weight; the first to be done is first."""
        at = slot * 4
        times = [
            math.log((_draw_at(draws, at)[0] + 0.5) / 2**32) * scale for draws, scale in self._terms
        ]
        return array("H", sorted(range(len(times)), key=times.__getitem__))


_draw_at = struct.Struct("<I").unpack_from


def _draws_of(url: str) -> bytes:
    """A random number of four bytes for each slot, the same in every process."""
    return hashlib.shake_128(url.encode()).digest(_SLOTS * 4)


def _slot_of(key: str) -> int:
    try:
        number = int(key, 16)  # most keys are a digest in hex, which need not be hashed again
    except ValueError:
        # A caller's uuid may hold halves of surrogate pairs.
        digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        number = int.from_bytes(digest, "little")
    return number % _SLOTS


def _without_strangers(
    state: dict[Instance, State], ready: tuple[Instance, ...]
) -> dict[Instance, State]:
    """``state`` must not grow with every instance that ever was."""
    return {instance: state[instance] for instance in ready if instance in state}


ENTRY_POINTS = "epd_proxy.selectors"

SELECTORS: Mapping[str, Callable[[], Selector]] = {
    "round-robin": RoundRobin,
    "random": Random,
    "weighted": Weighted,
    "least-busy": LeastBusy,
    "affinity": Affinity,
}


class Selection:
    """Ready instances and selectors put together: one pick for one call."""

    def __init__(self, registry: Registry, selectors: Mapping[Role, Selector]) -> None:
        self.registry = registry
        self._selectors = selectors

    @classmethod
    def of(cls, config: Config, registry: Registry) -> Selection:
        """Raises ConfigError for a selector that nobody knows."""
        names = {
            Role.ENCODE: config.encode_selector,
            Role.PREFILL: config.prefill_selector,
            Role.DECODE: config.decode_selector,
        }
        return cls(registry, {role: _create(role, name) for role, name in names.items()})

    def pick(
        self,
        role: Role,
        key: str | None = None,
        *,
        model: str = "",
        avoid: Collection[Instance] = (),
        never: Collection[Instance] = (),
    ) -> Instance:
        """
        An instance for the next call, none of ``avoid`` if another is ready, none of ``never``.

        Raises NoInstance (503).
        """
        ready = self.ready(role, model)
        if never:
            ready = tuple(instance for instance in ready if instance not in never)
            if not ready:
                raise NoInstance(f"no other {role} server is ready", stage=role)
        if avoid:
            ready = tuple(instance for instance in ready if instance not in avoid) or ready
        return self._selectors[role].pick(ready, key)

    def ready(self, role: Role, model: str = "") -> tuple[Instance, ...]:
        """At least one instance. Raises NoInstance (503)."""
        ready = self.registry.ready(role, model)
        if not ready:
            raise NoInstance(f"no {role} server is ready", stage=role)
        return ready


def _create(role: Role, name: str) -> Selector:
    try:
        selector = _factory(name)()
        if not callable(getattr(selector, "pick", None)):
            raise TypeError("it makes objects that have no method pick")
    except Exception as exc:
        # Whatever a stranger's module does when it is loaded, the flag is what brought it in.
        reason = f"{name!r} cannot be used: {exc}"
        raise ConfigError(flag_name(f"{role}_selector"), reason) from exc
    return selector


def _factory(name: str) -> Callable[[], Selector]:
    """One of ours, one that a package has announced, or ``module:attribute``."""
    if name in SELECTORS:
        return SELECTORS[name]
    announced = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in announced:
        found: Callable[[], Selector] = announced[name].load()
        return found
    if ":" in name:
        factory: Callable[[], Selector] = pkgutil.resolve_name(name)
        return factory
    raise LookupError(f"known are {', '.join([*SELECTORS, *announced])}, and module:attribute")
