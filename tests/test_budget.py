from __future__ import annotations

import random
from itertools import count

import pytest

from epd_proxy.budget import RetryBudget, backoff


class Clock:
    """Stands still until it is set."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def note(budget: RetryBudget, requests: int) -> None:
    for _ in range(requests):
        budget.note_request()


def granted(budget: RetryBudget) -> int:
    """How many redos there are now, all of them taken."""
    return next(taken for taken in count() if not budget.may_redo())


def test_three_redos_a_second_are_granted_whatever_the_load() -> None:
    clock = Clock()
    budget = RetryBudget(clock=clock)
    for _ in range(25):
        assert granted(budget) == 3
        clock.now += 1


def test_a_fifth_of_the_requests_may_be_done_again() -> None:
    budget = RetryBudget(clock=Clock())
    note(budget, 1000)
    assert granted(budget) == 200
    note(budget, 4)
    assert granted(budget) == 0
    note(budget, 1)
    assert granted(budget) == 1


def test_requests_and_redos_count_for_ten_seconds() -> None:
    clock = Clock()
    budget = RetryBudget(floor=0, clock=clock)
    note(budget, 100)
    assert granted(budget) == 20
    clock.now += 9.9
    note(budget, 10)
    assert granted(budget) == 2
    clock.now += 0.1
    assert granted(budget) == 0
    clock.now += 9
    note(budget, 10)
    assert granted(budget) == 2


def test_after_a_pause_longer_than_the_window_nothing_counts_any_more() -> None:
    clock = Clock()
    budget = RetryBudget(clock=clock)
    note(budget, 1000)
    clock.now += 1e6
    assert granted(budget) == 3


def test_each_second_goes_away_on_its_own() -> None:
    clock = Clock()
    budget = RetryBudget(floor=0, clock=clock)
    for second in range(10):
        note(budget, 10 * (second + 1))
        clock.now += 1
    # The first second has just gone: 20 + 30 + ... + 100 are left.
    assert granted(budget) == 540 / 5


def test_the_floor_counts_against_the_share() -> None:
    budget = RetryBudget(clock=Clock())
    assert granted(budget) == 3
    note(budget, 20)
    assert granted(budget) == 1


@pytest.mark.parametrize("floor", [0, 1, 10])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("window", [0.5, 1, 3, 10])
def test_in_any_window_no_more_is_granted_than_share_or_floor(
    window: float, share: float, floor: int
) -> None:
    rng = random.Random(window * 100 + share * 10 + floor)
    clock = Clock(0.0)
    budget = RetryBudget(share, window, floor, clock)
    requests: list[int] = []
    redos: list[int] = []
    for second in range(200):
        clock.now = second + rng.random()
        requests.append(rng.choice([0, 1, 7, 50]))
        note(budget, requests[-1])
        redos.append(sum(budget.may_redo() for _ in range(rng.choice([0, 2, 200]))))
        last = slice(-max(1, int(window)), None)
        assert redos[-1] <= floor or sum(redos[last]) <= share * sum(requests[last])


def test_the_clock_of_the_machine_will_do() -> None:
    budget = RetryBudget()
    budget.note_request()
    assert budget.may_redo()


def test_the_pause_grows_up_to_a_fifth_of_a_second_and_is_never_the_same() -> None:
    rng = random.Random(3)
    pauses = {attempt: [backoff(attempt, rng) for _ in range(200)] for attempt in (1, 2, 3, 9000)}
    for attempt, most in [(1, 0.05), (2, 0.1), (3, 0.2), (9000, 0.2)]:
        assert most / 2 <= min(pauses[attempt]) < most * 0.55
        assert most * 0.95 < max(pauses[attempt]) <= most
        assert len(set(pauses[attempt])) == 200
