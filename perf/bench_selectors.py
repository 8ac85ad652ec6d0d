"""
What does it cost to choose an instance?

    python -m perf.bench_selectors [-n ROUNDS] [--json]

For fleets of 2, 8 and 64 instances, microseconds of CPU for one pick of every selector that comes
with the proxy. Every instance has load, and every pick a key of 64 hex digits out of 20 000.

* ``affinity``        once it has seen the slots of the keys, which is how it runs
* ``affinity, cold``  each pick the first in its slot, as after a start or a newcomer
* ``affinity, retry`` each pick with another tuple than the last, one of them without an instance

Each round runs all one after another, and the table shows medians. Microseconds are of this
machine, at this moment; on another, compare with ``round-robin``.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from epd_proxy.registry import Instance, Role
from epd_proxy.selectors import SELECTORS, Affinity, Selector

FLEETS = (2, 8, 64)
PICKS = 1000
KEYS = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(20_000)]

Pick = tuple[Selector, tuple[Instance, ...], str]
Subject = Callable[[tuple[Instance, ...]], Iterator[Pick]]


def fleet_of(count: int) -> tuple[Instance, ...]:
    rng = random.Random(42)
    ready = tuple(Instance(Role.ENCODE, f"http://e{n}:8000") for n in range(count))
    for instance in ready:
        instance.load = rng.randrange(1, 10_000_000)
    return ready


def running(make: Callable[[], Selector]) -> Subject:
    def picks(ready: tuple[Instance, ...]) -> Iterator[Pick]:
        selector = make()
        for key in KEYS:
            selector.pick(ready, key)
        yield from ((selector, ready, key) for key in itertools.cycle(KEYS))

    return picks


def cold(ready: tuple[Instance, ...]) -> Iterator[Pick]:
    while True:
        selector = Affinity()
        selector.pick(ready, KEYS[-1])
        yield from ((selector, ready, key) for key in KEYS[:PICKS])


def retry(ready: tuple[Instance, ...]) -> Iterator[Pick]:
    tuples = itertools.cycle([ready, ready[1:]])
    for selector, _, key in running(Affinity)(ready):
        yield selector, next(tuples), key


SUBJECTS: dict[str, Subject] = {
    **{name: running(make) for name, make in SELECTORS.items()},
    "affinity, cold": cold,
    "affinity, retry": retry,
}


def timed(picks: Sequence[Pick]) -> float:
    """Microseconds of CPU for one."""
    start = time.process_time_ns()
    for selector, ready, key in picks:
        selector.pick(ready, key)
    return (time.process_time_ns() - start) / len(picks) / 1e3


def measure(count: int, rounds: int) -> dict[str, float]:
    """Medians over the rounds, by subject."""
    ready = fleet_of(count)
    sources = {name: subject(ready) for name, subject in SUBJECTS.items()}
    times: dict[str, list[float]] = {name: [] for name in SUBJECTS}
    for _ in range(rounds):
        for name, source in sources.items():
            times[name].append(timed(list(itertools.islice(source, PICKS))))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.bench_selectors")
    parser.add_argument("-n", "--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="results as JSON")
    options = parser.parse_args()
    results = {count: measure(count, options.rounds) for count in FLEETS}
    if options.json:
        print(json.dumps(results, indent=1))
        return
    print(f"Python {platform.python_version()}, microseconds of CPU for one pick")
    print(f"{'selector':<18}" + "".join(f"{count:>10}" for count in FLEETS))
    for name in SUBJECTS:
        print(f"{name:<18}" + "".join(f"{results[count][name]:>10.2f}" for count in FLEETS))


if __name__ == "__main__":
    main()
