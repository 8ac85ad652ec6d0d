"""
How do proxies for encode, prefill and decode compare?

    python -m perf [--quick] [--scenario NAME ...] [--subject NAME ...] [--json OUT] [--markdown]

From the root of the checkout, with the package installed. ``perf/README.md`` says what it means.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from perf import peers, processes, report, scenarios, subjects
from perf.load import find_wrk
from perf.measure import Results, Settings
from perf.processes import Cores
from perf.scenarios import SCENARIOS, Run


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf", description="Proxies for encode, prefill and decode side by side."
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="under a minute: less of everything")
    add("--scenario", action="append", choices=SCENARIOS, help="repeatable (default: all)")
    add("--subject", action="append", choices=subjects.NAMES, help="repeatable (default: all)")
    add("--rounds", type=_positive, help="measurements of everything (default: 3; quick: 2)")
    add("--seconds", type=_positive, help="of a saturated measurement (default: 3; quick: 1)")
    add("--json", type=Path, metavar="OUT", help="write all figures to a file")
    add("--markdown", action="store_true", help="print the README's table at the end")
    peers.add_options(parser)
    add("--offline", action="store_true", help="leave out peers that are not fetched yet")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def settings_of(options: argparse.Namespace) -> Settings:
    rounds, seconds, retries = (2, 1, 0) if options.quick else (3, 3, 2)
    return Settings(
        cores=Cores.of_this_machine(),
        rounds=options.rounds or rounds,
        seconds=options.seconds or seconds,
        retries=retries,
        quick=options.quick,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    settings = settings_of(options)
    find_wrk()
    names = options.subject or (subjects.QUICK if options.quick else subjects.NAMES)
    chosen, left_out = subjects.chosen(names, peers.Peers(options.peers, offline=options.offline))
    for name, reason in left_out.items():
        print(f"{name} is left out: {reason}")
    processes.prepare(settings.cores)
    if settings.cores.proxy == settings.cores.load:
        print("one core only: whatever a clock measures means nothing here")
    run, began = Run(chosen, settings, report.show), time.monotonic()
    about = report.About.of_now(settings.rounds, settings.seconds, left_out)
    whole = report.Report(about, run.results)
    try:
        for name in options.scenario or (scenarios.QUICK if options.quick else SCENARIOS):
            SCENARIOS[name](run)
    finally:
        # Also of a run that was ended early.
        if options.json:
            options.json.write_bytes(msgspec.json.format(msgspec.json.encode(whole)))
    print(f"\n{time.monotonic() - began:.0f} s")
    if options.markdown:
        print("\n" + report.markdown(whole))
    return _failures(run.results)


def _failures(results: Results) -> int:
    failed = [
        f"{part}: {name}" for part, rows in results.items() for name in rows if rows[name].failed
    ]
    if failed:
        print("FAILED: " + "; ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
