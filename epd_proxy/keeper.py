"""
``Keeper``: what watches the fleet in one event loop, so that the registry stays close to the truth.

Probes ask every instance whether it is well; sources (names, a file, Redis) tell which there are.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from epd_proxy.config import Config, is_name
from epd_proxy.discovery import Away, FileSource, NameSource, Source, Store, normalised_name
from epd_proxy.errors import ConfigError, UpstreamError
from epd_proxy.probes import Prober
from epd_proxy.registry import API, FLAGS, Instance, Registry, Spec, names_among, specs_of
from epd_proxy.upstream import Upstream

logger = logging.getLogger("epd_proxy")

NAMES = "dns"
_SECONDS_TO_SEE = 1.0
"""Within which all proxies of one Redis have seen a change."""


def check_sources(config: Config) -> None:
    """Raises ConfigError for what no source could be made of."""
    names = names_among(specs_of(config))
    if names:
        NameSource(names, lambda _: None)
    if config.registry:
        Store(config.registry, lambda _: None)


class Keeper:
    """
    Belongs to one event loop. ``start`` begins the watching, ``settled`` waits for first answers.

    ``file`` is read again by ``read`` when it changes: what it returns takes the place of what the
    flags have declared.
    """

    def __init__(
        self,
        config: Config,
        registry: Registry,
        upstream: Upstream,
        file: tuple[Path, Callable[[Path], Config]] | None = None,
    ) -> None:
        self._config = config
        self._registry = registry
        self._upstream = upstream
        self._prober = Prober(
            self.is_well,
            self._report,
            self._forget,
            interval=config.probe_interval,
            evicted_ttl=config.evicted_ttl,
        )
        self._probed: set[Instance] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._member = secrets.token_hex(8)
        self.store = self._store()
        self._names, self._file = self._declared(file)
        found: list[Source | None] = [self._names, self._file, self.store]
        self._sources: Sequence[Source] = [source for source in found if source is not None]
        self._start: asyncio.Task[None] | None = None

    def _store(self) -> Store | None:
        """Raises ConfigError."""
        if not self._config.registry:
            return None
        return Store(self._config.registry, partial(self._registry.sync, API), self._drained)

    def _declared(
        self, file: tuple[Path, Callable[[Path], Config]] | None
    ) -> tuple[NameSource | None, FileSource | None]:
        """What looks up names, and what reads the file, which may bring others."""
        names = names_among(specs_of(self._config))
        if not names and file is None:
            return None, None
        looked_up = NameSource(names, partial(self._registry.sync, NAMES))
        if file is None:
            return looked_up, None
        path, read = file
        return looked_up, FileSource(path, lambda path: specs_of(read(path)), self._declare)

    def start(self) -> None:
        self._registry.watchers.append(self._follow)
        self._registry.refresh()
        self._follow()
        if self._sources:
            self._start = asyncio.create_task(self._start_sources())

    async def settled(self) -> None:
        """Until every source has given its first answer, or has failed to."""
        if self._start is not None:
            await asyncio.shield(self._start)

    def reload(self) -> None:
        """Reads the file again now."""
        if self._file is not None:
            self._file.reload()

    def problems(self) -> dict[str, str]:
        """What is wrong with the sources, by their names."""
        return {source.name: source.problem for source in self._sources if source.problem}

    async def idle(self, instance: Instance) -> None:
        """Until no work is in progress there, in whichever process."""
        await instance.idle()
        if self.store is not None:
            # Until everybody has seen that it is drained, and has said so if it has work there.
            await asyncio.sleep(_SECONDS_TO_SEE)
            while await self.store.is_busy(instance.url):  # noqa: ASYNC110 - Redis tells nobody
                await asyncio.sleep(_SECONDS_TO_SEE / 4)

    def detach(self) -> None:
        """Leaves the registry alone, when the event loop has gone."""
        self._registry.watchers.remove(self._follow)

    async def aclose(self) -> None:
        self.detach()
        self._registry.close()
        tasks = [*self._tasks, *([self._start] if self._start is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for source in self._sources:
            await source.aclose()
        await self._prober.aclose()

    async def is_well(self, instance: Instance) -> bool:
        """Whether the instance answers ``GET /health`` with 200, within ``--probe-timeout``."""
        try:
            async with (
                asyncio.timeout(self._config.probe_timeout or None),
                await self._upstream.get(instance, "/health", []) as answer,
            ):
                await answer.read()
                return answer.status == 200
        except (UpstreamError, TimeoutError):
            return False

    async def _start_sources(self) -> None:
        await asyncio.gather(*(source.start() for source in self._sources))

    def _declare(self, specs: Sequence[Spec]) -> None:
        """Raises ValueError, and nothing has changed."""
        names = names_among(specs)
        for name in names:
            normalised_name(name.url)
        self._registry.sync(FLAGS, [spec for spec in specs if not is_name(spec.url)])
        self._registry.expect(specs)
        assert self._names is not None
        self._do(partial(self._names.watch, names))

    def _drained(self, urls: frozenset[str]) -> None:
        for url in urls - self._registry.draining(API):
            instance = self._registry.find(url)
            if instance is not None and instance.load:
                self._do(partial(self._tell_of_work, instance))
        self._registry.drain(API, urls)

    async def _tell_of_work(self, instance: Instance) -> None:
        """So that who drains an instance can wait for the work of all proxies."""
        assert self.store is not None
        while instance.load:
            with suppress(Away):
                await self.store.mark(instance.url, self._member, 3 * _SECONDS_TO_SEE)
            with suppress(TimeoutError):
                async with asyncio.timeout(_SECONDS_TO_SEE):
                    await instance.idle()
        with suppress(Away):
            await self.store.unmark(instance.url, self._member)

    def _do(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        task = asyncio.ensure_future(_quietly(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _follow(self) -> None:
        """Probes whom there is."""
        present = set(self._registry.instances())
        for instance in self._probed - present:
            self._prober.remove(instance)
        for instance in present - self._probed:
            self._prober.add(instance, expires=True)
        self._probed = present

    def _report(self, instance: Instance, ok: bool) -> bool:
        return self._registry.health[instance.role].probed(instance, ok)

    def _forget(self, instance: Instance) -> None:
        """Others than those who registered are probed for ever."""
        if self._registry.is_registered(instance):
            self._registry.remove(instance)
            if self.store is not None:
                self._do(partial(self.store.deregister, instance.url))


async def _quietly(work: Callable[[], Coroutine[Any, Any, object]]) -> None:
    try:
        await work()
    except (Away, ConfigError) as exc:
        logger.warning("%s", exc)
