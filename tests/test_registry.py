from __future__ import annotations

import pytest

from epd_proxy import Config, Instance, Role
from epd_proxy.registry import Lease, Registry


def test_a_fleet_is_its_roles() -> None:
    registry = Registry.of(Config(encode="http://e=2", decode="http://d1,http://d2"))
    assert [one.url for one in registry.ready(Role.DECODE)] == ["http://d1", "http://d2"]
    assert repr(registry.ready(Role.ENCODE)[0]) == "<Instance encode http://e weight=2 load=0>"
    assert registry.ready(Role.PREFILL) == ()
    assert [registry.is_configured(role) for role in Role] == [True, False, True]


def test_removing_swaps_the_tuple_and_keeps_the_role_configured() -> None:
    registry = Registry.of(Config(decode="http://d1,http://d2"))
    before = registry.ready(Role.DECODE)
    registry.remove(before[0])
    assert registry.ready(Role.DECODE) == before[1:]
    assert len(before) == 2
    registry.remove(before[1])
    assert registry.is_configured(Role.DECODE)


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
        lease.take(first)
        lease.move(second)
        assert (first.load, second.load) == (0, 2)
        lease.move(second)
        lease.move(first)
        assert (first.load, second.load) == (2, 0)
        lease.move(second)
        lease.give_back()
        assert (first.load, second.load) == (0, 0)
    assert (first.load, second.load) == (0, 0)
