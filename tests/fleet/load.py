"""
Many callers at once, one request after another, and what each of them got.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from tests.faults.callers import Answer, Caller
from tests.faults.engines import DONE
from tests.faults.fleet import request
from tests.fleet.engines import NAME

_AFTER_503 = 0.05
"""Seconds for which a caller who was turned away waits."""


class Outcome(NamedTuple):
    """One request to its end. Times are those of the event loop."""

    answer: Answer
    streamed: bool
    began: float
    ended: float

    @property
    def is_good(self) -> bool:
        """A 200 that has come whole, a stream to its last event."""
        answer = self.answer
        ends_well = answer.body.endswith(DONE) if self.streamed else answer.is_json
        return answer.status == 200 and answer.is_whole and ends_well

    @property
    def engine(self) -> str:
        """The address of the decode engine that answered."""
        return self.answer.header(NAME) or ""

    def __repr__(self) -> str:
        answer = self.answer
        words = f"{answer.status} whole={answer.is_whole} streamed={self.streamed}"
        return f"<{words} {self.ended - self.began:.3f}s {answer.raw[:600]!r}>"


class Load:
    """What is asked, by whom, and what came of it."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._chance = random.Random(seed)
        self._is_over = False
        self._answered = asyncio.Event()
        self.outcomes: list[Outcome] = []

    @property
    def bad(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.is_good]

    @property
    def statuses(self) -> Counter[int]:
        return Counter(outcome.answer.status for outcome in self.outcomes)

    async def more(self, number: int) -> None:
        """Until so many more have been answered."""
        goal = len(self.outcomes) + number
        while len(self.outcomes) < goal:
            self._answered.clear()
            await self._answered.wait()

    def end(self) -> None:
        """Nobody asks again."""
        self._is_over = True

    async def keep_asking(self) -> None:
        while not self._is_over:
            outcome = await self._ask()
            self.outcomes.append(outcome)
            self._answered.set()
            if outcome.answer.status == 503:
                await asyncio.sleep(_AFTER_503)

    async def _ask(self) -> Outcome:
        streamed = self._chance.random() < 0.5
        body = request(streamed, images=self._chance.randrange(3))
        now = asyncio.get_running_loop().time
        began = now()
        caller = await Caller.connect(self._url)
        await caller.ask(body)
        answer = await caller.answer()
        await caller.close()
        return Outcome(answer, streamed, began, now())


@asynccontextmanager
async def load(url: str, callers: int, *, seed: int = 6) -> AsyncIterator[Load]:
    """So many callers ask until the context ends; then each waits for its last answer."""
    found = Load(url, seed)
    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(found.keep_asking())
        yield found
        found.end()


def report(**figures: Any) -> None:
    """Figures of a run, for ``pytest -rP``."""
    print("figures:", ", ".join(f"{name} {value}" for name, value in figures.items()))  # noqa: T201
