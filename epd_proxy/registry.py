"""
The fleet: which instances play which role, and which of them are ready.

Ready instances are immutable tuples that are swapped, never edited, so that whoever holds one
may iterate it across an await.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple, Self

from epd_proxy.config import Config


class Role(StrEnum):
    """What an instance does. Decode instances prefill too where no prefill role is configured."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


class Replica(NamedTuple):
    """One data-parallel replica of an instance."""

    rank: int | None
    """For ``X-data-parallel-rank``; None where there is but one."""
    ec_address: str | None
    """Where encoders push embeddings to; None where the consumer pulls."""


class Instance:
    """
    One engine in one role.

    ``load`` counts the calls in progress; selectors may read it. Instances compare by identity, so
    that a selector can key its state by them.
    """

    __slots__ = ("_replicas", "_turns", "load", "role", "url", "weight")

    def __init__(
        self,
        role: Role,
        url: str,
        weight: float = 1.0,
        *,
        dp_size: int = 1,
        ec_addresses: Sequence[str] = (),
    ) -> None:
        self.role = role
        self.url = url
        self.weight = weight
        self.load = 0
        self._replicas = [
            Replica(rank if dp_size > 1 else None, ec_addresses[rank] if ec_addresses else None)
            for rank in range(dp_size)
        ]
        self._turns = itertools.count(random.randrange(dp_size))

    def next_replica(self) -> Replica:
        """Replicas take turns, from a random one on."""
        return self._replicas[next(self._turns) % len(self._replicas)]

    def __repr__(self) -> str:
        return f"<Instance {self.role} {self.url} weight={self.weight:g} load={self.load}>"


class Lease:
    """Shares in the loads of instances, given back together; a context manager."""

    __slots__ = ("_taken",)

    def __init__(self) -> None:
        self._taken: list[Instance] = []

    def take(self, instance: Instance) -> Instance:
        instance.load += 1
        self._taken.append(instance)
        return instance

    def move(self, other: Instance) -> None:
        """All shares to another instance, which does the work in their place."""
        for instance in self._taken:
            instance.load -= 1
            other.load += 1
        self._taken = [other] * len(self._taken)

    def give_back(self) -> None:
        for instance in self._taken:
            instance.load -= 1
        self._taken.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.give_back()


class Registry:
    """The instances of each role."""

    def __init__(self, instances: Iterable[Instance]) -> None:
        found = list(instances)
        self._ready = {role: tuple(one for one in found if one.role is role) for role in Role}
        self._configured = frozenset(role for role in Role if self._ready[role])

    @classmethod
    def of(cls, config: Config) -> Registry:
        encode = [Instance(Role.ENCODE, one.url, one.weight) for one in config.encode]
        prefill = [Instance(Role.PREFILL, one.url, one.weight) for one in config.prefill]
        return cls([*encode, *prefill, *_decoders(config)])

    def is_configured(self, role: Role) -> bool:
        """Whether the role is part of the topology, even if none of its instances is ready."""
        return role in self._configured

    def ready(self, role: Role) -> tuple[Instance, ...]:
        return self._ready[role]

    def instances(self) -> list[Instance]:
        """All that are ready, whatever their role."""
        return [instance for ready in self._ready.values() for instance in ready]

    def remove(self, instance: Instance) -> None:
        """Nothing new goes to the instance; calls in progress end as they would."""
        ready = self._ready[instance.role]
        self._ready[instance.role] = tuple(one for one in ready if one is not instance)


def _decoders(config: Config) -> Iterator[Instance]:
    size, addresses = config.ec_consumer_dp_size, config.ec_consumer_zmq_addrs
    for index, one in enumerate(config.decode):
        yield Instance(
            Role.DECODE,
            one.url,
            one.weight,
            dp_size=size,
            ec_addresses=addresses[index * size : (index + 1) * size],
        )
