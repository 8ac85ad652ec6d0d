from __future__ import annotations

import asyncio
import gzip
import time
import zlib
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from epd_proxy.asgi import CALLER, Caller, Exchange, Patience, local_path
from epd_proxy.errors import (
    BodyTimeout,
    BodyTooLarge,
    ProxyError,
    RequestError,
    UnsupportedEncoding,
)
from tests.backends import Backends, ask
from tests.driver import chat, http_scope

FOR_EVER = Patience(0)
SHORT = 0.05
"""Seconds of patience in tests in which it runs out."""


@pytest.mark.parametrize(
    ("path", "root_path", "local"),
    [
        ("/v1/models", "", "/v1/models"),
        ("/api/v1/models", "/api", "/v1/models"),
        ("/api/v1/models", "/api/", "/v1/models"),
        ("/v1/models", "/api", "/v1/models"),
        ("/apiv1", "/api", "/apiv1"),
        ("/v1x", "/v1", "/v1x"),
        ("/api", "/api", "/api"),
        ("/api/", "/api", "/"),
    ],
)
def test_the_mount_prefix_goes_only_at_the_end_of_a_segment(
    path: str, root_path: str, local: str
) -> None:
    assert local_path({"path": path, "root_path": root_path}) == local
    assert local_path({"path": local}) == local


def exchange(*messages: Message, **headers: str) -> Exchange:
    rest = list(messages)

    async def receive() -> Message:
        if not rest:
            await asyncio.Event().wait()
        return rest.pop(0)

    async def send(message: Message) -> None:
        raise AssertionError("nothing is to be sent")

    return Exchange(http_scope("POST", "/", headers), receive, send)


def part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def body_in(*pieces: bytes) -> list[Message]:
    return [*map(part, pieces), part(b"", more=False)]


async def test_a_body_in_many_messages_is_read_whole() -> None:
    messages = [*(part(bytes([n])) for n in range(200)), {"type": "http.request"}]
    assert await exchange(*messages).read(200, FOR_EVER) == bytes(range(200))


async def test_a_declared_length_over_the_limit_is_refused_before_a_byte_is_read() -> None:
    with pytest.raises(BodyTooLarge, match="larger than 10 bytes"):
        await exchange(**{"content-length": "11"}).read(10, FOR_EVER)


class Ready(Caller):
    """A caller whose body is there."""

    content = b"12345678901"

    def body(self) -> bytes:
        return self.content


def ready_exchange() -> Exchange:
    found = exchange()
    found.scope[CALLER] = Ready(asyncio.get_running_loop())
    return Exchange(found.scope, found._receive, found._send)


async def test_a_body_that_the_server_has_is_read_without_a_message() -> None:
    found = ready_exchange()
    assert await found.read(11, FOR_EVER) == Ready.content


async def test_a_body_that_the_server_has_is_refused_over_the_limit() -> None:
    found = ready_exchange()
    with pytest.raises(BodyTooLarge, match="larger than 10 bytes"):
        await found.read(10, FOR_EVER)


async def test_a_body_is_refused_as_soon_as_it_passes_the_limit() -> None:
    rest = exchange(part(b"12345"), part(b"678901"), part(b"never read"))
    with pytest.raises(BodyTooLarge):
        await rest.read(10, FOR_EVER)


async def test_a_body_of_just_the_limit_is_read() -> None:
    declared = {"content-length": "10"}
    assert (
        await exchange(part(b"1234567890", more=False), **declared).read(10, FOR_EVER)
        == b"1234567890"
    )


async def test_a_caller_who_leaves_in_the_body_is_no_request() -> None:
    with pytest.raises(ClientDisconnect):
        await exchange(part(b"1"), {"type": "http.disconnect"}).read(10, FOR_EVER)


async def test_a_caller_who_leaves_in_the_body_is_known_to_be_gone() -> None:
    found = exchange({"type": "http.disconnect"})
    with pytest.raises(ClientDisconnect):
        await found.read(10, FOR_EVER)
    assert found.is_gone


