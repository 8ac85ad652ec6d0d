"""
The counting that turns results, probed or seen in traffic, into ready or not ready.

Each instance has a standing, best first:

* READY      nothing speaks against it
* REFUSED    it refused a connection: for 5 s, or until a probe succeeds
* EJECTED    it failed most of its calls, and its peers did not: for 5 s, then on trial
* UNHEALTHY  it failed several probes in a row: until a probe succeeds

Ready are those of the best standing there is, never those that are UNHEALTHY. So probes alone can
leave a role with nobody; what is seen in traffic can at most change who is tried first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from enum import IntEnum
from typing import Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)

_SECONDS_OUT = 5.0
_SECONDS_COUNTED = 10
_FEWEST_CALLS = 20
_TRIAL_CALLS = 3
_NEVER = float("-inf")


class Standing(IntEnum):
    READY = 0
    REFUSED = 1
    EJECTED = 2
    UNHEALTHY = 3


class Window:
    """
    Calls, and how many of them failed, in the last ten seconds: add to both as calls end.

    Whole seconds are counted, the one that runs among them: so it is up to a second shorter.
    """

    __slots__ = ("_at_start", "_past", "calls", "failures")

    def __init__(self) -> None:
        self.calls = 0
        self.failures = 0
        self._past = deque([(0, 0)] * (_SECONDS_COUNTED - 1))
        # What was counted when the second that runs began.
        self._at_start = (0, 0)

    def go_on(self) -> None:
        """A second is over: what happened in the oldest counts no more."""
        calls, failures = self._at_start
        self._past.append((self.calls - calls, self.failures - failures))
        calls, failures = self._past.popleft()
        self.calls -= calls
        self.failures -= failures
        self._at_start = (self.calls, self.failures)


class Health:
    """
    What is known of one instance. Times are seconds of a clock that never goes back.

    An instance that is new is READY. One that was ejected is on trial when it returns: for as long
    as ``trial`` calls have not succeeded, one failure is enough.
    """

    __slots__ = (
        "_fail_threshold",
        "_failed_probes",
        "_refused_until",
        "ejected_until",
        "trial",
        "window",
    )

    def __init__(self, fail_threshold: int = 3) -> None:
        self.window = Window()
        self.trial = 0
        self._fail_threshold = fail_threshold
        self._failed_probes = 0
        self._refused_until = _NEVER
        self.ejected_until = _NEVER

    @property
    def is_healthy(self) -> bool:
        """What the probes say, whatever was seen in traffic."""
        return self._failed_probes < self._fail_threshold

    def standing(self, now: float) -> Standing:
        if not self.is_healthy:
            return Standing.UNHEALTHY
        if now < self.ejected_until:
            return Standing.EJECTED
        return Standing.REFUSED if now < self._refused_until else Standing.READY

    def changes_after(self, moment: float) -> list[float]:
        """When it returns, wholly or in part, without anybody's doing."""
        return [time for time in (self._refused_until, self.ejected_until) if time > moment]

    def probed(self, ok: bool) -> None:
        if ok:
            self._failed_probes = 0
            self._refused_until = _NEVER
        else:
            self._failed_probes += 1

    def refused(self, now: float) -> None:
        self._refused_until = now + _SECONDS_OUT

    def eject(self, now: float) -> None:
        self.ejected_until = now + _SECONDS_OUT
        self.trial = _TRIAL_CALLS


