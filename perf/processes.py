"""
Processes on cores of their own: started, watched through ``/proc``, and ended by their pid.

The proxy under test has a core to itself, and everything else shares another one. A process
inherits its core from the rig, which moves there for the moment of the start: run times that count
the cores as they start, as tokio does, then see one.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
Process = subprocess.Popen[bytes]

_TICK = os.sysconf("SC_CLK_TCK")
_PATIENCE = 5.0


class Cores(NamedTuple):
    proxy: int
    load: int

    @classmethod
    def of_this_machine(cls) -> Cores:
        """The first two that we may use; one and the same where there is only one."""
        allowed = sorted(os.sched_getaffinity(0))
        return cls(allowed[0], allowed[min(1, len(allowed) - 1)])


def prepare(cores: Cores) -> None:
    """Once, for the rig itself: its core, enough file descriptors, an orderly end on SIGTERM."""
    os.sched_setaffinity(0, {cores.load})
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextmanager
def running(
    command: Sequence[str | Path],
    core: int,
    *,
    stdin: int | None = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    env: dict[str, str] | None = None,
) -> Iterator[Process]:
    """A process on ``core``, which ends with the context, and so does all that it started."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, **(env or {})},
        )
    finally:
        os.sched_setaffinity(0, own)
    try:
        yield process
    finally:
        _end(process)


def _end(process: Process) -> None:
    family = [] if process.poll() is not None else _family(process.pid)
    process.terminate()
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_PATIENCE)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    for pid, began in family[1:]:
        # Its number may be somebody else's by now; its start time is not.
        if (fields := _stat(pid)) and fields[19] == began:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` from the third on; none if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text[text.rindex(")") + 2 :].split()


def _family(root: int) -> list[tuple[int, str]]:
    """The process and its descendants, each with its start time."""
    everyone = {int(p.name): _stat(int(p.name)) for p in Path("/proc").glob("[0-9]*")}
    found = {root}
    size = 0
    while size < len(found):
        size = len(found)
        found |= {pid for pid, fields in everyone.items() if fields and int(fields[1]) in found}
    children = sorted(found - {root})
    return [(pid, everyone[pid][19]) for pid in (root, *children) if everyone.get(pid)]


def cpu_seconds(root: int) -> float:
    """User and system time of a process, its descendants, and those that it has waited for."""
    ticks = sum(sum(map(int, _stat(pid)[11:15])) for pid, _ in _family(root))
    return ticks / _TICK


def busy_seconds(core: int) -> float:
    """How long a core has worked, for whomever."""
    text = Path("/proc/stat").read_text()
    line = next(row for row in text.splitlines() if row.startswith(f"cpu{core} "))
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, line.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _TICK


def memory_bytes(root: int, field: str) -> int:
    """``VmRSS``, or ``VmHWM``, which is the peak, of a process and its descendants."""
    total = 0
    for pid, _ in _family(root):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            status = Path(f"/proc/{pid}/status").read_text()
            if found := re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE):
                total += int(found[1]) * 1024
    return total


def reset_peak(root: int) -> None:
    """Makes ``VmHWM`` start again from what is resident now."""
    for pid, _ in _family(root):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")
