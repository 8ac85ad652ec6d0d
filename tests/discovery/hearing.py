"""
What a source is tested with: an ear in the registry's place.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from epd_proxy.discovery import Source
from epd_proxy.registry import Spec

LIMIT = 10
"""Seconds after which a test has hung."""


class Ear:
    """Hears what a source tells, or refuses to."""

    def __init__(self) -> None:
        self.fleets: list[list[Spec]] = []
        self.refusal: Exception | None = None
        self._heard = asyncio.Event()

    def __call__(self, specs: Sequence[Spec]) -> None:
        if self.refusal:
            raise self.refusal
        self.fleets.append(list(specs))
        self._heard.set()

    @property
    def fleet(self) -> list[Spec]:
        return self.fleets[-1]

    @property
    def urls(self) -> list[str]:
        return [spec.url for spec in self.fleet] if self.fleets else []

    async def until(self, *urls: str, within: float = LIMIT) -> None:
        """Until just these have been told last."""
        async with asyncio.timeout(within):
            while self.urls != list(urls):
                self._heard.clear()
                await self._heard.wait()


async def eventually(is_so: Callable[[], object], within: float = LIMIT) -> None:
    """For what nobody tells of; ``is_so`` may be a coroutine function."""
    async with asyncio.timeout(within):
        while not await _result(is_so()):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)


async def _result(value: object) -> object:
    return await value if inspect.isawaitable(value) else value


@asynccontextmanager
async def started(source: Source) -> AsyncIterator[None]:
    await source.start()
    try:
        yield
    finally:
        await source.aclose()
