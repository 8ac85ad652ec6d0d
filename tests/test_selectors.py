"""
Selection by arithmetic alone: no HTTP.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from epd_proxy import Config, ConfigError, EPDProxy, Instance, Random, Role, RoundRobin, Weighted
from epd_proxy.errors import NoInstance
from epd_proxy.registry import Lease, Registry
from epd_proxy.selectors import SELECTORS, Selection, Selector


def instances(count: int, weights: Sequence[float] = ()) -> tuple[Instance, ...]:
    weighted = itertools.zip_longest(range(count), weights, fillvalue=1.0)
    return tuple(Instance(Role.ENCODE, f"http://e{n:g}", weight) for n, weight in weighted)


def picks(selector: Selector, ready: tuple[Instance, ...], count: int) -> list[int]:
    return [ready.index(selector.pick(ready, None)) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("mix", [[1], [2], [3, 1], [5, 2, 1], [7, 4], [1, 1, 6]])
def test_round_robin_is_fair_over_any_mix_of_requests(count: int, mix: list[int]) -> None:
    selector, ready = RoundRobin(random.Random(1)), instances(count)
    served: Counter[int] = Counter()
    for items in itertools.islice(itertools.cycle(mix), 40):
        served.update(picks(selector, ready, items))
        shares = [served[n] for n in range(count)]
        assert max(shares) - min(shares) <= 1


def test_round_robin_goes_round_in_the_order_of_the_instances() -> None:
    order = picks(RoundRobin(random.Random(3)), instances(4), 12)
    assert [(b - a) % 4 for a, b in itertools.pairwise(order)] == [1] * 11


def test_round_robin_starts_anywhere() -> None:
    starts = {picks(RoundRobin(random.Random(n)), instances(3), 1)[0] for n in range(20)}
    assert starts == {0, 1, 2}


def test_round_robin_goes_on_where_an_instance_was_left_out() -> None:
    selector, ready = RoundRobin(random.Random(1)), instances(3)
    first = ready[picks(selector, ready, 1)[0]]
    others = tuple(one for one in ready if one is not first)
    assert {selector.pick(others, None) for _ in range(2)} == set(others)
    assert selector.pick(ready, None) is first


def test_a_newcomer_gets_its_turn_once_and_no_more() -> None:
    selector, ready = RoundRobin(random.Random(1)), instances(3)
    picks(selector, ready, 30)
    grown = (*ready, Instance(Role.ENCODE, "http://new"))
    order = picks(selector, grown, 8)
    assert order[0] == 3
    assert Counter(order) == {0: 2, 1: 2, 2: 2, 3: 2}


@pytest.mark.parametrize("make", [RoundRobin, Weighted])
def test_a_selector_forgets_instances_that_are_gone(make: Callable[[], Selector]) -> None:
    selector = make()
    for _ in range(50):
        selector.pick(instances(3), None)
    held = [value for value in vars(selector).values() if isinstance(value, dict | deque)]
    assert [len(value) for value in held] == [3]


def test_random_gives_each_instance_the_same_chance() -> None:
    counts = Counter(picks(Random(random.Random(7)), instances(3), 3000))
    assert all(900 < counts[n] < 1100 for n in range(3))


def test_weighted_gives_shares_in_proportion() -> None:
    counts = Counter(picks(Weighted(random.Random(1)), instances(3, [5, 1, 1]), 700))
    assert counts == {0: 500, 1: 100, 2: 100}


def test_weighted_spreads_a_heavy_instance_instead_of_taking_it_five_times_in_a_row() -> None:
    for seed in range(20):
        order = picks(Weighted(random.Random(seed)), instances(3, [5, 1, 1]), 70)
        runs = [len(list(group)) for _, group in itertools.groupby(order)]
        assert max(runs) < 5


def test_weighted_starts_anywhere() -> None:
    ready = instances(3, [1, 2, 3])
    starts = {tuple(picks(Weighted(random.Random(n)), ready, 6)) for n in range(40)}
    assert len(starts) > 3


def test_weighted_takes_in_a_newcomer() -> None:
    selector, ready = Weighted(random.Random(1)), instances(2)
    picks(selector, ready, 10)
    grown = (*ready, Instance(Role.ENCODE, "http://new", 2.0))
    assert Counter(picks(selector, grown, 40)) == {0: 10, 1: 10, 2: 20}


def test_the_names_that_a_config_may_say() -> None:
    assert list(SELECTORS) == ["round-robin", "random", "weighted", "least-busy", "affinity"]
    with pytest.raises(ConfigError, match=r"known are round-robin.* affinity, and module:"):
        EPDProxy(config=Config(decode="http://d", prefill_selector="fastest"))


class Last:
    """A stranger's selector."""

    def pick(self, ready: tuple[Instance, ...], key: str | None) -> Instance:
        return ready[-1]


