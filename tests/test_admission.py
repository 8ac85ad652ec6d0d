from __future__ import annotations

import asyncio
import json
import random
import selectors
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from epd_proxy.admission import Gate, Keys
from epd_proxy.errors import ConfigError, Overloaded, ProxyError, Unauthorized

# Keys


@pytest.mark.parametrize("authorization", ["", "Bearer nobody", "Basic eA==", "Bearer \xff"])
def test_without_keys_everybody_may_enter_and_nobody_is_known(authorization: str) -> None:
    assert Keys(()).owner(authorization) is None


@pytest.mark.parametrize(
    "authorization", ["Bearer two", "bearer two", "BEARER   two ", "beaReR two"]
)
def test_the_owner_is_the_key_that_was_given(authorization: str) -> None:
    assert Keys(("one", "two", "three")).owner(authorization) == "two"


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        "one",
        "Basic one",
        "Bearerone",
        "Bearer on",
        "Bearer one1",
        "Bearer ONE",
        "Bearer one two",
        "Bearer one,two",
        "Bearer \xff\x00\xe9",
        "\xff",
    ],
)
def test_whoever_gives_no_key_or_a_wrong_one_stays_outside(authorization: str) -> None:
    with pytest.raises(Unauthorized):
        Keys(("one", "two")).owner(authorization)


@pytest.mark.parametrize("key", ["cl\xe9", "\xe0", "钥匙"])
def test_a_key_beyond_ascii_is_known_by_its_utf8_bytes(key: str) -> None:
    as_received = key.encode().decode("latin-1")
    assert Keys((key,)).owner(f"Bearer {as_received}") == key


def test_a_key_from_the_environment_may_hold_any_bytes() -> None:
    assert Keys(("k\udcff",)).owner("Bearer k\xff") == "k\udcff"


def answer_to(error: ProxyError) -> tuple[dict[bytes, bytes], dict[str, object]]:
    headers, body = error.answer("r1")
    return dict(headers), json.loads(body)["error"]


def test_unauthorized_is_a_401_that_names_the_scheme_and_never_the_key() -> None:
    with pytest.raises(Unauthorized) as caught:
        Keys(("one",)).owner("Bearer guess")
    headers, error = answer_to(caught.value)
    assert headers[b"www-authenticate"] == b"Bearer"
    assert headers[b"content-type"] == b"application/json"
    assert (error["code"], error["type"]) == (401, "authentication_error")
    assert "guess" not in str(error) + caught.value.log_line()


