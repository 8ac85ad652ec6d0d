"""
Load on a port, from processes on the load core: ``wrk`` to saturate it, callers of ours for
whatever needs a clock of its own. Both are bounded in number and in time.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from perf.fleet import Failed
from perf.processes import Process, running

_SCRIPT = Path(__file__).with_name("load.lua")
_ERRORS = ("connect", "read", "write", "status", "timeout")
_PATIENCE = 90.0


class Outcome(NamedTuple):
    requests: int
    seconds: float
    bytes: int
    p50: float
    """Milliseconds."""
    p99: float


def find_wrk() -> str:
    """Raises SystemExit with what to do."""
    found = shutil.which("wrk")
    if found is None:
        raise SystemExit("perf: wrk is missing; on Debian: apt-get install wrk")
    return found


@contextmanager
def body_file(body: bytes) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile(prefix="epd-proxy-perf-", suffix=".json") as file:
        file.write(body)
        file.flush()
        yield Path(file.name)


def saturate(port: int, body: Path, *, width: int, seconds: int, core: int) -> Outcome:
    """``width`` connections, each with its next request as soon as it has an answer."""
    command = [find_wrk(), "-t1", f"-c{width}", f"-d{seconds}s", "--timeout", "30s"]
    command += ["--script", str(_SCRIPT), f"http://127.0.0.1:{port}"]
    env = {"PERF_BODY": str(body)}
    with running(
        command, core, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env
    ) as process:
        out = _output_of(process, seconds)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if not lines:
        raise Failed(f"wrk said: {out.strip()[-200:]}")
    found = json.loads(lines[-1])
    if wrong := {name: found[name] for name in _ERRORS if found[name]}:
        raise Failed(f"errors: {wrong}")
    seconds_taken = found["micros"] / 1e6
    return Outcome(found["requests"], seconds_taken, found["bytes"], found["p50"], found["p99"])


@contextmanager
def callers(kind: str, core: int, **options: object) -> Iterator[Process]:
    """Callers of ``perf.callers`` at work; ``outcome_of`` waits for what they have to say."""
    command = [sys.executable, "-m", "perf.callers", kind, json.dumps(options)]
    with running(command, core, stdout=subprocess.PIPE) as process:
        yield process


def outcome_of(process: Process) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_output_of(process, 0))
    return found


def _output_of(process: Process, seconds: float) -> str:
    try:
        return process.communicate(timeout=seconds + _PATIENCE)[0].decode()
    except subprocess.TimeoutExpired:
        raise Failed(f"the load did not end within {seconds + _PATIENCE:.0f} s") from None