no_selector = object
broken = None


def test_a_selector_comes_from_any_module() -> None:
    chosen = selection(Config(decode="http://a,http://b", decode_selector=f"{__name__}:Last"))
    assert [chosen.pick(Role.DECODE).url for _ in range(3)] == ["http://b"] * 3


def test_a_selector_comes_from_any_package_that_announces_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "stranger-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    points = f"[epd_proxy.selectors]\nalways-last = {__name__}:Last\n"
    (package / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    chosen = selection(Config(decode="http://a,http://b", decode_selector="always-last"))
    assert chosen.pick(Role.DECODE).url == "http://b"
    with pytest.raises(ConfigError, match="affinity, always-last"):
        selection(Config(decode="http://a", decode_selector="fastest"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no.such.module:Selector", "No module named 'no'"),
        (f"{__name__}:Missing", "no attribute 'Missing'"),
        (f"{__name__}:no_selector", "no method pick"),
        (f"{__name__}:broken", "not callable"),
        ("not a name:at all", "invalid format"),
    ],
)
def test_a_selector_that_cannot_be_loaded_stops_the_start(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        selection(Config(decode="http://d", decode_selector=name))
    assert caught.value.option == "--decode-selector"


def selection(config: Config) -> Selection:
    return Selection.of(config, Registry.of(config))


def test_each_role_has_a_selector_of_its_own() -> None:
    chosen = selection(Config(encode="http://a,http://b", decode="http://c,http://d"))
    encoders = [chosen.pick(Role.ENCODE).url for _ in range(4)]
    decoders = [chosen.pick(Role.DECODE).url for _ in range(4)]
    assert Counter(encoders) == {"http://a": 2, "http://b": 2}
    assert Counter(decoders) == {"http://c": 2, "http://d": 2}


def test_an_instance_to_avoid_is_used_only_where_there_is_no_other() -> None:
    chosen = selection(Config(decode="http://a,http://b"))
    failed, other = chosen.registry.ready(Role.DECODE)
    assert {chosen.pick(Role.DECODE, avoid=[failed]) for _ in range(4)} == {other}
    assert {chosen.pick(Role.DECODE, avoid={failed, other}) for _ in range(4)} == {failed, other}
    chosen.registry.remove(other)
    assert chosen.pick(Role.DECODE, avoid=[failed]) is failed


def test_an_instance_that_never_can_is_used_by_no_means() -> None:
    chosen = selection(Config(decode="http://a,http://b,http://c"))
    refused, failed, other = chosen.registry.ready(Role.DECODE)
    assert {chosen.pick(Role.DECODE, never=[refused]) for _ in range(4)} == {failed, other}
    assert chosen.pick(Role.DECODE, never=[refused], avoid=[failed, refused]) is other
    assert chosen.pick(Role.DECODE, never=[refused, other], avoid=[failed]) is failed
    with pytest.raises(NoInstance, match="no other decode server is ready") as caught:
        chosen.pick(Role.DECODE, never=[refused, failed, other])
    assert (caught.value.status, caught.value.stage) == (503, "decode")


def test_a_role_that_is_configured_but_not_ready_is_a_503_of_its_stage() -> None:
    chosen = selection(Config(decode="http://a"))
    chosen.registry.remove(chosen.registry.ready(Role.DECODE)[0])
    with pytest.raises(NoInstance, match="no decode server is ready") as caught:
        chosen.pick(Role.DECODE)
    assert (caught.value.status, caught.value.stage) == (503, "decode")


def test_the_readmes_selector_can_be_pasted_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    code = readme.partition("<!-- selector -->\n```python\n")[2].partition("```")[0]
    (tmp_path / "fewest.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    chosen = selection(Config(decode="http://a,http://b", decode_selector="fewest:FewestCalls"))
    with Lease() as lease:
        lease.take(chosen.registry.ready(Role.DECODE)[0])
        assert chosen.pick(Role.DECODE).url == "http://b"
