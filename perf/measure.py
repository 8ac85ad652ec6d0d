"""
What a piece of work costs a proxy, and how such figures are put together.

A figure of one measurement is a number by name. ``cpu_us`` is the one that holds on a busy machine:
user and system time of the proxy's processes, by request, event or MB.
"""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from perf.fleet import Failed, Running
from perf.processes import Cores, busy_seconds, cpu_seconds, memory_bytes, reset_peak

Figures = dict[str, float]

# More than this share of the proxy's core in others' hands, and a measurement is done again.
NOISY = 0.1


class Row(msgspec.Struct):
    """What one subject did in one part of a scenario."""

    rounds: list[Figures] = []
    failed: str = ""


Results = dict[str, dict[str, Row]]
"""By part of a scenario, then by subject."""


class Settings(NamedTuple):
    cores: Cores
    rounds: int
    seconds: int
    retries: int
    """How often a noisy measurement is done again at most."""
    quick: bool


def metered(one: Running, cores: Cores, work: Callable[[], Figures]) -> Figures:
    """The figures of ``work``, and what it took: ``cpu_s``, ``peak_mb``, and how busy it was."""
    pid = one.pid
    if pid is None:
        return work()
    reset_peak(pid)
    cpu, proxy, load = cpu_seconds(pid), busy_seconds(cores.proxy), busy_seconds(cores.load)
    began = time.monotonic()
    figures = work()
    wall = time.monotonic() - began
    used = cpu_seconds(pid) - cpu
    others = busy_seconds(cores.proxy) - proxy - used
    figures |= {
        "busy": min(1.0, used / wall),
        "noise": max(0.0, others / wall),
        "load": min(1.0, (busy_seconds(cores.load) - load) / wall),
    }
    # What callers gave up at the end is still being worked on.
    settle(pid)
    figures["cpu_s"] = cpu_seconds(pid) - cpu
    figures["peak_mb"] = memory_bytes(pid, "VmHWM") / 1e6
    return figures


def settle(pid: int, limit: float = 10.0) -> None:
    """
    Waits until a process is idle, which is a tick of the clock in a tenth of a second at most.

    Twice in a row: where the whole machine stood still meanwhile, everything has been idle.
    """
    deadline = time.monotonic() + limit
    now, idle = cpu_seconds(pid), 0
    while idle < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
        before, now = now, cpu_seconds(pid)
        idle = idle + 1 if now - before < 0.011 else 0


def interleaved(
    everyone: Sequence[Running], step: Callable[[Running], Figures], settings: Settings
) -> dict[str, Row]:
    """
    A B C A B C, so that what changes on the machine changes for all.

    A subject that fails is through, the others go on.
    """
    rows = {one.name: Row(failed=one.trouble) for one in everyone}
    for _ in range(settings.rounds):
        for one in everyone:
            row = rows[one.name]
            if row.failed:
                continue
            try:
                row.rounds.append(_quietest(one, step, settings.retries))
            except Failed as exc:
                row.failed = str(exc)
                if one.pid is not None:
                    settle(one.pid)
    return rows


def _quietest(one: Running, step: Callable[[Running], Figures], retries: int) -> Figures:
    best = step(one)
    for _ in range(retries):
        if best.get("noise", 0.0) <= NOISY:
            break
        best = min(best, step(one), key=operator.itemgetter("noise"))
    return best


def median(row: Row | None, name: str) -> float | None:
    """The median of a figure over the rounds of a row; none if there is none."""
    values = [] if row is None or row.failed else [r[name] for r in row.rounds if name in r]
    return statistics.median(values) if values else None


def ratio(row: Row, base: Row | None, name: str) -> float | None:
    """The median of the ratios, round by round."""
    if base is None or row.failed or base.failed:
        return None
    pairs = zip(row.rounds, base.rounds, strict=False)
    found = [a[name] / b[name] for a, b in pairs if name in a and b.get(name)]
    return statistics.median(found) if found else None
