"""
``serve`` as processes: one, or several on one socket; and how they end.

The first SIGTERM or SIGINT turns ``/health`` red; after ``delay`` nothing new is accepted, what
runs may finish within uvicorn's own limit, and the rest is cut. The exit status is 0. A second
signal ends it at once. SIGHUP reads the configuration file again.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import uvicorn

from epd_proxy.app import EPDProxy
from epd_proxy.config import Config
from epd_proxy.intake import IntakeProtocol, keep_memory

_NOT_STARTED = 3
_TICK = 0.1
_ENDS = (signal.SIGTERM, signal.SIGINT)


class Service(NamedTuple):
    """What one process needs to serve; it can be sent to another."""

    config: Config
    options: Mapping[str, Any]
    """uvicorn's."""
    file: tuple[Path, Callable[[Path], Config]] | None = None
    delay: float = 0.0
    """Seconds from the first signal until nothing new is accepted."""

    def settings(self, app: Any) -> uvicorn.Config:
        return uvicorn.Config(
            app,
            **self.options,
            loop="auto",
            http=IntakeProtocol,
            lifespan="on",
            # Decode's own are passed on.
            server_header=False,
            date_header=False,
            access_log=False,
            proxy_headers=False,
        )

    def run(
        self, listener: socket.socket | None = None, ends: Sequence[signal.Signals] = _ENDS
    ) -> int:
        """Serves until a signal ends it: the exit status."""
        proxy = EPDProxy(config=self.config, file=self.file, is_alone=listener is None)
        _calm_collector()
        keep_memory()
        server = _Server(self.settings(proxy), proxy, self.delay, ends)
        server.run(sockets=[listener] if listener else None)
        return 0 if server.started else _NOT_STARTED


def run(service: Service, workers: int) -> int:
    """The exit status."""
    if workers == 1:
        return service.run()
    listener = service.settings(None).bind_socket()
    return _Workers(service, listener, workers).run()


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        proxy: EPDProxy,
        delay: float,
        ends: Sequence[signal.Signals],
    ) -> None:
        super().__init__(config)
        self._proxy = proxy
        self._delay = delay
        self._ends = ends
        self._told_at: float | None = None
        self._is_to_reload = False

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's it does not raise them again at the end: 0 is a good end."""
        handlers = dict.fromkeys(self._ends, self.handle_exit) | {signal.SIGHUP: self._handle_hup}
        before = {sig: signal.signal(sig, handler) for sig, handler in handlers.items()}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._told_at is not None:
            self.should_exit = self.force_exit = True
            return
        self._told_at = time.monotonic()
        self._proxy.close_the_door()
        self.should_exit = not self._delay

    def _handle_hup(self, sig: int, frame: FrameType | None) -> None:
        self._is_to_reload = True

    async def on_tick(self, counter: int) -> bool:
        """Every tenth of a second."""
        if self._told_at is not None and time.monotonic() - self._told_at >= self._delay:
            self.should_exit = True
        if self._is_to_reload:
            self._is_to_reload = False
            self._proxy.reload()
        return await super().on_tick(counter)


class _Workers:
    """Keeps so many processes serving on one socket."""

    def __init__(self, service: Service, listener: socket.socket, count: int) -> None:
        self._service = service
        self._listener = listener
        self._processes: list[BaseProcess] = []
        self._count = count
        self._told_at = 0.0
        """When the first signal came."""

    def run(self) -> int:
        for sig in (*_ENDS, signal.SIGHUP):
            signal.signal(sig, self._pass_on)
        status = 0
        while not self._told_at and len(self._processes) < self._count:
            self._start()
        while self._processes:
            wait([process.sentinel for process in self._processes], _TICK)
            if self._told_at and time.monotonic() - self._told_at >= self._service.delay:
                # Else the kernel would go on to accept for workers who accept no more.
                self._listener.close()
            for process in [each for each in self._processes if not each.is_alive()]:
                self._processes.remove(process)
                if self._told_at:
                    continue
                if process.exitcode == _NOT_STARTED:
                    # It would not start a second time either.
                    status = _NOT_STARTED
                    self._pass_on(signal.SIGTERM, None)
                else:
                    # One that dies at once must not be all that the machine does.
                    time.sleep(_TICK)
                    self._start()
        return status

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_work, args=(self._service, self._listener))
        process.start()
        self._processes.append(process)
        if self._told_at:
            # The signal came before it could be passed on.
            process.terminate()

    def _pass_on(self, sig: int, frame: FrameType | None) -> None:
        if sig in _ENDS:
            self._told_at = self._told_at or time.monotonic()
            sig = signal.SIGTERM
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, sig)


def _work(service: Service, listener: socket.socket) -> None:
    # A terminal sends it to all; the parent passes on its own, and twice would be at once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(service.run(listener, [signal.SIGTERM]))


def _calm_collector() -> None:
    """
    Requests leave next to no cycles, and the modules never go: looking at either is time lost.

    Saves a tenth of the CPU time of a text request.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
