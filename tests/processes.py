"""
``epd-proxy`` as people run it: processes, ports, signals.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

LIMIT = 30
"""Seconds after which a test has hung."""


class Process:
    """One running command, whose output can be waited for."""

    def __init__(self, *args: str, env: Mapping[str, str] | None = None) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("EPD_PROXY_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "epd_proxy", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**clean, **(env or {})},
        )
        self.output = ""
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first match in what it prints from now on."""
        while line := self._lines.get(timeout=LIMIT):
            self.output += line
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"{pattern!r} did not come:\n{self.output}")

    def wait(self) -> int:
        """The exit status, when it has ended by itself."""
        while line := self._lines.get(timeout=LIMIT):
            self.output += line
        return self._process.wait(LIMIT)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        """Ends it, politely at first."""
        for number in (signal.SIGINT, signal.SIGKILL):
            if self._process.poll() is None:
                self._process.send_signal(number)
                try:
                    self._process.wait(LIMIT)
                except subprocess.TimeoutExpired:
                    continue


@contextmanager
def running(*args: str, env: Mapping[str, str] | None = None) -> Iterator[Process]:
    """The command while it runs."""
    process = Process(*args, env=env)
    try:
        yield process
    finally:
        process.stop()


@contextmanager
def listening(*args: str, env: Mapping[str, str] | None = None) -> Iterator[str]:
    """A command that serves on a port of its own choice: its address."""
    with running(*args, "--port", "0", env=env) as process:
        yield process.wait_for(r"running on (https?://\S+)")[1]


@contextmanager
def unused_address() -> Iterator[str]:
    """Where nobody listens, nor will as long as the context lasts."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{holder.getsockname()[1]}"
