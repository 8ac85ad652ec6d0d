"""
What every source does: tell the fleet it knows, and say once what is wrong.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence

from epd_proxy.registry import Spec

logger = logging.getLogger("epd_proxy")

_AFTER_A_BUG = 1.0
"""Seconds."""

Tell = Callable[[Sequence[Spec]], None]
"""Takes all that a source declares; raises ValueError if the fleet is refused as a whole."""


class Source(ABC):
    """
    One place that part of the fleet comes from.

    ``start`` returns when the first answer, if there is one, was told; ``aclose`` ends the
    watching. After it the source may be started again, in another event loop too.
    """

    def __init__(self, name: str, tell: Tell) -> None:
        self.name = name
        self._tell = tell
        self._told: list[Spec] | None = None
        self._reasons: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def problem(self) -> str:
        """What is wrong now, for ``/health``; empty when all is well."""
        return "; ".join(self._reasons.values())

    @abstractmethod
    async def start(self) -> None: ...

    async def aclose(self) -> None:
        # More than once: `asyncio.wait_for` loses a cancellation at times, before Python 3.12.
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            _, self._tasks = await asyncio.wait(self._tasks, timeout=0.1)

    def _say(self, specs: Sequence[Spec]) -> None:
        """Nothing that was said before, unless it was refused: the rest of the fleet moves too."""
        found = list(specs)
        if found == self._told:
            return
        try:
            self._tell(found)
        except ValueError as exc:
            self._note("fleet", f"the fleet was refused: {exc}")
        else:
            self._told = found
            self._note("fleet", "")

    def _note(self, topic: str, reason: str) -> None:
        """Logged when it changes; an empty reason ends the trouble."""
        before = self._reasons.get(topic, "")
        if reason == before:
            return
        if reason:
            self._reasons[topic] = reason
            logger.warning("%s: %s; going on with what is known", self.name, reason)
        else:
            del self._reasons[topic]
            logger.info("%s: over: %s", self.name, before)

    def _repeat(self, step: Callable[[], Awaitable[None]]) -> None:
        self._tasks.add(asyncio.create_task(self._forever(step)))

    async def _forever(self, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await step()
            except Exception as exc:
                # A bug in one look must not end the watching for good.
                logger.exception("%s: watching failed", self.name)
                self._note("watching", f"watching failed: {exc!r}")
                await asyncio.sleep(_AFTER_A_BUG)
            else:
                self._note("watching", "")