class RoleHealth(Generic[Member]):
    """
    The instances of one role, which are each other's measure.

    Parameters:

    * **fail_threshold** - probes that fail in a row until an instance is UNHEALTHY.
    * **on_change** - called when an instance's standing has changed: ask ``ready`` again.
    * **clock** - gives seconds.

    Returns that come with time need somebody to call ``tick``: at ``next_change``, which is to be
    asked after each ``on_change`` and each ``tick``. What is said of an instance that was removed,
    by calls that were in progress, goes unheard.
    """

    def __init__(
        self,
        fail_threshold: int = 3,
        on_change: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fail_threshold = fail_threshold
        self._on_change = on_change
        self._clock = clock
        self._known: dict[Member, Health] = {}
        self._calls = self._failures = 0
        self._second = int(clock())
        self._ready: tuple[Member, ...] = ()
        self._asked = _NEVER

    def add(self, instance: Member) -> None:
        """What is known of an instance that is here already is kept."""
        if instance not in self._known:
            self._known[instance] = Health(self._fail_threshold)

    def remove(self, instance: Member) -> None:
        health = self._known.pop(instance, None)
        if health is not None:
            self._forgive(health)

    def ready(self, instances: Iterable[Member]) -> tuple[Member, ...]:
        """
        Those of ``instances`` that calls may go to, in their order.

        ``instances`` are all that were added but those that get nothing new anyway. Empty only if
        every one of them is UNHEALTHY.
        """
        self._asked = self._clock()
        self._ready = self.best_of(instances)
        return self._ready

    def best_of(self, instances: Iterable[Member]) -> tuple[Member, ...]:
        """The same for some of them, those that serve a model for one; changes nothing."""
        now = self._clock()
        standings = [(instance, self._known[instance].standing(now)) for instance in instances]
        best = min((standing for _, standing in standings), default=Standing.UNHEALTHY)
        if best is Standing.UNHEALTHY:
            return ()
        return tuple(instance for instance, standing in standings if standing is best)

    def standing(self, instance: Member) -> Standing:
        return self._known[instance].standing(self._clock())

    def next_change(self) -> float | None:
        """When ``ready`` may answer otherwise than it did, of the clock; None: not by itself."""
        times = [time for one in self._known.values() for time in one.changes_after(self._asked)]
        return min(times, default=None)

    def tick(self) -> None:
        """Time has passed. May be called too early and too often."""
        change = self.next_change()
        if change is not None and change <= self._clock():
            self._on_change()

    def probed(self, instance: Member, ok: bool) -> bool:
        """Whether the instance is healthy, after this probe."""
        health = self._known.get(instance)
        if health is None:
            return False
        now = self._clock()
        before = health.standing(now)
        health.probed(ok)
        self._compare(before, health.standing(now))
        return health.is_healthy

    def refused(self, instance: Member) -> None:
        """No connection could be made."""
        health = self._known.get(instance)
        if health is not None:
            now = self._clock()
            before = health.standing(now)
            health.refused(now)
            self._compare(before, health.standing(now))

    def succeeded(self, instance: Member) -> None:
        """A call came to a good end, or to one that is the caller's fault."""
        health = self._count(instance, self._clock())
        if health is not None and health.trial:
            health.trial -= 1
            if not health.trial:
                self._forgive(health)

    def failed(self, instance: Member) -> None:
        """A call ended with a 5xx, a timeout, or a connection that broke."""
        now = self._clock()
        health = self._count(instance, now)
        if health is None:
            return
        health.window.failures += 1
        self._failures += 1
        if self._stands_out(health) and self._ready != (instance,):
            before = health.standing(now)
            health.eject(now)
            self._compare(before, health.standing(now))

    def _count(self, instance: Member, now: float) -> Health | None:
        """None if the call says nothing: those of an ejected one were sent before it was."""
        if now >= self._second + 1:
            self._go_on_to(int(now))
        health = self._known.get(instance)
        if health is None or now < health.ejected_until:
            return None
        health.window.calls += 1
        self._calls += 1
        return health

    def _go_on_to(self, second: int) -> None:
        windows = [health.window for health in self._known.values()]
        for _ in range(min(second - self._second, _SECONDS_COUNTED)):
            for window in windows:
                window.go_on()
        self._second = second
        self._calls = sum(window.calls for window in windows)
        self._failures = sum(window.failures for window in windows)

    def _forgive(self, health: Health) -> None:
        """The counts of an instance start anew."""
        self._calls -= health.window.calls
        self._failures -= health.window.failures
        health.window = Window()

    def _stands_out(self, health: Health) -> bool:
        """Whether an instance that has just failed a call fails more than its peers do."""
        own = health.window
        calls, failures = own.calls, own.failures
        if health.trial:
            # What counts is this one.
            calls = failures = 1
        elif calls < _FEWEST_CALLS or 2 * failures <= calls:
            return False
        of_peers = self._failures - own.failures
        return failures * (self._calls - own.calls) >= 2 * of_peers * calls

    def _compare(self, before: Standing, after: Standing) -> None:
        if before is not after:
            self._on_change()
