"""
What every source does: tell the fleet it knows, and say once what is wrong.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from msgspec import Struct

logger = logging.getLogger("epd_proxy")

_AFTER_A_BUG = 1.0
"""Seconds."""


class Spec(Struct, frozen=True):
    """PROVISIONAL, until ``epd_proxy.registry`` has it: one engine as a source declares it."""

    role: Literal["encode", "prefill", "decode", "prefill_decode"]
    url: str
    weight: float = 1.0
    dp_size: int = 1
    ec_zmq_addrs: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    labels: dict[str, str] = {}


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
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def problem(self) -> str:
        """What is wrong now, for ``/health``; empty when all is well."""
        return "; ".join(self._reasons.values())

    @abstractmethod
    async def start(self) -> None: ...

    async def aclose(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
        self._tasks.append(asyncio.create_task(self._forever(step)))

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
