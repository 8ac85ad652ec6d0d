"""
Tables out of results: for people as they come, as Markdown, as JSON.

    python -m perf.report OUT.json      the Markdown of a run that was kept
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from perf.measure import NOISY, Results, Row, median, ratio
from perf.peers import ROUTER_VERSION
from perf.subjects import BASELINE, FLOOR, OURS, ROUTER

# name: heading. Shown where any subject has it, in this order.
_COLUMNS = {
    "cpu_us": "CPU us",
    "us_per_mb": "us/MB",
    "bend_mb": "bend",
    "us_per_image": "us/image",
    "bend_image": "bend",
    "peak_per_byte": "peak/byte",
    "rps": "req/s",
    "p50": "p50 ms",
    "p99": "p99 ms",
    "added_ms": "added ms",
    "delay_p50": "delay p50",
    "delay_p99": "delay p99",
    "first_p50": "first p50",
    "first_p99": "first p99",
    "gap": "gap",
    "gap_max": "worst gap",
    "pushed_mb": "MB pushed",
    "peak_mb": "peak MB",
    "left_mb": "left MB",
    "busy": "busy",
    "load": "load",
    "noise": "noise",
}
_COMPARED = (BASELINE, ROUTER, FLOOR)
_WALL = {"rps", "p50", "p99", "added_ms", "delay_p50", "delay_p99", "gap", "gap_max"} | {
    "first_p50",
    "first_p99",
}

_DESCRIPTIONS = {
    OURS: "epd-proxy",
    "epd-httpx": "epd-proxy over bare httpx",
    "vllm": "vLLM 0.33.0's proxy as shipped",
    BASELINE: "vLLM 0.33.0's, its logs off",
    "vllm-0.29": "vLLM 0.29.0's, its logs off",
    ROUTER: f"vllm-router {ROUTER_VERSION} (P and D only)",
    FLOOR: "floor",
}


class About(msgspec.Struct):
    """Where and how a run was made."""

    date: str
    machine: str
    python: str
    rounds: int
    seconds: int
    left_out: dict[str, str]

    @classmethod
    def of_now(cls, rounds: int, seconds: int, left_out: dict[str, str]) -> About:
        machine = f"{_processor()}, {os.cpu_count()} cores, {platform.system()}"
        return cls(
            time.strftime("%Y-%m-%d"),
            f"{machine} {platform.release()}",
            platform.python_version(),
            rounds,
            seconds,
            left_out,
        )


class Report(msgspec.Struct):
    about: About
    results: Results


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


# -- as it comes ---------------------------------------------------------------------------------


def show(part: str, rows: dict[str, Row]) -> None:
    columns = [
        name for name in _COLUMNS if any(median(row, name) is not None for row in rows.values())
    ]
    compared = [name for name in _COMPARED if name in rows and "cpu_us" in columns]
    table = [[part, *(_COLUMNS[name] for name in columns), *(f"/{name}" for name in compared)]]
    for name, row in rows.items():
        if row.failed:
            table.append([name, f"FAILED: {row.failed}"])
            continue
        ratios = (ratio(row, rows[other], "cpu_us") for other in compared)
        table.append([name, *(_cell(row, column) for column in columns), *map(_number, ratios)])
    print("\n" + "\n".join(_aligned(table)), flush=True)


def _cell(row: Row, column: str) -> str:
    noisy = (median(row, "noise") or 0.0) > NOISY
    return _number(median(row, column)) + ("~" if noisy and column in _WALL else "")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"


def _aligned(table: Sequence[Sequence[str]]) -> Iterable[str]:
    whole = [row for row in table if len(row) == len(table[0])]
    widths = [max(len(row[i]) for row in whole) for i in range(len(table[0]))]
    widths[0] = max(24, *(len(row[0]) for row in table))
    for row in table:
        first, *rest = row
        cells = rest if len(row) < len(widths) else map(str.rjust, rest, widths[1:])
        yield f"{first:<{widths[0]}}  " + "  ".join(cells)


# -- the table of the README ---------------------------------------------------------------------

_README_PARTS = {
    "unary, text": "text",
    "unary, 1 KB": "1 KB image",
    "unary, 200 KB": "200 KB",
    "unary, 1 MB": "1 MB",
    "unary, 4 x 200 KB": "4 x 200 KB",
    "unary, 16 x 100 KB": "16 x 100 KB",
    "burst, 64 events": "event of 64 in a burst",
    "paced, 200 streams": "event of 200 paced streams",
    "paced, 1000 streams": "of 1000",
}


def markdown(report: Report) -> str:
    """CPU milliseconds per request, per event for streams, and the ratio of ours to each."""
    parts = [part for part in _README_PARTS if part in report.results]
    names = [name for name in _DESCRIPTIONS if any(name in report.results[part] for part in parts)]
    lines = [f"| CPU, ms | {' | '.join(_README_PARTS[part] for part in parts)} |"]
    lines.append("| --- |" + " --- |" * len(parts))
    for name in names:
        cells = (_milliseconds(report.results[part].get(name)) for part in parts)
        lines.append(f"| {_DESCRIPTIONS[name]} | {' | '.join(cells)} |")
    for name in names:
        if name != OURS and name in _COMPARED:
            cells = (_ratio_to(report.results[part], name) for part in parts)
            lines.append(f"| *epd-proxy / {_DESCRIPTIONS[name]}* | {' | '.join(cells)} |")
    return "\n".join([*lines, "", _method(report.about)])


def _milliseconds(row: Row | None) -> str:
    value = median(row, "cpu_us")
    if value is None:
        return "failed" if row is not None and row.failed else ""
    return f"{value / 1e3:.3f}" if value < 100 else f"{value / 1e3:.2f}"


def _ratio_to(rows: dict[str, Row], name: str) -> str:
    found = ratio(rows[OURS], rows.get(name), "cpu_us") if OURS in rows else None
    return "" if found is None else f"{found:.2f}"


def _method(about: About) -> str:
    return (
        f"{about.date}, {about.machine}, Python {about.python}; the proxy on one core, engines and"
        f" load on another; medians of {about.rounds} interleaved rounds of {about.seconds} s."
    )


def main() -> None:
    report = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Report)
    print(markdown(report))


if __name__ == "__main__":
    main()