def test_keys_of_the_file_come_beside_those_of_the_flag(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbfone\r\n# ours\r\n\r\n  two \r\n#three\nfo#ur")
    keys = Keys(("flag",), str(path))
    for key in ("flag", "one", "two", "fo#ur"):
        assert keys.owner(f"Bearer {key}") == key
    for key in ("three", "#three", "# ours", ""):
        with pytest.raises(Unauthorized):
            keys.owner(f"Bearer {key}")


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "no key"), (b"\n# none\n", "no key"), (b"\xff\n", "codec"), (None, "No such file")],
)
def test_a_file_without_keys_stops_the_start_and_lets_nobody_in(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^--api-key-file: .*{reason}"):
        Keys(("flag",), str(path))


def test_an_empty_key_stops_the_start() -> None:
    with pytest.raises(ConfigError, match=r"^--api-key: "):
        Keys(("one", ""))


# Gate


class Leaping(selectors.SelectSelector):
    """Leaps over the time in which nothing happens, and says so where nothing ever will."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits, and nothing will ever happen"
        self.now += timeout
        return super().select(0)


class LeapingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._leaping = Leaping()
        super().__init__(self._leaping)

    def time(self) -> float:
        return self._leaping.now


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": LeapingLoop}


async def entered(gate: Gate) -> None:
    """As a request enters: in line, then inside, or away."""
    turn = gate.enter()
    if turn is not None:
        try:
            await gate.wait(turn)
        except BaseException:
            gate.leave(turn)
            raise


async def in_line(gate: Gate) -> asyncio.Task[None]:
    """A task that waits at the gate."""
    task = asyncio.create_task(entered(gate))
    await asyncio.sleep(0)
    assert not task.done()
    return task


def full(limit: int, **settings: float) -> Gate:
    gate = Gate(limit, **settings)  # type: ignore[arg-type]
    for _ in range(limit):
        assert gate.enter() is None
    return gate


def test_a_gate_without_a_limit_lets_everybody_in_and_counts_them() -> None:
    gate = Gate()
    assert all(gate.enter() is None for _ in range(1000))
    assert gate.inside == 1000
    for _ in range(1000):
        gate.leave()
    assert gate.inside == 0


async def test_a_full_gate_without_a_line_turns_away_at_once() -> None:
    gate = full(2)
    with pytest.raises(Overloaded):
        await entered(gate)
    gate.leave()
    await entered(gate)
    assert (gate.inside, gate.waiting) == (2, 0)


def test_overloaded_is_a_503_that_says_when_to_come_again() -> None:
    headers, error = answer_to(Overloaded("full"))
    assert headers[b"retry-after"] == b"1"
    assert (error["code"], error["type"]) == (503, "overloaded_error")


async def test_places_go_to_those_in_line_in_the_order_of_their_coming() -> None:
    gate = full(1, max_queue=3)
    tasks = [await in_line(gate) for _ in range(3)]
    with pytest.raises(Overloaded):
        await entered(gate)
    for done in range(1, 4):
        gate.leave()
        assert gate.inside == 1
        await tasks[done - 1]
        assert [task.done() for task in tasks] == [True] * done + [False] * (3 - done)
    gate.leave()
    assert (gate.inside, gate.waiting) == (0, 0)


async def test_whoever_waits_too_long_is_turned_away() -> None:
    gate = full(1, max_queue=1, queue_timeout=30)
    with pytest.raises(Overloaded, match="within 30 s"):
        await entered(gate)
    assert asyncio.get_running_loop().time() == pytest.approx(30)
    assert (gate.inside, gate.waiting) == (1, 0)


async def test_a_place_that_comes_as_the_time_is_over_goes_to_the_next() -> None:
    loop = asyncio.get_running_loop()
    gate = full(1, max_queue=2, queue_timeout=1)
    late = await in_line(gate)
    await asyncio.sleep(0.5)
    following = await in_line(gate)
    # Within the resolution of the clock: both happen in one turn of the loop, this one first.
    loop.call_at(1 - 5e-10, gate.leave)
    with pytest.raises(Overloaded):
        await late
    await following
    assert loop.time() < 1.1
    assert (gate.inside, gate.waiting) == (1, 0)


async def test_a_cancelled_waiter_leaves_the_line() -> None:
    gate = full(1, max_queue=2)
    first, second = await in_line(gate), await in_line(gate)
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    assert (gate.inside, gate.waiting) == (1, 1)
    gate.leave()
    await second
    assert (gate.inside, gate.waiting) == (1, 0)


async def test_a_place_handed_to_a_waiter_that_is_then_cancelled_goes_to_the_next() -> None:
    gate = full(1, max_queue=2)
    first, second = await in_line(gate), await in_line(gate)
    gate.leave()
    first.cancel()
    await second
    assert first.cancelled()
    assert (gate.inside, gate.waiting) == (1, 0)


async def test_a_waiter_that_has_just_been_cancelled_is_passed_over() -> None:
    gate = full(1, max_queue=2)
    first, second = await in_line(gate), await in_line(gate)
    first.cancel()
    gate.leave()
    await second
    assert first.cancelled()
    assert (gate.inside, gate.waiting) == (1, 0)


async def test_a_place_that_everybody_in_line_has_given_up_on_is_free() -> None:
    gate = full(1, max_queue=1)
    only = await in_line(gate)
    gate.leave()
    only.cancel()
    await asyncio.wait([only])
    assert (gate.inside, gate.waiting) == (0, 0)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("limit", "queue", "patience"), [(1, 3, 0.0), (3, 50, 0.2), (5, 5, 0.05)])
async def test_the_counts_are_exact_whoever_gives_up_and_whenever(
    seed: int, limit: int, queue: int, patience: float
) -> None:
    rng = random.Random(seed)
    gate = Gate(limit, queue, patience)
    inside: set[int] = set()
    came: list[int] = []
    waited: list[int] = []

    def ticks() -> float:
        """Mostly moments that coincide with others'."""
        return rng.choice([0, 0, 0.01, 0.05, 0.1, rng.random() / 5])

    async def visit(number: int, stay: float) -> None:
        await asyncio.sleep(number // 20 / 10 + stay / 2)
        turn = gate.enter()
        if turn is not None:
            came.append(number)
            try:
                await gate.wait(turn)
            except BaseException:
                gate.leave(turn)
                raise
            waited.append(number)
        inside.add(number)
        assert len(inside) <= gate.inside <= limit
        try:
            await asyncio.sleep(stay)
        finally:
            inside.discard(number)
            gate.leave()

    loop = asyncio.get_running_loop()
    tasks = [asyncio.create_task(visit(number, ticks())) for number in range(400)]
    for number, task in enumerate(tasks):
        if rng.random() < 0.4:
            loop.call_later(number // 20 / 10 + ticks(), task.cancel)
    async with asyncio.timeout(600):
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.01)
            assert len(inside) <= gate.inside
            assert gate.waiting <= queue
    endings = Counter(
        "cancelled" if task.cancelled() else type(task.exception()).__name__ for task in tasks
    )

    assert (gate.inside, gate.waiting) == (0, 0)
    assert endings.keys() == {"cancelled", "Overloaded", "NoneType"}
    assert waited == [number for number in came if number in set(waited)]
    assert waited
    for _ in range(limit):
        assert gate.enter() is None
