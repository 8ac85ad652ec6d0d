"""
``Prober``: asks every instance now and then whether it is well.

How an instance is asked, and what its answer means, is for others to say: see ``health``.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Generic, TypeVar

logger = logging.getLogger("epd_proxy")

Member = TypeVar("Member", bound=Hashable)

_JITTER = 0.1


class Prober(Generic[Member]):
    """
    Probes each instance by a schedule of its own, so that a slow one holds up nobody else.

    The first probe comes one interval after the instance did, and there is never more than one of
    an instance at a time: one that takes longer than the interval makes its instance skip turns.

    Parameters:

    * **probe** - whether the instance is well. Has its own limit of time; what it raises is a bug,
      counts as a no, and is logged once for each type of exception.
    * **report** - is told what each probe has shown; returns whether the instance is healthy now.
    * **forget** - is told of an instance that expires, with each probe until it is removed.
    * **interval** - seconds from probe to probe, by chance up to a tenth more or less; 0: never.
    * **evicted_ttl** - seconds after which an instance expires that has not been healthy in all
      the time, once one more probe has failed; 0: never.

    Belongs to one event loop. Nothing is reported of an instance that was removed.
    """

    def __init__(
        self,
        probe: Callable[[Member], Awaitable[bool]],
        report: Callable[[Member, bool], bool],
        forget: Callable[[Member], object],
        *,
        interval: float,
        evicted_ttl: float = 0.0,
        rng: random.Random | None = None,
    ) -> None:
        self._probe = probe
        self._report = report
        self._forget = forget
        self._interval = interval
        self._evicted_ttl = evicted_ttl
        self._rng = rng or random.Random()
        self._watches: dict[Member, asyncio.Task[None]] = {}
        # A watch that was cancelled may need a moment to close its connection.
        self._ending: set[asyncio.Task[None]] = set()
        self._bugs: set[type[Exception]] = set()

    def add(self, instance: Member, *, expires: bool = False) -> None:
        """An instance that is here already is left as it is."""
        if self._interval and instance not in self._watches:
            watch = asyncio.create_task(self._watch(instance, expires))
            self._watches[instance] = watch
            watch.add_done_callback(partial(self._ended, instance))

    def remove(self, instance: Member) -> None:
        """Ends its probes, the one that runs too."""
        watch = self._watches.pop(instance, None)
        if watch is not None:
            self._ending.add(watch)
            watch.cancel()

    async def aclose(self) -> None:
        """Returns when every probe has ended."""
        for instance in list(self._watches):
            self.remove(instance)
        if self._ending:
            await asyncio.wait(self._ending)

    async def _watch(self, instance: Member, expires: bool) -> None:
        now = asyncio.get_running_loop().time
        began = now()
        evicted_at: float | None = None
        while True:
            pause = self._interval * self._rng.uniform(1 - _JITTER, 1 + _JITTER)
            await asyncio.sleep(pause - (now() - began) % pause)
            began = now()
            if self._report(instance, await self._is_well(instance)):
                evicted_at = None
            elif evicted_at is None:
                evicted_at = now()
            elif expires and self._evicted_ttl and now() - evicted_at >= self._evicted_ttl:
                self._forget(instance)

    async def _is_well(self, instance: Member) -> bool:
        try:
            return await self._probe(instance)
        except Exception as bug:
            if type(bug) not in self._bugs:
                self._bugs.add(type(bug))
                logger.exception("a probe of %r has failed by a bug of ours", instance)
            return False

    def _ended(self, instance: Member, watch: asyncio.Task[None]) -> None:
        self._ending.discard(watch)
        if self._watches.get(instance) is watch:
            del self._watches[instance]
        if not watch.cancelled() and (bug := watch.exception()):
            logger.error("%r is not probed any more", instance, exc_info=bug)
