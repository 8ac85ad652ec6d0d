"""
``Keeper``: what watches the fleet in one event loop, so that the registry stays close to the truth.

Probes ask every instance whether it is well; sources (names, a file, Redis) tell which there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from epd_proxy.config import Config, is_name
from epd_proxy.discovery import FileSource, NameSource, Source, Store
from epd_proxy.errors import ConfigError, UpstreamError
from epd_proxy.probes import Prober
from epd_proxy.registry import API, FLAGS, Instance, Registry, Spec, specs_of
from epd_proxy.upstream import Upstream

NAMES = "dns"


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
        self.store = store_of(config, registry)
        names = [spec for spec in specs_of(config) if is_name(spec.url)]
        self._names = NameSource(names, partial(registry.sync, NAMES)) if names else None
        self._file = None
        if file is not None:
            path, read = file
            self._file = FileSource(path, lambda path: specs_of(read(path)), self._declare)
        found: list[Source | None] = [self._names, self._file, self.store]
        self._sources: Sequence[Source] = [source for source in found if source is not None]
        self._start: asyncio.Task[None] | None = None

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

    async def aclose(self) -> None:
        self._registry.watchers.remove(self._follow)
        self._registry.close()
        if self._start is not None:
            self._start.cancel()
            await asyncio.wait([self._start])
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
        self._registry.sync(FLAGS, [spec for spec in specs if not is_name(spec.url)])

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


def store_of(config: Config, registry: Registry) -> Store | None:
    """Raises ConfigError."""
    if not config.registry:
        return None
    try:
        return Store(config.registry, partial(registry.sync, API), partial(registry.drain, API))
    except ConfigError:
        raise
    except ValueError as exc:
        raise ConfigError("--registry", str(exc)) from None
