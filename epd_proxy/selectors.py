"""
Who serves a call: the ``Selector`` protocol and the selectors that come with the proxy.

A selector sees the ready instances of one role, never the network. Each role has one of its own,
and it lives as long as the proxy does, so rotations go on across requests. ``ready`` may be any
subset of the fleet (an instance is left out when it has just failed, when it is away), so state is
kept by instance, never by position.
"""

from __future__ import annotations

import pkgutil
import random
from collections.abc import Callable, Mapping
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
        self._turn = 0
        self._last: dict[Instance, int] = {}

    def pick(self, ready: tuple[Instance, ...], key: str | None) -> Instance:
        try:
            chosen = min(ready, key=self._last.__getitem__)
        except KeyError:
            self._seat(ready)
            chosen = min(ready, key=self._last.__getitem__)
        self._turn += 1
        self._last[chosen] = self._turn
        return chosen

    def _seat(self, ready: tuple[Instance, ...]) -> None:
        """Gives newcomers places before everybody else, in their order, from a random one on."""
        newcomers = [instance for instance in ready if instance not in self._last]
        start = self._rng.randrange(len(newcomers))
        first = min(self._last.values(), default=0) - len(newcomers)
        places = {
            instance: first + place
            for place, instance in enumerate(newcomers[start:] + newcomers[:start])
        }
        self._last = _without_strangers(self._last, ready) | places


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

    def has(self, role: Role) -> bool:
        """Whether the fleet has the role. Raises NoInstance (503) if it has, but nobody ready."""
        if not self.registry.is_configured(role):
            return False
        self.ready(role)
        return True

    def pick(
        self, role: Role, key: str | None = None, *, avoid: Instance | None = None
    ) -> Instance:
        """
        An instance for the next call, not ``avoid`` if another is ready.

        Raises NoInstance (503).
        """
        ready = self.ready(role)
        if avoid is not None and len(ready) > 1:
            ready = tuple(instance for instance in ready if instance is not avoid)
        return self._selectors[role].pick(ready, key)

    def ready(self, role: Role) -> tuple[Instance, ...]:
        """At least one instance. Raises NoInstance (503)."""
        ready = self.registry.ready(role)
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
