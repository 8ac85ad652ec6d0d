"""
What is done to the subjects. A scenario is a function; each of its parts is a table.

unary     saturated, whole answers: text and images, in E+P+D and in E+PD
burst     saturated, streams of 64 events back to back
paced     200 and 1000 streams of 20 events a second
latency   one connection, against no proxy at all
growth    bodies of 64 KB to 16 MB, 1 to 64 images
gap       text streams, while others send 10 to 50 MB
memory    one body of 100 MB
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from perf.bodies import KB, MB, STREAM, UNARY, Shape, body_of
from perf.check import check
from perf.engines import DECODED, streamed
from perf.engines import Settings as EngineSettings
from perf.fleet import Engines, Failed, Running, fleet
from perf.load import Outcome, body_file, callers, outcome_of, saturate
from perf.measure import Figures, Results, Row, Settings, interleaved, median, metered
from perf.processes import memory_bytes, reset_peak
from perf.subjects import DIRECT, FLOOR, ROUTER, Subject

_NO_PROXY = Subject(DIRECT)
_EVENTS = EngineSettings().chunks + 2
_GAP = 0.05
_QUICK_UNARY = ("text", "200 KB", "1 MB")
_SIZES = {"64 KB": 64 * KB, "256 KB": 256 * KB, "1 MB": MB, "4 MB": 4 * MB, "16 MB": 16 * MB}
_COUNTS = (1, 4, 16, 64)
_PUSHED = (10, 20, 30, 40, 50)


class Run:
    """One run of the bench: who takes part, how, and what has come out so far."""

    def __init__(
        self,
        subjects: Sequence[Subject],
        settings: Settings,
        show: Callable[[str, dict[str, Row]], None],
    ) -> None:
        self.proxies = [subject for subject in subjects if subject.name != FLOOR]
        self.everyone = list(subjects)
        self.settings = settings
        self.results: Results = {}
        self._show = show

    def add(self, part: str, rows: dict[str, Row]) -> None:
        self.results[part] = rows
        self._show(part, rows)

    @contextmanager
    def fleet(
        self, subjects: Sequence[Subject], *, prefill: bool = True
    ) -> Iterator[tuple[Engines, list[Running]]]:
        with fleet(subjects, self.settings.cores, prefill=prefill) as up:
            yield up

    def rounds(
        self,
        part: str,
        everyone: Sequence[Running],
        step: Callable[[Running], Figures],
        *,
        rounds: int | None = None,
    ) -> None:
        settings = self.settings._replace(rounds=rounds or self.settings.rounds)
        self.add(part, interleaved(everyone, step, settings))


# -- saturated -----------------------------------------------------------------------------------


def unary(run: Run) -> None:
    names = _QUICK_UNARY if run.settings.quick else tuple(UNARY)
    with run.fleet(run.everyone) as (engines, everyone):
        for name in names:
            _saturated(run, f"unary, {name}", engines, everyone, UNARY[name])
    if run.settings.quick:
        return
    with_encoders = [subject for subject in run.everyone if subject.encodes]
    with run.fleet(with_encoders, prefill=False) as (engines, everyone):
        for name in names:
            _saturated(run, f"unary E+PD, {name}", engines, everyone, UNARY[name])


def burst(run: Run) -> None:
    with run.fleet(run.proxies) as (engines, everyone):
        _saturated(run, "burst, 64 events", engines, everyone, STREAM)


def _saturated(
    run: Run, part: str, engines: Engines, everyone: Sequence[Running], shape: Shape
) -> None:
    settings, body = run.settings, body_of(shape)
    warm: set[str] = set()
    with body_file(body) as path:

        def step(one: Running) -> Figures:
            load = _Load(one, engines, shape, path, len(body), settings)
            if one.name not in warm:
                warm.add(one.name)
                load.check_and_warm_up(body)
            return metered_load(load)

        run.rounds(part, everyone, step)


class _Load:
    """wrk on one subject with one body."""

    def __init__(
        self,
        one: Running,
        engines: Engines,
        shape: Shape,
        path: Path,
        size: int,
        settings: Settings,
    ) -> None:
        self.one = one
        self.engines = engines
        self.shape = shape
        self.settings = settings
        self._path = path
        self.width = one.subject.width or _width(size)
        # wrk does not stop in the midst of a large body.
        self._seconds = max(settings.seconds, 4) if size > 3 * MB else settings.seconds

    def reset(self) -> None:
        self.engines.reset(old_reports=self.one.subject.old_reports)

    def check_and_warm_up(self, body: bytes) -> None:
        if not self.one.subject.is_bare:
            check(self.one, self.engines, self.shape)
        self.reset()
        for _ in range(10 if len(body) < 3 * MB else 2):
            self.one.post(body)

    def _saturate(self, seconds: int) -> Outcome:
        core = self.settings.cores.load
        return saturate(self.one.port, self._path, width=self.width, seconds=seconds, core=core)

    def once(self) -> Figures:
        outcome = self._saturate(self._seconds)
        if not outcome.requests:
            raise Failed("no request was answered in time")
        least = len(streamed(_EVENTS - 2) if self.shape.stream else DECODED)
        if outcome.bytes < outcome.requests * least:
            raise Failed("answers were too short")
        return {
            "requests": outcome.requests,
            "rps": outcome.requests / outcome.seconds,
            "p50": outcome.p50,
            "p99": outcome.p99,
        }


def _width(size: int) -> int:
    """As many connections as keep a proxy busy, without filling the memory of this machine."""
    return 32 if size < 600 * KB else 8 if size < 3 * MB else 2


def metered_load(load: _Load) -> Figures:
    load.reset()
    figures = metered(load.one, load.settings.cores, load.once)
    served = load.engines.report()[0]["decode"]
    done = int(figures["requests"])
    # What wrk gave up at its end was served all the same, and paid for.
    if not done <= served <= done + load.width:
        raise Failed(f"{done} answers out of {served} calls of decode")
    # Only a stream that was given up is cut short, somewhere.
    paid = (done + served) / 2 * _EVENTS if load.shape.stream else served
    figures["cpu_us"] = figures["cpu_s"] / paid * 1e6
    return figures


# -- with a clock --------------------------------------------------------------------------------


def paced(run: Run) -> None:
    quick = run.settings.quick
    chunks, ramp = (40, 0.5) if quick else (100, 1.0)
    with run.fleet(run.proxies if quick else [*run.proxies, _NO_PROXY]) as (engines, everyone):
        for count in (200,) if quick else (200, 1000):
            with body_file(body_of(STREAM)) as path:

                def step(one: Running, count: int = count, path: Path = path) -> Figures:
                    if not one.subject.is_bare:
                        check(one, engines, STREAM)
                    engines.reset(chunks=chunks, gap=_GAP)
                    options = {"port": one.port, "body": str(path), "chunks": chunks}
                    work = _watching(run, {**options, "count": count, "ramp": ramp})
                    figures = metered(one, run.settings.cores, work)
                    return _per(figures, "events")

                # 8 000 events are enough for one round.
                rounds = 1 if quick else None
                run.rounds(f"paced, {count} streams", everyone, step, rounds=rounds)


def _watching(run: Run, options: dict[str, object]) -> Callable[[], Figures]:
    def work() -> Figures:
        with callers("watch", run.settings.cores.load, **options) as watching:
            found: Figures = outcome_of(watching)
        if found["broken"]:
            raise Failed(f"{found['broken']} of {found['streams']} streams were not whole")
        return found

    return work


def _per(figures: Figures, name: str) -> Figures:
    if "cpu_s" in figures and figures[name]:
        figures["cpu_us"] = figures["cpu_s"] / figures[name] * 1e6
    return figures


def latency(run: Run) -> None:
    with run.fleet([_NO_PROXY, *run.proxies]) as (engines, everyone):
        for name in ("text", "200 KB"):
            body, direct = body_of(UNARY[name]), [0.0]
            with body_file(body) as path:

                def step(
                    one: Running,
                    name: str = name,
                    path: Path = path,
                    size: int = len(body),
                    direct: list[float] = direct,
                ) -> Figures:
                    load = _Load(one, engines, UNARY[name], path, size, run.settings)
                    load.width = 1
                    load.reset()
                    figures = metered(one, run.settings.cores, load.once)
                    if one.name == DIRECT:
                        direct[0] = figures["p50"]
                    return {**figures, "added_ms": figures["p50"] - direct[0]}

                run.rounds(f"latency, {name}", everyone, step)


def gap(run: Run) -> None:
    with ExitStack() as files, run.fleet([_NO_PROXY, *run.proxies]) as (engines, everyone):
        small = files.enter_context(body_file(body_of(STREAM)))
        large = [files.enter_context(body_file(body_of(Shape(1, n * MB)))) for n in _PUSHED]

        def step(one: Running) -> Figures:
            old = one.subject.old_reports
            engines.reset(chunks=20, gap=_GAP, old_reports=old)
            # Without a proxy it is an encoder that takes them.
            port = one.port if one.pid else int(engines.urls["encode"][0].rpartition(":")[2])
            work = _pushing_and_watching(run, one.port, port, small, large)
            return _per(metered(one, run.settings.cores, work), "pushed_mb")

        run.rounds("gap, beside 10 to 50 MB", everyone, step)


def _pushing_and_watching(
    run: Run, port: int, push_port: int, small: Path, large: Sequence[Path]
) -> Callable[[], Figures]:
    options: dict[str, object] = {"port": port, "body": str(small), "chunks": 20}
    watch = _watching(run, {**options, "count": 20, "ramp": 1.0, "seconds": 7.0})
    bodies = [str(path) for path in large]

    def work() -> Figures:
        options = {"port": push_port, "bodies": bodies, "count": 8, "seconds": 8.0}
        with callers("push", run.settings.cores.load, **options) as pushing:
            time.sleep(0.5)
            seen = watch()
            pushed = outcome_of(pushing)
        if pushed["errors"]:
            raise Failed(f"large bodies were answered {pushed['errors'][:3]}")
        return {**seen, "pushed_mb": pushed["pushed_mb"]}

    return work


# -- growth --------------------------------------------------------------------------------------


def growth(run: Run) -> None:
    sizes = {f"growth, {name}": Shape(1, size) for name, size in _SIZES.items()}
    counts = {f"growth, {n} x 64 KB": Shape(n, 64 * KB) for n in _COUNTS}
    with run.fleet(run.proxies) as (engines, everyone):
        for part, shape in {**sizes, **counts}.items():
            _saturated(run, part, engines, everyone, shape)
    rows = {one.name: Row([_slopes(run.results, one.name, sizes, counts)]) for one in run.proxies}
    run.add("growth", rows)


def _slopes(
    results: Results, name: str, sizes: dict[str, Shape], counts: dict[str, Shape]
) -> Figures:
    """What a further MB and a further image cost, and by how much that differs along the way."""
    by_size = {part: shape.size / 1e6 for part, shape in list(sizes.items())[1:]}
    by_count = {part: float(shape.images) for part, shape in list(counts.items())[1:]}
    figures: Figures = {}
    for unit, axis in (("mb", by_size), ("image", by_count)):
        costs = [median(results[part].get(name), "cpu_us") for part in axis]
        points = [(x, y) for x, y in zip(axis.values(), costs, strict=True) if y is not None]
        if len(points) < len(axis):
            continue
        steps = itertools.pairwise(points)
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in steps]
        figures[f"us_per_{unit}"] = (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
        # Of the last step against the first: 1 is straight, more is worse than linear.
        if slopes[0] > 0:
            figures[f"bend_{unit}"] = slopes[-1] / slopes[0]
    return figures


# -- memory --------------------------------------------------------------------------------------


def memory(run: Run) -> None:
    rows = {}
    body = body_of(Shape(1, 100_000_000))
    for subject in run.proxies:
        row = rows[subject.name] = Row()
        try:
            with run.fleet([subject]) as (engines, (one,)):
                engines.reset(old_reports=subject.old_reports)
                row.rounds.append(_peak(one, body))
        except Failed as exc:
            row.failed = str(exc)
    run.add("memory, a body of 100 MB", rows)


def _peak(one: Running, body: bytes) -> Figures:
    """Of a fresh process, which has had one small request."""
    assert one.pid is not None
    one.post(body_of(Shape(int(one.name != ROUTER), KB)))
    before = memory_bytes(one.pid, "VmRSS")
    reset_peak(one.pid)
    status, _ = one.post(body)
    if status != 200:
        raise Failed(f"answered with status {status}")
    peak = memory_bytes(one.pid, "VmHWM")
    time.sleep(1)
    left = memory_bytes(one.pid, "VmRSS")
    return {
        "peak_per_byte": (peak - before) / len(body),
        "peak_mb": peak / 1e6,
        "left_mb": (left - before) / 1e6,
    }


SCENARIOS: dict[str, Callable[[Run], None]] = {
    "unary": unary,
    "burst": burst,
    "paced": paced,
    "latency": latency,
    "growth": growth,
    "gap": gap,
    "memory": memory,
}
QUICK = ("unary", "burst", "paced")
