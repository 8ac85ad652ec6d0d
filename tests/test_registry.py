"""
Who declares which instances, who of them is ready, and what is known of them through all changes.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from epd_proxy import Config, Instance, Role
from epd_proxy.registry import (
    API,
    FLAGS,
    FleetConflict,
    Kind,
    Lease,
    Registry,
    Replica,
    Spec,
    specs_of,
)
from tests.fake_time import LEAPING, leaping

D1, D2, D3 = (Spec(Kind.PREFILL_DECODE, f"http://d{n}:8000") for n in (1, 2, 3))
E1, E2 = (Spec(Kind.ENCODE, f"http://e{n}:8000") for n in (1, 2))
P1 = Spec(Kind.PREFILL, "http://p1:8000")
SPLIT = Spec(Kind.DECODE, "http://split:8000")


@pytest.fixture
def anyio_backend() -> Any:
    return LEAPING


@pytest.fixture
def in_fake_time(monkeypatch: pytest.MonkeyPatch) -> None:
    leaping(monkeypatch)


def urls(registry: Registry, role: Role = Role.DECODE, model: str = "") -> list[str]:
    return [one.url for one in registry.ready(role, model)]


def found(registry: Registry, spec: Spec) -> Instance:
    instance = registry.find(spec.url)
    assert instance is not None
    return instance


def serving(spec: Spec, *models: str) -> Spec:
    return Spec(spec.role, spec.url, models=models)


# What is said of an instance


def test_a_fleet_is_its_roles() -> None:
    registry = Registry.of(Config(encode="http://e=2", decode="http://d1,http://d2"))
    assert urls(registry) == ["http://d1", "http://d2"]
    assert repr(registry.ready(Role.ENCODE)[0]) == "<Instance encode http://e weight=2 load=0>"
    assert registry.ready(Role.PREFILL) == ()
    assert [registry.is_configured(role) for role in Role] == [True, False, True]


def test_the_configuration_says_all_of_its_instances() -> None:
    config = Config(
        encode=[{"url": "http://e", "models": ["m"], "labels": {"zone": "a"}}],
        decode="http://a=2,http://b",
        ec_consumer_zmq_addrs=("tcp://a:0", "tcp://a:1", "tcp://b:0", "tcp://b:1"),
        ec_consumer_dp_size=2,
    )
    assert specs_of(config) == [
        Spec(Kind.ENCODE, "http://e", models=("m",), labels={"zone": "a"}),
        Spec(Kind.PREFILL_DECODE, "http://a", 2.0, 2, ("tcp://a:0", "tcp://a:1")),
        Spec(Kind.PREFILL_DECODE, "http://b", 1.0, 2, ("tcp://b:0", "tcp://b:1")),
    ]


def test_decode_servers_beside_prefill_servers_do_not_prefill() -> None:
    split = specs_of(Config(prefill="http://p", decode="http://d"))
    assert [spec.role for spec in split] == [Kind.PREFILL, Kind.DECODE]


def test_what_is_declared_by_names_comes_later() -> None:
    registry = Registry.of(Config(decode="dns+http://decode:8000,http://d"))
    assert urls(registry) == ["http://d"]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"url": "d:8000"}, "must start with http://"),
        ({"weight": 0}, "weight 0 is not above 0"),
        ({"weight": -1}, "weight -1 is not above 0"),
        ({"weight": float("inf")}, "or not finite"),
        ({"weight": float("nan")}, "or not finite"),
        ({"dp_size": 0}, "dp_size 0 is below 1"),
        ({"ec_zmq_addrs": ("tcp://a", "tcp://b")}, "2 ec_zmq_addrs for 1 replicas"),
        ({"dp_size": 2, "ec_zmq_addrs": ("tcp://a",)}, "1 ec_zmq_addrs for 2 replicas"),
    ],
)
def test_what_no_instance_can_be_like_is_refused(said: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Spec(**{"role": Kind.PREFILL_DECODE, "url": "http://d", **said})


@pytest.mark.parametrize(
    "url", ["http://d", "HTTP://d/", "http://D:80", "http://d:80//"], ids=lambda url: url
)
def test_one_instance_has_one_spelling(url: str) -> None:
    registry = Registry([Spec(Kind.ENCODE, "http://d")])
    (instance,) = registry.instances()
    assert not registry.register(FLAGS, Spec(Kind.ENCODE, url, weight=3))
    assert registry.instances() == [instance]
    assert (instance.url, instance.weight) == ("http://d", 3)


def test_an_address_of_ipv6_has_one_spelling_too() -> None:
    registry = Registry([Spec(Kind.ENCODE, "http://[::1]:8000")])
    assert not registry.register(FLAGS, Spec(Kind.ENCODE, "http://[0:0:0:0:0:0:0:1]:8000"))


@pytest.mark.parametrize("kind", Kind)
def test_a_kind_is_a_role_and_says_whether_it_prefills(kind: Kind) -> None:
    instance = Instance.of(Spec(kind, "http://one"))
    assert instance.kind is kind
    assert instance.role.value == kind.value.removeprefix("prefill_")


def test_replicas_take_turns_from_one_on() -> None:
    addresses = ("tcp://0", "tcp://1", "tcp://2")
    one = Instance.of(Spec(Kind.PREFILL_DECODE, "http://d", dp_size=3, ec_zmq_addrs=addresses))
    turns = [one.next_replica() for _ in range(6)]
    assert turns[:3] == turns[3:]
    assert sorted(turns[:3]) == [Replica(n, f"tcp://{n}") for n in range(3)]


def test_a_single_replica_has_no_rank() -> None:
    one = Instance.of(Spec(Kind.PREFILL_DECODE, "http://d", ec_zmq_addrs=("tcp://0",)))
    assert one.next_replica() == Replica(None, "tcp://0")
    assert Instance(Role.DECODE, "http://d").next_replica() == Replica(None, None)


# Who comes and goes


def test_removing_swaps_the_tuple_and_keeps_the_role_configured() -> None:
    registry = Registry.of(Config(decode="http://d1,http://d2"))
    before = registry.ready(Role.DECODE)
    registry.remove(before[0])
    assert registry.ready(Role.DECODE) == before[1:]
    assert len(before) == 2
    registry.remove(before[1])
    assert registry.is_configured(Role.DECODE)


def test_a_source_that_speaks_again_replaces_what_it_said_and_nothing_else() -> None:
    registry = Registry([D1, E1])
    registry.sync("file", [D2])
    registry.sync("file", [D3, E2])
    assert urls(registry) == [D1.url, D3.url]
    assert urls(registry, Role.ENCODE) == [E1.url, E2.url]
    registry.sync("file", [])
    assert [one.url for one in registry.instances()] == [D1.url, E1.url]


def test_whoever_stays_is_the_same_object_with_the_health_and_load_it_had() -> None:
    registry = Registry([D1, D2], fail_threshold=1)
    first, second = registry.instances()
    lease = Lease()
    lease.take(first)
    registry.health[Role.DECODE].probed(first, False)
    registry.sync(FLAGS, [Spec(D1.role, D1.url, weight=7), D2, D3])
    assert registry.instances()[:2] == [first, second]
    assert (first.weight, first.load) == (7, 1)
    assert urls(registry) == [D2.url, D3.url]


def test_registering_says_whether_the_instance_is_new() -> None:
    registry = Registry([D1])
    assert not registry.register(API, D1)
    assert registry.register(API, D2)
    assert not registry.register(API, D2)
    assert urls(registry) == [D1.url, D2.url]


def test_registering_again_changes_what_is_said_and_leaves_the_turns_of_replicas_alone() -> None:
    registry = Registry()
    spec = Spec(Kind.PREFILL_DECODE, "http://d", dp_size=50)
    registry.register(API, spec)
    turns = set()
    for _ in range(50):
        registry.register(API, Spec(Kind.PREFILL_DECODE, "http://d", dp_size=50))
        turns.add(found(registry, spec).next_replica().rank)
    assert turns == set(range(50))
    registry.register(API, Spec(Kind.PREFILL_DECODE, "http://d", labels={"zone": "b"}))
    assert found(registry, spec).labels == {"zone": "b"}
    assert found(registry, spec).next_replica() == Replica(None, None)


def test_deregistering_says_whether_it_was_there() -> None:
    registry = Registry()
    registry.register(API, D1)
    instance = found(registry, D1)
    assert registry.deregister(API, D1.url)
    assert not registry.deregister(API, D1.url)
    assert registry.find(D1.url) is None
    assert instance.is_gone()
    assert urls(registry) == []


def test_an_instance_of_another_source_cannot_be_deregistered() -> None:
    registry = Registry([D1])
    registry.register(API, D1)
    registry.sync("dns", [D1])
    for check in (registry.check_out, registry.deregister):
        with pytest.raises(FleetConflict, match="is declared by dns, flags"):
            check(API, D1.url)
    assert urls(registry) == [D1.url]
    registry.check_out(API, "http://nobody")


def test_of_several_who_declare_one_instance_the_first_has_the_say() -> None:
    registry = Registry([Spec(D1.role, D1.url, weight=1)])
    registry.sync("file", [Spec(D1.role, D1.url, weight=2)])
    registry.sync("dns", [Spec(D1.role, D1.url, weight=3)])
    instance = found(registry, D1)
    assert instance.weight == 1
    registry.sync("file", [Spec(D1.role, D1.url, weight=20)])
    assert instance.weight == 1
    registry.sync(FLAGS, [])
    assert instance.weight == 20
    registry.sync("dns", [])
    assert instance.weight == 20
    registry.sync("file", [])
    assert registry.instances() == []
    assert instance.is_removed


def test_only_who_came_by_registering_alone_is_registered() -> None:
    registry = Registry([D1])
    registry.register(API, D1)
    registry.register(API, D2)
    assert not registry.is_registered(found(registry, D1))
    assert registry.is_registered(found(registry, D2))
    registry.sync(FLAGS, [])
    assert registry.is_registered(found(registry, D1))


def test_whoever_is_removed_goes_whoever_declared_it() -> None:
    registry = Registry([D1, D2])
    registry.register(API, D1)
    registry.remove(found(registry, D1))
    assert registry.find(D1.url) is None
    assert urls(registry) == [D2.url]


def test_watchers_hear_of_each_change_once_and_see_it_done() -> None:
    registry = Registry()
    heard: list[list[str]] = []
    registry.watchers.append(lambda: heard.append(urls(registry)))
    registry.register(API, D1)
    registry.sync(API, [D1, D2])
    registry.remove(found(registry, D1))
    registry.deregister(API, D2.url)
    assert heard == [[D1.url], [D1.url, D2.url], [D2.url], []]


# What cannot be together


@pytest.mark.parametrize("other", [P1, SPLIT])
def test_a_decode_server_that_prefills_cannot_be_beside_split_ones(other: Spec) -> None:
    for first, second in ((D1, other), (other, D1)):
        registry = Registry([first, E1])
        for say in (registry.register, registry.check):
            with pytest.raises(FleetConflict, match="cannot be mixed"):
                say(API, second)
        with pytest.raises(FleetConflict, match="cannot be mixed"):
            registry.sync(FLAGS, [first, second])
        assert [one.url for one in registry.instances()] == [first.url, E1.url]


def test_one_that_is_out_counts_where_kinds_are_mixed() -> None:
    registry = Registry([D1], fail_threshold=1)
    registry.health[Role.DECODE].probed(found(registry, D1), False)
    assert urls(registry) == []
    with pytest.raises(FleetConflict):
        registry.register(API, P1)


def test_a_source_may_go_from_whole_to_split_in_one_word() -> None:
    registry = Registry([D1, E1])
    registry.sync(FLAGS, [P1, SPLIT, E1])
    assert [one.url for one in registry.instances()] == [E1.url, P1.url, SPLIT.url]


@pytest.mark.parametrize("kind", [Kind.ENCODE, Kind.PREFILL, Kind.DECODE])
def test_an_instance_is_of_one_kind_whoever_says_so(kind: Kind) -> None:
    registry = Registry([D1])
    with pytest.raises(FleetConflict, match="is there already, as prefill_decode"):
        registry.register(API, Spec(kind, D1.url))
    assert found(registry, D1).kind is Kind.PREFILL_DECODE
    with pytest.raises(FleetConflict):
        registry.sync("file", [E1, Spec(kind, "http://D1:8000/")])
    assert registry.find(E1.url) is None


def test_whoever_registered_keeps_its_kind() -> None:
    registry = Registry()
    registry.register(API, E1)
    with pytest.raises(FleetConflict, match="is there already, as encode"):
        registry.check(API, Spec(Kind.PREFILL, E1.url))


def test_a_refused_word_changes_nothing() -> None:
    registry = Registry([D1, D2])
    heard: list[None] = []
    registry.watchers.append(lambda: heard.append(None))
    before = registry.ready(Role.DECODE)
    with pytest.raises(FleetConflict):
        registry.sync("file", [D3, E1, P1])
    assert registry.ready(Role.DECODE) is before
    assert len(registry.instances()) == 2
    assert heard == []


def test_a_file_may_give_an_instance_another_role() -> None:
    registry = Registry([D1, E1], fail_threshold=1)
    moving = found(registry, E1)
    registry.health[Role.ENCODE].probed(moving, False)
    registry.sync(FLAGS, [Spec(Kind.PREFILL_DECODE, E1.url), D1])
    assert found(registry, E1) is moving
    assert moving.role is Role.DECODE
    # What was known of it in another role says nothing of this one.
    assert sorted(urls(registry)) == [D1.url, E1.url]
    assert urls(registry, Role.ENCODE) == []


def test_where_the_first_who_declared_a_role_withdraws_the_next_has_the_say() -> None:
    registry = Registry([D1, Spec(Kind.ENCODE, E1.url, models=("a",))])
    registry.sync("file", [Spec(Kind.ENCODE, E1.url, models=("b",))])
    instance = found(registry, E1)
    registry.sync(FLAGS, [D1])
    assert found(registry, E1) is instance
    assert instance.models == ("b",)


# Tuples


def test_a_ready_tuple_is_swapped_and_never_edited() -> None:
    registry = Registry([D1, D2])
    held = registry.ready(Role.DECODE)
    contents = list(held)
    registry.register(API, D3)
    registry.drain(API, {D1.url})
    assert list(held) == contents
    assert urls(registry) == [D2.url, D3.url]
    assert registry.ready(Role.DECODE) is not held


def test_where_nothing_changed_the_tuple_is_the_same() -> None:
    registry = Registry([D1, D2, E1])
    held = registry.ready(Role.DECODE)
    registry.sync(FLAGS, [D1, D2, E1])
    registry.register(API, D1)
    registry.register(API, E2)
    registry.drain(API, {E1.url})
    registry.refresh()
    assert registry.ready(Role.DECODE) is held


# Draining


def test_whoever_drains_gets_nothing_new_and_stays_known() -> None:
    registry = Registry([D1, D2])
    instance = found(registry, D1)
    assert registry.draining(API) == frozenset()
    registry.drain(API, {D1.url})
    assert registry.draining(API) == {D1.url}
    assert urls(registry) == [D2.url]
    assert registry.state(instance) == "draining"
    assert registry.find(D1.url) is instance
    assert not instance.is_gone()
    registry.drain(API, set())
    assert urls(registry) == [D1.url, D2.url]
    assert registry.state(instance) == "live"


def test_whoever_two_sources_drain_drains_until_both_have_ended_it() -> None:
    registry = Registry([D1])
    registry.drain(API, {D1.url})
    registry.drain("other", {D1.url})
    registry.drain(API, set())
    assert urls(registry) == []
    registry.drain("other", set())
    assert urls(registry) == [D1.url]


def test_enabled_is_one_thing_and_healthy_another() -> None:
    registry = Registry([D1, D2], fail_threshold=1)
    instance = found(registry, D1)
    health = registry.health[Role.DECODE]
    registry.drain(API, {D1.url})
    health.probed(instance, False)
    health.probed(instance, True)
    assert urls(registry) == [D2.url]
    health.probed(instance, False)
    registry.drain(API, set())
    assert (urls(registry), registry.state(instance)) == ([D2.url], "evicted")
    registry.register(API, D1)
    assert urls(registry) == [D2.url]
    health.probed(instance, True)
    assert urls(registry) == [D1.url, D2.url]


def test_where_the_last_drains_nobody_is_ready() -> None:
    registry = Registry([D1])
    registry.drain(API, {D1.url})
    assert registry.ready(Role.DECODE) == ()
    assert registry.is_configured(Role.DECODE)


@pytest.mark.parametrize("way", ["deregister", "remove", "sync"])
def test_whoever_is_registered_anew_is_live_though_it_drained_before_it_went(way: str) -> None:
    registry = Registry([D2])
    registry.register(API, D1)
    registry.drain(API, {D1.url})
    if way == "deregister":
        registry.deregister(API, D1.url)
    elif way == "remove":
        registry.remove(found(registry, D1))
    else:
        registry.sync(API, [])
    assert registry.register(API, D1)
    assert sorted(urls(registry)) == [D1.url, D2.url]


# Models


def test_a_call_goes_to_those_that_serve_its_model() -> None:
    registry = Registry([serving(D1, "a"), serving(D2, "a", "b"), serving(D3, "b")])
    assert urls(registry, model="a") == [D1.url, D2.url]
    assert urls(registry, model="b") == [D2.url, D3.url]
    assert urls(registry) == [D1.url, D2.url, D3.url]
    assert registry.serves("a")
    assert registry.serves("b")


def test_a_model_that_nobody_serves_is_unknown() -> None:
    registry = Registry([serving(D1, "a")])
    assert not registry.serves("b")
    assert registry.ready(Role.DECODE, "b") == ()


def test_whoever_declares_no_models_serves_them_all() -> None:
    registry = Registry([serving(D1, "a"), D2, serving(E1, "a")])
    assert urls(registry, model="a") == [D1.url, D2.url]
    assert urls(registry, model="b") == [D2.url]
    assert registry.serves("b")
    assert urls(registry, Role.ENCODE, "b") == []


def test_where_none_declares_models_everything_goes_everywhere() -> None:
    registry = Registry([D1, D2])
    assert registry.ready(Role.DECODE, "a") is registry.ready(Role.DECODE)
    assert registry.serves("a")


def test_a_model_is_not_unknown_because_its_server_is_out_or_drains_or_is_yet_to_come() -> None:
    registry = Registry([serving(D1, "a"), serving(D2, "b")], fail_threshold=1)
    registry.health[Role.DECODE].probed(found(registry, D1), False)
    registry.drain(API, {D2.url})
    assert registry.serves("a")
    assert registry.serves("b")
    assert urls(registry, model="a") == urls(registry, model="b") == []
    assert Registry(is_open=True).serves("a")


def test_who_names_no_model_is_served_by_all() -> None:
    registry = Registry([serving(D1, "a"), serving(D2, "b")])
    assert registry.serves("")
    assert urls(registry, model="") == [D1.url, D2.url]


def test_those_of_a_model_change_with_the_fleet_and_its_health() -> None:
    registry = Registry([serving(D1, "a"), serving(D2, "a")], fail_threshold=1)
    held = registry.ready(Role.DECODE, "a")
    assert registry.ready(Role.DECODE, "a") is held
    registry.health[Role.DECODE].probed(found(registry, D1), False)
    assert urls(registry, model="a") == [D2.url]
    registry.register(API, serving(D3, "a"))
    assert urls(registry, model="a") == [D2.url, D3.url]
    registry.register(API, serving(D3, "b"))
    assert urls(registry, model="a") == [D2.url]
    registry.sync(FLAGS, [])
    registry.sync(API, [D1])
    assert registry.ready(Role.DECODE, "a") is registry.ready(Role.DECODE)


def test_the_last_of_a_model_is_tried_though_it_refused_a_connection() -> None:
    registry = Registry([serving(D1, "a"), serving(D2, "b")])
    registry.health[Role.DECODE].refused(found(registry, D1))
    assert urls(registry) == [D2.url]
    assert urls(registry, model="a") == [D1.url]


def test_names_of_models_that_callers_invent_do_not_fill_the_memory() -> None:
    registry = Registry([serving(D1, "a"), D2])
    gc.collect()
    for number in range(3000):
        registry.ready(Role.DECODE, f"m{number}")
    assert len(registry._by_model) <= 1000
    assert urls(registry, model="a") == [D1.url, D2.url]


# What is configured


@pytest.mark.parametrize(
    ("fleet", "is_open", "configured"),
    [
        ([], False, [False, False, True]),
        ([D1], False, [False, False, True]),
        ([D1, E1], False, [True, False, True]),
        ([P1, SPLIT], False, [False, True, True]),
        # A decode server that does not prefill for itself needs one.
        ([SPLIT], False, [False, True, True]),
        ([], True, [True, False, True]),
        ([D1], True, [True, False, True]),
        ([SPLIT], True, [True, True, True]),
        ([P1], True, [True, True, True]),
    ],
)
def test_a_role_is_part_of_a_fleet_by_who_is_in_it_and_who_may_come(
    fleet: list[Spec], is_open: bool, configured: list[bool]
) -> None:
    registry = Registry(fleet, is_open=is_open)
    assert [registry.is_configured(role) for role in Role] == configured


def test_a_role_whose_last_was_taken_out_by_hand_is_missing_and_one_withdrawn_is_not() -> None:
    registry = Registry([D1, E1])
    registry.remove(found(registry, E1))
    assert registry.is_configured(Role.ENCODE)
    registry.sync(FLAGS, [D1])
    assert not registry.is_configured(Role.ENCODE)
    registry.sync(FLAGS, [D1, E1])
    assert registry.is_configured(Role.ENCODE)
    registry.sync(FLAGS, [D1])
    assert not registry.is_configured(Role.ENCODE)


def test_a_role_that_is_a_name_yet_to_be_looked_up_is_configured() -> None:
    registry = Registry.of(Config(encode="dns+http://encode:8000", decode="http://d"))
    assert registry.ready(Role.ENCODE) == ()
    assert registry.is_configured(Role.ENCODE)
    assert not registry.is_configured(Role.PREFILL)
    registry.expect([D1])
    assert not registry.is_configured(Role.ENCODE)


# Waiting


async def test_whoever_waits_hears_of_any_change() -> None:
    registry = Registry([D1, D2], fail_threshold=1)
    first = found(registry, D1)
    for change in (
        lambda: registry.register(API, D3),
        lambda: registry.health[Role.DECODE].probed(first, False),
        lambda: registry.drain(API, {D2.url}),
        lambda: registry.deregister(API, D3.url),
    ):
        waiting = [asyncio.create_task(registry.changed()) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        change()
        # Twice before anybody could hear is once.
        registry.refresh()
        await asyncio.gather(*waiting)
    assert registry._waiting == []


async def test_whoever_gives_up_waiting_leaves_nothing_behind() -> None:
    registry = Registry([D1])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await registry.changed()
    assert registry._waiting == []
    registry.register(API, D2)


@pytest.mark.usefixtures("in_fake_time")
async def test_whoever_refused_a_connection_returns_after_five_seconds_by_itself() -> None:
    registry = Registry([D1, D2])
    health = registry.health[Role.DECODE]
    health.refused(found(registry, D1))
    assert urls(registry) == [D2.url]
    assert registry.state(found(registry, D1)) == "evicted"
    await asyncio.sleep(2)
    health.refused(found(registry, D1))
    await asyncio.sleep(4.9)
    assert urls(registry) == [D2.url]
    await asyncio.wait_for(registry.changed(), 0.2)
    assert urls(registry) == [D1.url, D2.url]
    assert registry._timers == {}


@pytest.mark.usefixtures("in_fake_time")
async def test_whoever_was_ejected_returns_after_five_seconds_by_itself() -> None:
    registry = Registry([D1, D2])
    health = registry.health[Role.DECODE]
    for _ in range(20):
        health.failed(found(registry, D1))
    assert urls(registry) == [D2.url]
    await asyncio.sleep(4.9)
    assert urls(registry) == [D2.url]
    await asyncio.sleep(0.2)
    assert urls(registry) == [D1.url, D2.url]


@pytest.mark.usefixtures("in_fake_time")
async def test_each_role_has_a_timer_of_its_own_and_the_first_return_is_not_the_last() -> None:
    registry = Registry([D1, D2, D3, E1, E2])
    registry.health[Role.DECODE].refused(found(registry, D1))
    registry.health[Role.ENCODE].refused(found(registry, E1))
    await asyncio.sleep(3)
    registry.health[Role.DECODE].refused(found(registry, D2))
    assert len(registry._timers) == 2
    await asyncio.sleep(2.1)
    assert urls(registry, Role.ENCODE) == [E1.url, E2.url]
    assert urls(registry) == [D1.url, D3.url]
    await asyncio.sleep(3)
    assert urls(registry) == [D1.url, D2.url, D3.url]


@pytest.mark.usefixtures("in_fake_time")
async def test_a_registry_that_is_closed_has_no_timer() -> None:
    registry = Registry([D1, D2])
    registry.health[Role.DECODE].refused(found(registry, D1))
    registry.close()
    await asyncio.sleep(6)
    assert urls(registry) == [D2.url]
    # Whoever watches next has a look.
    registry.refresh()
    assert urls(registry) == [D1.url, D2.url]


def test_outside_of_a_loop_nobody_returns_by_itself_and_that_is_no_error() -> None:
    registry = Registry([D1, D2])
    registry.health[Role.DECODE].refused(found(registry, D1))
    registry.refresh()
    assert urls(registry) == [D2.url]
    assert registry._timers == {}


# Those that register for a time


async def test_whoever_registered_for_a_time_is_forgotten_when_it_has_passed() -> None:
    registry = Registry()
    for spec, ttl in ((D1, 10.0), (D2, 20.0), (D3, None)):
        registry.register(API, spec)
        registry.expire(spec.url, ttl)
    gone = found(registry, D1)
    await asyncio.sleep(9.9)
    assert urls(registry) == [D1.url, D2.url, D3.url]
    await asyncio.wait_for(registry.changed(), 0.2)
    assert urls(registry) == [D2.url, D3.url]
    assert gone.is_gone()
    await asyncio.sleep(10)
    assert urls(registry) == [D3.url]
    await asyncio.sleep(1e6)
    assert urls(registry) == [D3.url]


async def test_the_time_begins_anew_with_each_word_and_may_be_taken_back() -> None:
    registry = Registry()
    registry.register(API, D1)
    for _ in range(5):
        registry.expire(D1.url, 10)
        await asyncio.sleep(9)
    assert urls(registry) == [D1.url]
    registry.expire(D1.url, None)
    await asyncio.sleep(1e6)
    assert urls(registry) == [D1.url]


async def test_what_others_declare_as_well_stays_when_the_time_has_passed() -> None:
    registry = Registry([Spec(D1.role, D1.url, weight=2)])
    registry.register(API, D1)
    registry.expire(D1.url, 10)
    await asyncio.sleep(11)
    assert urls(registry) == [D1.url]
    assert registry.deregister(FLAGS, D1.url)


async def test_whoever_went_before_its_time_and_came_back_for_good_stays() -> None:
    registry = Registry()
    registry.register(API, D1)
    registry.expire(D1.url, 10)
    registry.deregister(API, D1.url)
    registry.register(API, D1)
    await asyncio.sleep(11)
    assert urls(registry) == [D1.url]


async def test_time_goes_on_while_nobody_watches_and_tells_when_somebody_does() -> None:
    registry = Registry()
    registry.register(API, D1)
    registry.expire(D1.url, 10)
    registry.close()
    await asyncio.sleep(11)
    assert urls(registry) == [D1.url]
    registry.refresh()
    await asyncio.sleep(0.1)
    assert urls(registry) == []


# Those that return


@pytest.mark.parametrize("way", ["deregister", "remove", "sync"])
def test_whoever_returns_while_it_is_busy_is_the_same_with_the_load_it_has(way: str) -> None:
    registry = Registry([D2])
    registry.register(API, D1)
    instance = found(registry, D1)
    with Lease() as lease:
        lease.take(instance)
        lease.take(instance)
        if way == "deregister":
            registry.deregister(API, D1.url)
        elif way == "remove":
            registry.remove(instance)
        else:
            registry.sync(API, [])
        assert instance.is_gone()
        assert registry.register(API, Spec(D1.role, D1.url, weight=4))
        assert found(registry, D1) is instance
        assert not instance.is_gone()
        assert (instance.load, instance.weight) == (2, 4)
    assert instance.load == 0


def test_whoever_returns_in_another_role_is_known_there() -> None:
    registry = Registry([D1])
    registry.register(API, E1)
    instance = found(registry, E1)
    registry.deregister(API, E1.url)
    registry.register(API, Spec(Kind.PREFILL_DECODE, E1.url))
    assert found(registry, E1) is instance
    assert urls(registry) == [D1.url, E1.url]


def test_what_was_known_of_its_health_is_not_known_of_one_that_returns() -> None:
    registry = Registry([D2], fail_threshold=1)
    registry.register(API, D1)
    instance = found(registry, D1)
    registry.health[Role.DECODE].probed(instance, False)
    registry.deregister(API, D1.url)
    # Calls that were in progress may still end, in whatever way.
    registry.health[Role.DECODE].refused(instance)
    registry.register(API, D1)
    assert found(registry, D1) is instance
    assert urls(registry) == [D2.url, D1.url]


def test_nothing_is_kept_of_those_that_do_not_return() -> None:
    registry = Registry([D1])
    for number in range(100):
        spec = Spec(Kind.ENCODE, f"http://e{number}")
        registry.register(API, spec)
        registry.deregister(API, spec.url)
    gc.collect()
    assert len(registry._gone) == 0


# Load


def test_load_is_lowered_whatever_the_end() -> None:
    instance = Instance(Role.DECODE, "http://d")

    def fail() -> None:
        with Lease() as lease:
            assert lease.take(instance) is instance
            lease.take(instance)
            assert instance.load == 2
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert instance.load == 0


def test_load_moves_with_the_work() -> None:
    first, second = Instance(Role.ENCODE, "http://a"), Instance(Role.ENCODE, "http://b")
    with Lease() as lease:
        lease.take(first)
        lease.take(first, 9)
        lease.move(second)
        assert (first.load, second.load) == (0, 10)
        lease.move(second)
        lease.move(first)
        assert (first.load, second.load) == (10, 0)
        lease.move(second)
        lease.give_back()
        assert (first.load, second.load) == (0, 0)
    assert (first.load, second.load) == (0, 0)


async def test_whoever_waits_for_an_instance_waits_until_the_last_of_its_work_has_ended() -> None:
    instance = Instance(Role.DECODE, "http://d")
    await instance.idle()
    one, other = Lease(), Lease()
    one.take(instance, 5)
    other.take(instance)
    waiting = [asyncio.create_task(instance.idle()) for _ in range(2)]
    await asyncio.sleep(0)
    one.give_back()
    await asyncio.sleep(1)
    assert not any(task.done() for task in waiting)
    other.give_back()
    async with asyncio.timeout(1):
        await asyncio.gather(*waiting)


async def test_whoever_gives_up_waiting_ends_the_wait_of_nobody_else() -> None:
    instance = Instance(Role.DECODE, "http://d")
    lease = Lease()
    lease.take(instance)
    patient = asyncio.create_task(instance.idle())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await instance.idle()
    assert not patient.done()
    lease.give_back()
    async with asyncio.timeout(1):
        await patient


async def test_work_that_begins_before_the_wait_has_ended_is_waited_for_too() -> None:
    instance = Instance(Role.DECODE, "http://d")
    first, second = Lease(), Lease()
    first.take(instance)
    waiting = asyncio.create_task(instance.idle())
    await asyncio.sleep(0)
    first.give_back()
    second.take(instance)
    await asyncio.sleep(1)
    assert not waiting.done()
    second.give_back()
    async with asyncio.timeout(1):
        await waiting
