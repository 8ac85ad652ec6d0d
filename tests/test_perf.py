"""The bench's own parts: that its check finds what is wrong, and that its sums are right."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perf import report, subjects
from perf.bodies import STREAM, UNARY, Shape, body_of, request_of
from perf.callers import Pushers, request_with, watch
from perf.check import check
from perf.engines import DECODED, grid_of
from perf.fleet import Engines, Failed, Running, fleet
from perf.measure import Row, Settings, interleaved, median, metered, ratio
from perf.peers import Peers
from perf.processes import Cores
from perf.subjects import DIRECT, FLOOR, OURS, Subject

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the bench reads /proc")

Up = tuple[Engines, dict[str, Running]]
TWO_IMAGES = Shape(2, 1024)


@pytest.fixture(scope="module", params=[True, False], ids=["E+P+D", "E+PD"])
def up(request: pytest.FixtureRequest) -> Iterator[Up]:
    found, _ = subjects.chosen([OURS, "epd-httpx", FLOOR], Peers(Path("nowhere"), offline=True))
    cores = Cores.of_this_machine()
    with fleet([*found, Subject(DIRECT)], cores, prefill=request.param) as (engines, everyone):
        yield engines, {one.name: one for one in everyone}


@pytest.mark.parametrize("shape", [*UNARY.values(), TWO_IMAGES, STREAM])
@pytest.mark.parametrize("name", [OURS, "epd-httpx"])
def test_our_own_proxies_pass_the_check(up: Up, name: str, shape: Shape) -> None:
    engines, running = up
    check(running[name], engines, shape)


def test_an_engine_alone_does_not_pass_the_check(up: Up) -> None:
    engines, running = up
    with pytest.raises(Failed, match=r"prefill was called 0 times|each image once"):
        check(running[DIRECT], engines, TWO_IMAGES)


def test_the_floor_calls_each_stage_once(up: Up) -> None:
    engines, running = up
    engines.reset()
    assert running[FLOOR].post(body_of(TWO_IMAGES)) == (200, DECODED)
    counts, _ = engines.report()
    assert counts == {"encode": 1, "prefill": len(engines.urls["prefill"]) // 2, "decode": 1}


async def test_a_watcher_sees_whole_streams(up: Up) -> None:
    engines, running = up
    engines.reset(chunks=5, gap=0.001)
    request = request_with(body_of(STREAM))
    found = await watch(running[OURS].port, request, count=3, chunks=5, ramp=0.01)
    assert (found["streams"], found["broken"], found["events"]) == (3, 0, 21)
    assert 0 < found["delay_p50"] <= found["delay_p99"]


async def test_a_watcher_sees_what_is_missing(up: Up) -> None:
    engines, running = up
    engines.reset(chunks=4)
    request = request_with(body_of(STREAM))
    found = await watch(running[OURS].port, request, count=2, chunks=5, ramp=0.0)
    assert found["broken"] == 2


def test_pushers_send_files(up: Up, tmp_path: Path) -> None:
    _, running = up
    body = tmp_path / "body"
    body.write_bytes(body_of(TWO_IMAGES))
    pushers = Pushers(running[OURS].port, [str(body)], seconds=0.05)
    pushers.run(2)
    assert pushers.errors == []
    assert pushers.bytes >= 2 * body.stat().st_size


def test_work_is_charged_to_who_did_it(up: Up) -> None:
    engines, running = up
    engines.reset()

    def work() -> dict[str, float]:
        for _ in range(100):
            running[OURS].post(body_of(TWO_IMAGES))
        return {}

    cores = Cores.of_this_machine()
    figures = metered(running[OURS], cores, work)
    assert figures["cpu_s"] > 0
    assert figures["peak_mb"] > 1
    assert metered(running[DIRECT], cores, work) == {}


def test_one_that_fails_is_through_and_the_others_go_on() -> None:
    everyone = [Running(Subject(name), 0) for name in ("good", "bad")]

    def step(one: Running) -> dict[str, float]:
        if one.name == "bad":
            raise Failed("it said no")
        return {"n": 1.0}

    rows = interleaved(everyone, step, Settings(Cores(0, 0), 3, 1, 0, True))
    assert rows == {"good": Row([{"n": 1.0}] * 3), "bad": Row([], "it said no")}


def test_a_noisy_measurement_is_taken_again_and_the_quietest_kept() -> None:
    noise = iter([0.4, 0.2, 0.3])

    def step(one: Running) -> dict[str, float]:
        return {"noise": next(noise)}

    rows = interleaved([Running(Subject("a"), 0)], step, Settings(Cores(0, 0), 1, 1, 2, True))
    assert rows["a"].rounds == [{"noise": 0.2}]


def test_ratios_are_medians_round_by_round() -> None:
    ours = Row([{"n": 1.0}, {"n": 4.0}, {"n": 9.0}])
    base = Row([{"n": 2.0}, {"n": 4.0}, {"n": 3.0}])
    assert median(ours, "n") == 4.0
    assert ratio(ours, base, "n") == 1.0
    assert ratio(ours, Row(failed="x"), "n") is None
    assert ratio(ours, None, "n") is None


def test_peers_that_are_not_there_are_left_out(tmp_path: Path) -> None:
    found, left_out = subjects.chosen(subjects.NAMES, Peers(tmp_path, offline=True))
    assert {subject.name for subject in found} | left_out.keys() == set(subjects.NAMES)
    assert left_out.keys() == {"vllm", "vllm-quiet", "vllm-0.29", "vllm-router"}


def test_a_command_names_each_address() -> None:
    subject = Subject("x", ("run", "{port}", "{encode}", "{decode*}"))
    urls = {"encode": [], "decode": ["http://a", "http://b"]}
    words = "run 1 none --decode http://a --decode http://b"
    assert subject.command(1, 2, urls) == words.split()


def test_bodies_are_the_same_in_every_run_and_images_differ() -> None:
    assert body_of(TWO_IMAGES) == body_of(TWO_IMAGES)
    parts = request_of(TWO_IMAGES)["messages"][1]["content"][1:]
    urls = [part["image_url"]["url"].encode() for part in parts]
    assert grid_of(urls[0]) != grid_of(urls[1])


def test_tables_come_from_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {
        OURS: Row([{"cpu_us": 50.0, "noise": 0.0}]),
        "vllm-quiet": Row([{"cpu_us": 200.0, "noise": 0.5, "rps": 3.0}]),
        "vllm-router": Row(failed="errors"),
    }
    about = report.About.of_now(1, 1, {})
    table = report.markdown(report.Report(about, {"unary, text": rows}))
    assert "| epd-proxy | 0.050 |" in table
    assert "| *epd-proxy / vLLM 0.33.0's, its logs off* | 0.25 |" in table
    assert f"Python {about.python}" in table

    report.show("unary, text", rows)
    shown = capsys.readouterr().out
    assert "3.00~" in shown
    assert "FAILED: errors" in shown


def test_engines_say_whether_they_were_asked_to_stream(up: Up) -> None:
    engines, running = up
    engines.reset(chunks=1)
    large = json.dumps({**request_of(Shape(1, 64 << 10)), "stream": True}).encode()
    assert running[DIRECT].post(large)[1].endswith(b"data: [DONE]\n\n")
    assert running[DIRECT].post(body_of(Shape(1, 64 << 10))) == (200, DECODED)
