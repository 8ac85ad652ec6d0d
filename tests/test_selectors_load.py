"""
The selectors that look at load and content: by arithmetic alone, with seeds.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import uuid
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest

from epd_proxy import selectors
from epd_proxy.config import Config
from epd_proxy.registry import Instance, Lease, Registry, Role
from epd_proxy.selectors import Affinity, LeastBusy, Random, Selection, Selector

KEYS = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(4000)]
BOUND = 1.25


def fleet(count: int, weights: Sequence[float] = (), start: int = 0) -> tuple[Instance, ...]:
    weights = weights or [1.0] * count
    return tuple(
        Instance(Role.ENCODE, f"http://e{start + n}:8000", weight)
        for n, weight in enumerate(weights)
    )


def placed(
    ready: tuple[Instance, ...], keys: Iterable[str] = KEYS, selector: Selector | None = None
) -> dict[str, str]:
    """Where each key goes while nobody is busy."""
    selector = selector or Affinity()
    return {key: selector.pick(ready, key).url for key in keys}


def moved(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    return {key for key in before if before[key] != after[key]}


def is_fair(counts: Counter[str], ready: tuple[Instance, ...]) -> bool:
    """In proportion to the weights, by chi-square over its degrees of freedom: 1 on average."""
    total, weight = sum(counts.values()), sum(one.weight for one in ready)
    shares = {one.url: total * one.weight / weight for one in ready}
    deviation = sum((counts[url] - share) ** 2 / share for url, share in shares.items())
    return deviation <= 6 * (len(ready) - 1)


def peak(selector: Selector, ready: tuple[Instance, ...], rng: random.Random) -> float:
    """The largest load for its weight, of 4 calls an instance of random length, over 5000 picks."""
    running: deque[Instance] = deque()
    highest = 0.0
    for _ in range(5000):
        if len(running) == 4 * len(ready):
            running.rotate(rng.randrange(len(running)))
            running.pop().load -= 1
        instance = selector.pick(ready, None)
        instance.load += 1
        running.append(instance)
        highest = max(highest, instance.load / instance.weight)
    return highest


# least-busy


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_least_busy_gives_each_idle_instance_the_same_chance(count: int) -> None:
    selector, ready = LeastBusy(random.Random(7)), fleet(count)
    counts = Counter(selector.pick(ready, None).url for _ in range(2000 * count))
    assert is_fair(counts, ready)


def test_least_busy_takes_the_one_of_two_with_less_load_for_its_weight() -> None:
    selector, ready = LeastBusy(random.Random(1)), fleet(2, [1, 4])
    one, other = ready
    one.load, other.load = 3_000_000, 8_000_000
    assert {selector.pick(ready, None) for _ in range(20)} == {other}
    other.load = 16_000_000
    assert {selector.pick(ready, None) for _ in range(20)} == {one}
    one.load = 4_000_000
    assert {selector.pick(ready, None) for _ in range(20)} == {one, other}


def test_least_busy_never_takes_the_busiest_of_many() -> None:
    selector, ready = LeastBusy(random.Random(2)), fleet(5)
    for load, instance in enumerate(ready):
        instance.load = load
    counts = Counter(selector.pick(ready, None).load for _ in range(5000))
    # Of ten pairs, the least busy is in four, the next is the better one in three ...
    assert [round(counts[load] / 500) for load in range(5)] == [4, 3, 2, 1, 0]


@pytest.mark.parametrize("seed", range(3))
def test_least_busy_keeps_the_peak_far_below_that_of_chance(seed: int) -> None:
    by_load = peak(LeastBusy(random.Random(seed)), fleet(32), random.Random(seed))
    by_chance = peak(Random(random.Random(seed)), fleet(32), random.Random(seed))
    assert by_load <= 7 < 12 <= by_chance


# affinity: where keys go


@pytest.mark.parametrize(
    "name",
    [
        lambda n: KEYS[n],
        lambda n: f"image-{n}",
        lambda n: f"{n:064d}",
        lambda n: f"{n:x}" + "0" * 32,
        lambda n: str(uuid.UUID(int=n << 64)),
        lambda n: f"图片{n}",
    ],
    ids=["digest", "name", "number", "prefix", "uuid", "unicode"],
)
@pytest.mark.parametrize("count", [2, 8, 64])
def test_affinity_spreads_keys_evenly_whatever_they_look_like(
    count: int, name: Callable[[int], str]
) -> None:
    ready = fleet(count)
    counts = Counter(placed(ready, map(name, range(len(KEYS)))).values())
    assert is_fair(counts, ready)


@pytest.mark.parametrize("weights", [[1, 2], [5, 1, 1], [0.5, 0.25, 4, 1]])
def test_affinity_gives_keys_in_proportion_to_the_weights(weights: list[float]) -> None:
    ready = fleet(len(weights), weights)
    assert is_fair(Counter(placed(ready).values()), ready)


def test_two_proxies_agree_whatever_the_order_of_their_instances() -> None:
    assert placed(fleet(5, [1, 2, 1, 3, 1])) == placed(fleet(5, [1, 2, 1, 3, 1])[::-1])


def test_two_processes_agree() -> None:
    program = (
        "import json; from tests.test_selectors_load import KEYS, fleet, placed;"
        "print(json.dumps(placed(fleet(7), KEYS[:200] + ['a', ''])))"
    )
    answers = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    ]
    expected = placed(fleet(7), [*KEYS[:200], "a", ""])
    assert [json.loads(answer) for answer in answers] == [expected] * 2


def test_where_keys_go_is_the_same_in_every_release() -> None:
    ready = fleet(5)
    found = [ready.index(Affinity().pick(ready, key)) for key in [*KEYS[:6], "", "a.png"]]
    assert found == [4, 3, 0, 4, 3, 2, 2, 2]


@pytest.mark.parametrize(
    "key", ["", "0", "\ud800", "\0", "图片 🖼", "-7", "0x", "g" * 64, "x" * 2048]
)
def test_any_text_is_a_key(key: str) -> None:
    for ready in (fleet(1), fleet(3)):
        assert len({Affinity().pick(ready, key) for _ in range(5)} & {*ready}) == 1


# affinity: instances that come and go


@pytest.mark.parametrize("count", [2, 3, 8, 20])
@pytest.mark.parametrize("fresh", [True, False], ids=["started anew", "running"])
def test_an_instance_that_goes_moves_only_its_own_keys(count: int, fresh: bool) -> None:
    selector, ready = Affinity(), fleet(count)
    before = placed(ready, selector=selector)
    after = placed(ready[1:], selector=Affinity() if fresh else selector)
    assert moved(before, after) == {key for key in KEYS if before[key] == ready[0].url}
    heirs = Counter(after[key] for key in moved(before, after))
    assert is_fair(heirs, ready[1:])
    assert placed(ready, selector=selector) == before


@pytest.mark.parametrize("fresh", [True, False], ids=["started anew", "running"])
def test_a_newcomer_takes_its_share_and_nothing_else_moves(fresh: bool) -> None:
    selector, ready = Affinity(), fleet(4)
    before = placed(ready, selector=selector)
    grown = (*ready, *fleet(1, [2], start=4))
    after = placed(grown, selector=Affinity() if fresh else selector)
    assert {after[key] for key in moved(before, after)} == {grown[-1].url}
    assert len(moved(before, after)) / len(KEYS) == pytest.approx(2 / 6, rel=0.05)


def test_a_weight_that_changes_moves_keys_only_to_the_heavier() -> None:
    selector, ready = Affinity(), fleet(4)
    before = placed(ready, selector=selector)
    ready[2].weight = 3.0
    after = placed((*ready,), selector=selector)  # another tuple, which says that there is news
    assert {after[key] for key in moved(before, after)} == {ready[2].url}
    assert len(moved(before, after)) / len(KEYS) == pytest.approx(3 / 6 - 1 / 4, rel=0.1)


# affinity: bounded load


@pytest.mark.parametrize("weights", [[1.0] * 6, [1, 2, 3, 4]])
def test_a_hot_key_spills_over_within_the_bound(weights: list[float]) -> None:
    rng, selector, ready = random.Random(5), Affinity(), fleet(len(weights), weights)
    running: deque[tuple[Instance, int]] = deque()
    served = set()
    for _ in range(3000):
        if len(running) == 60:
            instance, size = running.popleft()
            instance.load -= size
        average = sum(one.load for one in ready) / sum(weights)
        chosen, size = selector.pick(ready, "hot"), rng.randrange(1, 5_000_000)
        chosen.load += size
        assert chosen.load <= BOUND * average * chosen.weight + size
        running.append((chosen, size))
        served.add(chosen)
    assert len(served) == len(ready) - 1  # which is room enough, so the last has its peace


def test_a_hot_key_spills_over_to_the_same_ones_everywhere() -> None:
    def order(ready: tuple[Instance, ...]) -> list[str]:
        found, selector = [], Affinity()
        for _ in range(4):
            chosen = selector.pick(ready, "hot")
            chosen.load = 1 << 40
            found.append(chosen.url)
        return found

    assert order(fleet(6)) == order(fleet(6)[::-1])
    assert len(set(order(fleet(6)))) == 4


def test_keys_stay_where_they_are_while_all_are_about_equally_busy() -> None:
    ready = fleet(8)
    idle = placed(ready)
    for load, instance in enumerate(ready):
        instance.load = 50_000_000 + load * 1_000_000
    assert placed(ready) == idle


def test_a_key_passes_over_one_that_is_too_busy_and_returns() -> None:
    selector, ready = Affinity(), fleet(4)
    first = selector.pick(ready, "a")
    first.load = 10
    second = selector.pick(ready, "a")
    assert second is not first
    for instance in ready:
        instance.load = 9
    assert selector.pick(ready, "a") is first
    assert selector.pick(tuple(one for one in ready if one is not first), "a") is second


def test_where_nobody_is_within_the_bound_the_less_busy_gets_it() -> None:
    selector, ready = Affinity(random.Random(1), bound=0.5), fleet(2)
    ready[0].load, ready[1].load = 9, 8
    assert {selector.pick(ready, key) for key in KEYS[:20]} == {ready[1]}
    ready[0].load = 0
    assert {selector.pick(ready, key) for key in KEYS[:20]} == {ready[0]}


def test_affinity_without_a_key_is_least_busy() -> None:
    ready = fleet(8)
    for load, instance in enumerate(ready):
        instance.load = load
    affinity, least_busy = Affinity(random.Random(3)), LeastBusy(random.Random(3))
    found = [affinity.pick(ready, None) for _ in range(100)]
    assert found == [least_busy.pick(ready, None) for _ in range(100)]


# affinity: what it keeps


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The rankings that were made, which is the dear part of a pick."""
    found: list[object] = []

    class Ranking(selectors._Ranking):
        def __init__(self, weights: Mapping[Instance, float], known: Mapping[str, bytes]) -> None:
            found.append(self)
            super().__init__(weights, known)

    monkeypatch.setattr(selectors, "_Ranking", Ranking)
    return found


