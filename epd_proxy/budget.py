"""
How much may be done again: ``RetryBudget`` for all requests together, ``backoff`` for each of them.

Where an engine fails now and then, nearly every redo is granted. Where all engines fail, redos
would multiply the load just when it hurts most; then the budget keeps them a fraction of it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 0.2


class RetryBudget:
    """
    At most ``share`` of the requests of the last ``window`` seconds are done again, or ``floor``
    a second if that is more.

    ``clock`` gives seconds. Whole seconds of it are counted, the one that runs among them: so the
    window is up to a second shorter, and redos granted by ``floor`` count against ``share`` too.
    """

    def __init__(
        self,
        share: float = 0.2,
        window: float = 10.0,
        floor: float = 3.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._share = share
        self._floor = floor
        self._clock = clock
        self._second = int(clock())
        # One element for each second of the window; a second has its place by its remainder.
        self._size = max(1, math.ceil(window))
        self._requests = [0] * self._size
        self._redos = [0] * self._size

    def note_request(self) -> None:
        """Once for each request of a caller, however often it is done again."""
        second = int(self._clock())
        if second != self._second:
            self._go_on_to(second)
        self._requests[second % self._size] += 1

    def may_redo(self) -> bool:
        """Takes one redo out of the budget; whether there was one."""
        second = int(self._clock())
        if second != self._second:
            self._go_on_to(second)
        place = second % self._size
        if (
            self._redos[place] + 1 > self._floor
            and sum(self._redos) + 1 > sum(self._requests) * self._share
        ):
            return False
        self._redos[place] += 1
        return True

    def _go_on_to(self, second: int) -> None:
        """Empties the places of the seconds that have begun since the last call."""
        for begun in range(max(self._second, second - self._size) + 1, second + 1):
            self._requests[begun % self._size] = self._redos[begun % self._size] = 0
        self._second = second


def backoff(attempt: int, rng: random.Random) -> float:
    """Seconds to pause before a redo, by chance up to 0.2; ``attempt`` is 1 for the first."""
    # Bounded, since somebody may allow a thousand retries, and 2.0**1024 is no float.
    most = min(_FIRST_PAUSE * 2 ** min(attempt - 1, 8), _LONGEST_PAUSE)
    return rng.uniform(most / 2, most)