TEXT = b'{"messages": []}' * 9


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzip.compress(TEXT)),
        ("X-GZIP", gzip.compress(TEXT)),
        ("deflate", zlib.compress(TEXT)),
        ("deflate", zlib.compress(TEXT)[2:-4]),
        ("deflate, gzip", gzip.compress(zlib.compress(TEXT))),
        ("identity", TEXT),
        ("", TEXT),
    ],
)
async def test_a_compressed_body_is_inflated_however_it_is_cut(coding: str, body: bytes) -> None:
    headers = {"content-encoding": coding, "content-length": str(len(body))}
    for size in (1, 7, 1000):
        pieces = body_in(*(body[n : n + size] for n in range(0, len(body), size)))
        assert await exchange(*pieces, **headers).read(len(TEXT), FOR_EVER) == TEXT


async def test_codings_on_lines_of_their_own_count_like_those_in_one() -> None:
    body = gzip.compress(zlib.compress(TEXT))
    found = exchange(*body_in(body), **{"content-encoding": "gzip"})
    found.headers.insert(0, (b"content-encoding", b"deflate"))
    assert await found.read(1000, FOR_EVER) == TEXT


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, br", "compress", "*", "gzip;q=1"])
async def test_a_coding_that_is_not_known_is_a_415_before_a_byte_is_read(coding: str) -> None:
    with pytest.raises(UnsupportedEncoding) as caught:
        await exchange(**{"content-encoding": coding}).read(1000, FOR_EVER)
    assert caught.value.status == 415


async def test_the_limit_is_applied_to_the_inflated_size() -> None:
    bomb = gzip.compress(bytes(100_000))
    headers = {"content-encoding": "gzip", "content-length": str(len(bomb))}
    with pytest.raises(BodyTooLarge) as caught:
        await exchange(part(bomb), **headers).read(99_999, FOR_EVER)
    assert caught.value.status == 413
    assert await exchange(*body_in(bomb), **headers).read(100_000, FOR_EVER) == bytes(100_000)


@pytest.mark.parametrize(
    "pieces", [[gzip.compress(TEXT)[:-1]], [], [b"no gzip"], [gzip.compress(TEXT), b"more"]]
)
async def test_a_compressed_body_that_is_corrupt_or_cut_short_is_a_400(pieces: list[bytes]) -> None:
    with pytest.raises(RequestError) as caught:
        await exchange(*body_in(*pieces), **{"content-encoding": "gzip"}).read(1000, FOR_EVER)
    assert caught.value.status == 400


async def test_engines_see_a_compressed_body_inflated_and_no_coding() -> None:
    backends = Backends()
    body = b'{"messages" : [], "x":1}'
    reply = await chat(backends.proxy(), gzip.compress(body), {"content-encoding": "gzip"})
    assert reply.status == 200
    assert backends.decode[0].raw == [body]
    assert "content-encoding" not in backends.decode[0].requests[0].headers


async def test_an_unknown_coding_is_told_the_known_ones_and_no_engine_is_troubled() -> None:
    backends = Backends()
    reply = await chat(backends.proxy(), ask("hi"), {"content-encoding": "br"})
    assert (reply.status, reply.header("accept-encoding")) == (415, "gzip, deflate")
    assert backends.decode[0].requests == []


# A body that stalls


async def test_a_body_that_stalls_is_a_408() -> None:
    with pytest.raises(BodyTimeout, match=r"did not go on for 0\.05 s") as caught:
        await exchange(part(b"1")).read(10, Patience(SHORT))
    assert caught.value.status == 408
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_a_body_that_goes_on_may_take_longer_than_it_may_stall() -> None:
    began = time.monotonic()

    async def receive() -> Message:
        await asyncio.sleep(SHORT / 2)
        return part(b"", more=time.monotonic() < began + 3 * SHORT)

    found = exchange()
    found._receive = receive
    assert await found.read(10, Patience(SHORT)) == b""


async def test_only_the_body_that_stalls_is_given_up() -> None:
    patience = Patience(SHORT)
    alive = True

    async def receive() -> Message:
        await asyncio.sleep(SHORT / 5)
        return part(b"", more=alive)

    going = exchange()
    going._receive = receive
    reading = asyncio.create_task(going.read(10, patience))
    with pytest.raises(BodyTimeout):
        await exchange(part(b"1")).read(10, patience)
    alive = False
    assert await reading == b""


async def test_without_a_limit_a_body_may_stall_for_ever() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2 * SHORT):
            await exchange(part(b"1")).read(10, FOR_EVER)