def test_retries_and_returns_cost_no_new_ranking(made: list[object]) -> None:
    selector, ready = Affinity(), fleet(6)
    for key in KEYS[:50]:
        assert selector.pick(ready, key) in ready
        left = [one for one in ready if random.Random(key).random() < 0.6] or ready[:1]
        assert selector.pick(tuple(left), key) in left
    assert len(made) == 1


def test_fleets_of_several_models_stay_known_side_by_side(made: list[object]) -> None:
    selector, fleets = Affinity(), [fleet(3, start=3 * n) for n in range(4)]
    for key in KEYS[:50]:
        for ready in fleets:
            assert selector.pick(ready, key) in ready
    assert len(made) == 4


class Watched(Instance):
    __slots__ = ()


def test_affinity_forgets_instances_that_are_gone() -> None:
    selector, alive = Affinity(), weakref.WeakSet[Instance]()
    for number in range(60):
        ready = tuple(Watched(Role.ENCODE, f"http://{number}-{n}") for n in range(3))
        alive.update(ready)
        selector.pick(ready, "a")
    assert len(alive) == 8 * 3


def test_affinity_forgets_a_fleet_that_has_only_grown(made: list[object]) -> None:
    selector, ready = Affinity(), fleet(20)
    for count in range(1, 21):
        selector.pick(ready[:count], "a")
    made_last = made.pop()
    assert selector._rankings == [made_last]


@pytest.mark.parametrize("name", ["least-busy", "affinity"])
def test_a_config_may_say_it_for_any_role(name: str) -> None:
    config = Config(
        encode="http://a,http://b",
        decode="http://c,http://d",
        encode_selector=name,
        decode_selector=name,
    )
    selection = Selection.of(config, Registry.of(config))
    for role in (Role.ENCODE, Role.DECODE):
        taken = {Lease().take(selection.pick(role, "key" if n else None)) for n in range(2)}
        assert taken == set(selection.ready(role))
