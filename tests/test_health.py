from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_proxy.health import RoleHealth, Standing


class Clock:
    """Stands still until it is set."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Role:
    """A role as the registry keeps it: the tuple is swapped when it is told to, and ticked."""

    def __init__(self, members: str = "abc", fail_threshold: int = 3) -> None:
        self.clock = Clock()
        self.health: RoleHealth[str] = RoleHealth(fail_threshold, self.refresh, self.clock)
        self.members = members
        for one in members:
            self.health.add(one)
        self.changes = 0
        self.ready = "".join(self.health.ready(members))

    def refresh(self) -> None:
        self.changes += 1
        self.ready = "".join(self.health.ready(self.members))

    def drain(self, one: str) -> None:
        self.members = self.members.replace(one, "")
        self.refresh()

    def wait(self, seconds: float) -> None:
        """As a timer would: no tick but where one is due."""
        end = self.clock.now + seconds
        while (due := self.health.next_change()) is not None and due <= end:
            self.clock.now = due
            self.health.tick()
        self.clock.now = end

    def succeed(self, one: str, times: int = 1) -> None:
        for _ in range(times):
            self.health.succeeded(one)

    def fail(self, one: str, times: int = 1) -> None:
        for _ in range(times):
            self.health.failed(one)

    def probe(self, results: str) -> bool:
        """``a+b-``: a is well, b is not. Whether the last is healthy."""
        for one, sign in zip(results[::2], results[1::2], strict=True):
            healthy = self.health.probed(one, sign == "+")
        return healthy


# Probes


def test_a_new_instance_is_ready() -> None:
    role = Role()
    assert role.ready == "abc"
    assert role.health.standing("a") is Standing.READY
    assert role.health.next_change() is None


def test_probes_that_fail_in_a_row_make_an_instance_unhealthy_and_one_success_returns_it() -> None:
    role = Role()
    assert role.probe("a-a-a+a-a-")
    assert (role.ready, role.changes) == ("abc", 0)
    assert not role.probe("a-")
    assert (role.ready, role.changes) == ("bc", 1)
    assert role.health.standing("a") is Standing.UNHEALTHY
    assert not role.probe("a-a-a-")
    assert (role.ready, role.changes) == ("bc", 1)
    assert role.probe("a+")
    assert (role.ready, role.changes) == ("abc", 2)


def test_no_time_returns_what_probes_have_taken_out() -> None:
    role = Role(fail_threshold=1)
    role.probe("a-")
    assert role.health.next_change() is None
    role.wait(1e6)
    role.health.tick()
    assert (role.ready, role.changes) == ("bc", 1)


def test_probes_may_leave_a_role_with_nobody() -> None:
    role = Role(fail_threshold=1)
    role.probe("a-b-c-")
    assert role.ready == ""
    assert role.probe("b+")
    assert role.ready == "b"


# Connections


def test_whoever_refuses_a_connection_is_out_at_once_and_for_five_seconds() -> None:
    role = Role()
    role.health.refused("a")
    assert role.ready == "bc"
    assert role.health.standing("a") is Standing.REFUSED
    role.wait(4.9)
    assert role.ready == "bc"
    role.wait(0.1)
    assert role.ready == "abc"


def test_a_probe_that_succeeds_returns_whoever_refused_a_connection() -> None:
    role = Role()
    role.health.refused("a")
    role.probe("a-")
    assert role.ready == "bc"
    role.probe("a+")
    assert role.ready == "abc"
    assert role.health.next_change() is None


def test_the_five_seconds_begin_with_the_last_refusal() -> None:
    role = Role()
    role.health.refused("a")
    role.wait(3)
    role.health.refused("a")
    assert role.changes == 1
    role.wait(4.9)
    assert role.ready == "bc"
    role.wait(0.1)
    assert role.ready == "abc"


def test_where_all_refuse_connections_all_are_tried() -> None:
    role = Role()
    role.health.refused("a")
    role.health.refused("b")
    assert role.ready == "c"
    role.health.refused("c")
    assert role.ready == "abc"
    role.probe("b+")
    assert role.ready == "b"


# Calls


def test_whoever_fails_most_of_its_calls_while_its_peers_do_not_is_ejected_for_five_seconds() -> (
    None
):
    role = Role()
    role.succeed("b", 50)
    role.succeed("a", 9)
    role.fail("a", 10)
    assert role.ready == "abc"
    role.fail("a")
    assert role.ready == "bc"
    assert role.health.standing("a") is Standing.EJECTED
    role.wait(4.9)
    assert role.ready == "bc"
    role.wait(0.1)
    assert role.ready == "abc"


def test_fewer_than_twenty_calls_eject_nobody() -> None:
    role = Role()
    role.fail("a", 19)
    assert role.ready == "abc"
    role.fail("a")
    assert role.ready == "bc"


def test_half_of_the_calls_is_not_enough() -> None:
    role = Role()
    role.succeed("a", 50)
    role.fail("a", 50)
    assert role.ready == "abc"
    role.fail("a")
    assert role.ready == "bc"


@pytest.mark.parametrize(("failures", "ready"), [(25, "bc"), (26, "abc")])
def test_the_peers_together_must_fail_half_as_often_at_most(failures: int, ready: str) -> None:
    role = Role()
    role.succeed("b", 25)
    role.fail("b", 25)
    role.succeed("c", 50 - failures)
    role.fail("c", failures)
    role.fail("a", 20)
    assert role.ready == ready


def test_calls_count_for_ten_seconds() -> None:
    role = Role()
    role.fail("a", 19)
    role.wait(9)
    role.succeed("a", 10)
    role.wait(1)
    role.fail("a", 10)
    assert role.ready == "abc"
    role.fail("a")
    assert role.ready == "bc"


def test_calls_of_peers_count_for_ten_seconds() -> None:
    role = Role()
    role.fail("b", 19)
    role.wait(9)
    role.fail("a", 30)
    assert role.ready == "abc"
    role.wait(1)
    role.fail("a")
    assert role.ready == "bc"


def test_a_probe_that_succeeds_does_not_return_whoever_fails_its_calls() -> None:
    role = Role()
    role.fail("a", 20)
    role.probe("a+")
    assert role.ready == "bc"


def test_calls_from_before_the_ejection_say_nothing_when_they_end_during_it() -> None:
    role = Role()
    role.fail("a", 20)
    role.wait(3)
    role.fail("a")
    role.succeed("a", 3)
    role.wait(2)
    assert role.ready == "abc"
    role.fail("a")
    assert role.ready == "bc"


def test_whoever_returns_is_on_trial_and_the_first_failure_ejects_it_again() -> None:
    role = Role()
    for _ in range(3):
        role.fail("a", 20)
        assert role.ready == "bc"
        role.wait(5)
        assert role.ready == "abc"
        role.succeed("a", 2)
        role.fail("a")
        assert role.ready == "bc"
        role.wait(5)


def test_three_successes_return_it_fully_and_its_counts_start_anew() -> None:
    role = Role()
    role.fail("a", 20)
    role.wait(5)
    role.succeed("a", 3)
    role.fail("a", 19)
    assert role.ready == "abc"
    role.fail("a")
    assert role.ready == "bc"


@pytest.mark.parametrize(("failures", "ready"), [(20, "bc"), (21, "abc")])
def test_on_trial_a_failure_is_no_reason_where_the_peers_fail_most_of_their_calls(
    failures: int, ready: str
) -> None:
    role = Role()
    role.succeed("b", 20)
    role.fail("a", 20)
    role.wait(5)
    role.fail("b", failures)
    role.fail("a")
    assert role.ready == ready


def test_a_trial_has_no_end_but_its_successes() -> None:
    role = Role()
    role.fail("a", 20)
    role.wait(60)
    role.succeed("b", 70)
    role.fail("b", 30)
    role.succeed("a", 2)
    role.fail("a")
    assert role.ready == "bc"


def test_the_last_that_is_ready_is_not_ejected() -> None:
    role = Role(fail_threshold=1)
    role.probe("b-")
    role.health.refused("c")
    assert role.ready == "a"
    role.fail("a", 100)
    assert role.ready == "a"
    role.probe("c+")
    role.fail("a")
    assert role.ready == "c"


def test_whoever_gets_nothing_new_does_not_count_as_ready() -> None:
    role = Role("ab")
    role.drain("b")
    role.fail("a", 100)
    role.health.refused("a")
    assert role.ready == "a"


def test_where_one_refuses_and_the_other_fails_the_one_that_refuses_is_tried() -> None:
    role = Role("ab")
    role.fail("a", 20)
    role.health.refused("b")
    role.health.refused("a")
    assert role.ready == "b"


def test_whoever_is_ejected_is_better_than_nobody() -> None:
    role = Role("ab", fail_threshold=1)
    role.fail("a", 20)
    role.probe("b-")
    assert role.ready == "a"


def test_some_of_the_instances_have_a_best_of_their_own() -> None:
    role = Role(fail_threshold=1)
    role.health.refused("a")
    role.fail("b", 20)
    assert role.ready == "c"
    assert role.health.best_of("ab") == ("a",)
    assert role.health.best_of("b") == ("b",)
    role.probe("b-")
    assert role.health.best_of("b") == ()
    # Asking changes nothing: the last is the last of the role.
    role.fail("c", 20)
    assert role.ready == "c"


def test_an_unhealthy_one_that_is_ejected_too_stays_out_when_its_probe_succeeds() -> None:
    role = Role(fail_threshold=1)
    role.probe("a-")
    role.fail("a", 20)
    role.health.refused("a")
    assert role.changes == 1
    role.probe("a+")
    assert (role.ready, role.health.standing("a")) == ("bc", Standing.EJECTED)


# Membership and time


def test_what_is_known_of_an_instance_is_kept_when_it_is_added_again() -> None:
    role = Role(fail_threshold=1)
    role.probe("a-")
    role.health.add("a")
    assert role.health.standing("a") is Standing.UNHEALTHY


def test_calls_of_a_removed_instance_go_unheard_and_count_for_nobody() -> None:
    role = Role()
    role.fail("b", 19)
    role.drain("b")
    changes = role.changes
    role.health.remove("b")
    role.health.remove("b")
    role.fail("b")
    role.succeed("b")
    role.health.refused("b")
    assert not role.health.probed("b", True)
    assert role.changes == changes
    role.health.add("b")
    assert role.health.standing("b") is Standing.READY
    role.fail("a", 20)
    assert role.ready == "c"


def test_the_good_calls_of_a_removed_instance_make_its_peers_no_better() -> None:
    role = Role()
    role.succeed("b", 1000)
    role.drain("b")
    role.health.remove("b")
    role.succeed("c", 8)
    role.fail("c", 11)
    role.fail("a", 30)
    assert role.ready == "ac"


def test_the_next_change_is_the_first_of_the_returns() -> None:
    role = Role()
    role.health.refused("a")
    role.wait(1)
    role.fail("b", 20)
    role.health.refused("b")
    assert role.health.next_change() == 1005
    role.wait(4)
    assert role.ready == "ac"
    assert role.health.next_change() == 1006
    role.wait(1)
    assert role.ready == "abc"
    assert role.health.next_change() is None


def test_a_tick_that_comes_too_early_or_without_need_changes_nothing() -> None:
    role = Role()
    role.health.tick()
    role.health.refused("a")
    role.clock.now += 4.999
    role.health.tick()
    assert role.changes == 1
    role.clock.now += 60
    role.health.tick()
    role.health.tick()
    assert (role.ready, role.changes) == ("abc", 2)


def test_the_clock_of_the_machine_will_do() -> None:
    health: RoleHealth[str] = RoleHealth()
    health.add("a")
    health.add("b")
    health.refused("a")
    assert health.ready("ab") == ("b",)


# Laws

SIGNS: dict[str, Callable[[Role, str], object]] = {
    "refused": lambda role, one: role.health.refused(one),
    "failed": lambda role, one: role.fail(one),
    "failed often": lambda role, one: role.fail(one, 25),
    "succeeded": lambda role, one: role.succeed(one),
    "succeeded often": lambda role, one: role.succeed(one, 25),
}
PROBES: dict[str, Callable[[Role, str], object]] = {
    "well": lambda role, one: role.probe(f"{one}+"),
    "not well": lambda role, one: role.probe(f"{one}-"),
}
WAITS = [0.0, 0.3, 1.0, 5.0, 12.0]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*SIGNS, *PROBES]), st.sampled_from("abc"), st.sampled_from(WAITS)
        ),
        max_size=60,
    )
)
def test_no_sign_takes_out_the_last_and_only_probes_leave_nobody(
    events: list[tuple[str, str, float]],
) -> None:
    role = Role(fail_threshold=2)
    failed_probes = dict.fromkeys("abc", 0)
    for event, one, seconds in events:
        before = role.ready
        if event in SIGNS:
            SIGNS[event](role, one)
            assert before != one or one in role.ready
        else:
            PROBES[event](role, one)
            failed_probes[one] = 0 if event == "well" else failed_probes[one] + 1
        role.wait(seconds)
        healthy = {one for one, failed in failed_probes.items() if failed < 2}
        assert set(role.ready) <= healthy
        assert bool(role.ready) == bool(healthy)
        # Nothing was missed: whoever asks anew is told the same.
        assert role.ready == "".join(role.health.ready("abc"))


@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, 0.01, 0.2, 1.5])), max_size=150),
    st.integers(2, 5),
    st.randoms(use_true_random=False),
)
def test_where_all_fail_alike_none_is_ejected(
    rounds: list[tuple[bool, float]], size: int, rng: random.Random
) -> None:
    members = "abcde"[:size]
    role = Role(members)
    for ok, seconds in rounds:
        for one in rng.sample(members, size):
            (role.succeed if ok else role.fail)(one)
            assert role.ready == members
        role.wait(seconds)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), st.floats(0, 4)), max_size=200))
def test_the_window_holds_what_its_last_ten_seconds_hold(
    events: list[tuple[str, bool, float]],
) -> None:
    role = Role("abc")
    seen: list[tuple[str, bool, int]] = []
    for one, ok, seconds in events:
        role.wait(seconds)
        second = int(role.clock.now)
        if role.health.standing(one) is Standing.EJECTED:
            continue
        seen.append((one, ok, second))
        (role.succeed if ok else role.fail)(one)
        counted = [ok for who, ok, when in seen if who == one and when > second - 10]
        rate = counted.count(False) / len(counted)
        if not ok and len(counted) >= 20 and rate > 0.5:
            peers = [ok for who, ok, when in seen if who != one and when > second - 10]
            stands_out = rate * len(peers) >= 2 * peers.count(False)
            assert (role.health.standing(one) is Standing.EJECTED) == stands_out
            # From here on there are trials, which have tests of their own.
            if stands_out:
                break