async def test_a_cancel_of_the_hosts_in_the_body_is_a_cancel() -> None:
    reading = asyncio.create_task(exchange(part(b"1")).read(10, Patience(10)))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_a_cancel_of_the_hosts_is_not_lost_when_patience_ends_at_the_same_time() -> None:
    patience = Patience(SHORT)
    reading = asyncio.create_task(exchange(part(b"1")).read(10, patience))
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    patience._since[reading] -= 1
    patience._look(loop)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_patience_has_a_timer_only_while_somebody_is_waited_for() -> None:
    patience = Patience(SHORT)
    assert patience._timer is None
    await exchange(*body_in(b"1")).read(10, patience)
    assert patience._timer is not None
    await asyncio.sleep(SHORT)
    assert patience._timer is None
    await exchange(*body_in(b"1")).read(10, patience)
    assert patience._timer is not None
    await asyncio.sleep(SHORT)


# Headers of the caller


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("5", 5.0), ("0.25", 0.25), (".5", 0.5), ("1e2", 100.0), ("", None)],
)
def test_a_callers_time_limit_is_in_seconds(given: str, seconds: float | None) -> None:
    assert exchange(**{"x-request-timeout": given}).time_limit() == seconds
    assert exchange().time_limit() is None


@pytest.mark.parametrize(
    "given",
    ["0", "-1", "nan", "inf", "1e400", "soon", "5s", "1_000", "0x10", "1,5", "\xb2", "9" * 400],
)
def test_a_time_limit_that_is_no_number_above_0_is_a_400(given: str) -> None:
    found = exchange()
    found.known[b"x-request-timeout"] = given.encode("latin-1")
    with pytest.raises(RequestError, match="x-request-timeout") as caught:
        found.time_limit()
    assert caught.value.status == 400


@pytest.mark.parametrize("given", ["9" * 15_000 + "x", "1e" + "9" * 15_000, "." * 15_000])
def test_a_long_time_limit_takes_no_time_to_refuse(given: str) -> None:
    began = time.process_time()
    with pytest.raises(RequestError):
        exchange(**{"x-request-timeout": given}).time_limit()
    assert time.process_time() - began < 1


@pytest.mark.parametrize("given", ["r1", "A.b_c:d-9", "x" * 128])
def test_a_callers_request_id_is_kept(given: str) -> None:
    assert exchange(**{"x-request-id": given}).request_id == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\tb", "é", "a/b", "a\n"])
def test_a_request_id_that_is_not_safe_to_repeat_is_replaced(given: str) -> None:
    made = exchange(**{"x-request-id": given}).request_id
    assert made != given
    assert len(made) == 32


# What is said to the caller


class Sent:
    """A caller who notes what is said, and may have gone."""

    def __init__(self, is_there: bool = True, **more: Any) -> None:
        self.is_there = is_there
        self.messages: list[Message] = []
        self.exchange = Exchange({**http_scope("POST", "/", {}), **more}, self.receive, self.send)

    async def receive(self) -> Message:
        raise AssertionError("nothing is to be read")

    async def send(self, message: Message) -> None:
        if not self.is_there:
            raise OSError("nobody is there")
        self.messages.append(message)


async def test_bytes_are_counted_once_they_have_gone() -> None:
    caller = Sent()
    await caller.exchange.start(200, [])
    await caller.exchange.write(b"12345", True)
    caller.is_there = False
    with pytest.raises(ClientDisconnect):
        await caller.exchange.write(b"678", False)
    assert caller.exchange.sent == 5
    assert caller.exchange.is_started
    assert caller.exchange.is_gone


async def test_an_answer_that_had_to_do_without_encoders_says_so() -> None:
    caller = Sent()
    caller.exchange.is_degraded = True
    await caller.exchange.respond(200, [], b"x")
    assert (b"x-epd-degraded", b"encode") in caller.messages[0]["headers"]


async def test_an_error_names_addresses_only_where_it_may() -> None:
    class Told(ProxyError):
        def log_line(self) -> str:
            return "at http://10.0.0.1"

    quiet, open_ = Sent(), Sent()
    await quiet.exchange.fail(Told("somewhere"))
    await open_.exchange.fail(Told("somewhere"), expose_topology=True)
    assert b"10.0.0.1" not in quiet.messages[1]["body"]
    assert b"10.0.0.1" in open_.messages[1]["body"]


@pytest.mark.parametrize(("version", "needs"), [("1.0", True), ("1.1", False), ("2", False)])
def test_only_a_caller_of_http_1_0_needs_a_length(version: str, needs: bool) -> None:
    assert Sent(http_version=version).exchange.needs_length is needs
    assert not Sent().exchange.needs_length
