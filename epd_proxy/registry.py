"""
The fleet: which instances play which role, and which of them are ready.

Ready instances are immutable tuples that are swapped, never edited, so that whoever holds one
may iterate it across an await.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum

from epd_proxy.config import Config, InstanceConfig


class Role(StrEnum):
    """What an instance does. Decode instances prefill too where no prefill role is configured."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


class Instance:
    """
    One engine in one role.

    ``load`` counts the calls in progress; selectors may read it. Instances compare by identity, so
    that a selector can key its state by them.
    """

    __slots__ = ("load", "role", "url", "weight")

    def __init__(self, role: Role, url: str, weight: float = 1.0) -> None:
        self.role = role
        self.url = url
        self.weight = weight
        self.load = 0

    def __repr__(self) -> str:
        return f"<Instance {self.role} {self.url} weight={self.weight:g} load={self.load}>"

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Counts a call in ``load`` while it runs, whatever its end."""
        self.load += 1
        try:
            yield
        finally:
            self.load -= 1


class Registry:
    """The instances of each role."""

    def __init__(self, fleet: Mapping[Role, tuple[InstanceConfig, ...]]) -> None:
        self._ready = {
            role: tuple(Instance(role, one.url, one.weight) for one in fleet.get(role, ()))
            for role in Role
        }
        self._configured = frozenset(role for role in Role if self._ready[role])

    @classmethod
    def of(cls, config: Config) -> Registry:
        return cls(
            {
                Role.ENCODE: config.encode,
                Role.PREFILL: config.prefill,
                Role.DECODE: config.decode,
            }
        )

    def is_configured(self, role: Role) -> bool:
        """Whether the role is part of the topology, even if none of its instances is ready."""
        return role in self._configured

    def ready(self, role: Role) -> tuple[Instance, ...]:
        return self._ready[role]

    def remove(self, instance: Instance) -> None:
        """Nothing new goes to the instance; calls in progress end as they would."""
        ready = self._ready[instance.role]
        self._ready[instance.role] = tuple(one for one in ready if one is not instance)
