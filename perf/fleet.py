"""
Engines and proxies, up together for as long as a scenario takes.
"""

from __future__ import annotations

import http.client
import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from perf.processes import Cores, Process, running
from perf.subjects import DIRECT, Subject

_PATIENCE = 60.0
_CHAT = "/v1/chat/completions"


class Failed(Exception):
    """A subject did not do its work. Its row says so, and the run goes on."""


class Engines:
    """
    Two engines of each role, or no prefill engines.

    Encoders are a process of their own: reading large bodies must not hold up the clock of decode.
    """

    def __init__(self, stack: ExitStack, core: int, *, prefill: bool) -> None:
        self.urls: dict[str, list[str]] = {"encode": [], "prefill": [], "decode": []}
        later = ["prefill=2", "decode=2"] if prefill else ["decode=2"]
        self._processes = [self._start(stack, core, words) for words in (["encode=2"], later)]

    def _start(self, stack: ExitStack, core: int, words: Sequence[str]) -> Process:
        command = [sys.executable, "-m", "perf.engines", *words]
        pipe = subprocess.PIPE
        process = stack.enter_context(running(command, core, stdin=pipe, stdout=pipe))
        for role, ports in _line_of(process).items():
            self.urls[role] = [f"http://127.0.0.1:{port}" for port in ports]
        return process

    def reset(self, **settings: object) -> None:
        for process in self._processes:
            _ask(process, {"do": "reset", **settings})

    def report(self) -> tuple[dict[str, int], dict[str, list[Any]]]:
        """How many requests each role has had since the reset, and those that were kept."""
        encode, later = (_ask(process, {"do": "report"}) for process in self._processes)
        counts = {**later["counts"], "encode": encode["counts"]["encode"]}
        return counts, {**later["kept"], "encode": encode["kept"]["encode"]}


def _ask(process: Process, command: dict[str, object]) -> dict[str, Any]:
    assert process.stdin is not None
    process.stdin.write(json.dumps(command).encode() + b"\n")
    process.stdin.flush()
    return _line_of(process)


def _line_of(process: Process) -> dict[str, Any]:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], _PATIENCE)
    line = process.stdout.readline() if ready else b""
    if not line:
        raise RuntimeError("an engine of the bench ended, or does not answer")
    answer: dict[str, Any] = json.loads(line)
    return answer


class Running:
    """A subject, up: where it listens, and its process if it has one."""

    def __init__(self, subject: Subject, port: int, process: Process | None = None) -> None:
        self.subject = subject
        self.name = subject.name
        self.port = port
        self.process = process
        self.trouble = ""
        """Why it did not start, if it did not."""

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def post(self, body: bytes) -> tuple[int, bytes]:
        """One request on a connection of its own. Raises Failed."""
        caller = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE)
        try:
            caller.request("POST", _CHAT, body, {"content-type": "application/json"})
            response = caller.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as exc:
            raise Failed(f"{type(exc).__name__} {exc}".strip()) from exc
        finally:
            caller.close()


@contextmanager
def fleet(
    subjects: Sequence[Subject], cores: Cores, *, prefill: bool = True
) -> Iterator[tuple[Engines, list[Running]]]:
    """Engines, and all ``subjects`` in front of them, idle while it is another's turn."""
    with ExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory(prefix="epd-proxy-perf-")))
        engines = Engines(stack, cores.load, prefill=prefill)
        started = [_start(stack, one, engines.urls, cores.proxy, logs) for one in subjects]
        for one in started:
            _wait_until_ready(one, logs / one.name)
        yield engines, started


def _start(
    stack: ExitStack, subject: Subject, urls: Mapping[str, Sequence[str]], core: int, logs: Path
) -> Running:
    if subject.name == DIRECT:
        return Running(subject, int(urls["decode"][0].rpartition(":")[2]))
    port = _free_port()
    # Logs cost what they cost; a file takes them as a container's log would.
    log = stack.enter_context((logs / subject.name).open("wb"))
    command = subject.command(port, _free_port(), urls)
    process = stack.enter_context(running(command, core, stdout=log, stderr=log))
    return Running(subject, port, process)


def _wait_until_ready(one: Running, log: Path) -> None:
    deadline = time.monotonic() + _PATIENCE
    while one.process is not None and not _is_ready(one.port):
        if one.process.poll() is not None or time.monotonic() > deadline:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            one.trouble = f"did not start: {''.join(last)}"
            return
        time.sleep(0.1)


def _is_ready(port: int) -> bool:
    caller = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        caller.request("GET", "/health")
        return caller.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        caller.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
