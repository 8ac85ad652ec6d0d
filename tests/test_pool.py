"""
What ``ConnectionPool`` promises: over real sockets on both event loops, then against h11.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import re
import socket
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import h11
import httpx
import pytest
import trustme
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from epd_proxy.connection import Incoming, Limits
from epd_proxy.pool import ConnectionPool
from tests.processes import unused_address
from tests.wire import (
    EMPTY,
    LIMIT,
    Peer,
    Request,
    Script,
    WiredPool,
    calling,
    sent,
    serving,
    settled,
    turns,
    wired,
    wiring,
)

MB = 1 << 20
URL = httpx.URL("http://engine/")
GET = b"GET / HTTP/1.1\r\nhost: engine\r\n\r\n"


@pytest.fixture(
    params=[("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True})],
    ids=["asyncio", "uvloop"],
)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


def answer(body: bytes = b"", status: int = 200, *fields: bytes) -> bytes:
    lines = [b"HTTP/1.1 %d It" % status, b"content-length: %d" % len(body), *fields]
    return b"\r\n".join([*lines, b"", body])


def chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\n\r\n"


async def echo(peer: Peer) -> None:
    """Answers every request with its number on this connection."""
    for number in itertools.count():
        await peer.request()
        peer.send(answer(b"%d" % number))


def saying(*pieces: bytes, then: str = "stay") -> Script:
    """Answers every request with the same bytes, and then perhaps leaves."""

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            for piece in pieces:
                peer.send(piece)
            if then == "close":
                peer.close()
            elif then == "reset":
                peer.reset()

    return script


async def silence(peer: Peer) -> None:
    """Reads, and never answers."""
    await peer.gone()


async def pieces_of(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def start(pool: ConnectionPool, url: str, **timeouts: float) -> Incoming:
    """A GET of which the head is there."""
    return await sent(pool, "GET", httpx.URL(url), [(b"host", b"engine")], [], timeouts)


async def body_of(incoming: Incoming) -> bytes:
    return b"".join([piece async for piece in incoming])


# Reuse


async def test_connection_serves_one_request_after_the_other() -> None:
    pool = ConnectionPool()
    async with serving(echo) as server, calling(pool) as client:
        assert [(await client.get(server.url)).text for _ in range(3)] == ["0", "1", "2"]
        assert repr(pool) == "<ConnectionPool 1 connections, 1 idle, 0 waiting>"


async def test_youngest_idle_connection_is_used_first() -> None:
    async def script(peer: Peer) -> None:
        name = b"%d" % len(server.peers)
        while True:
            await peer.request()
            await gates[name].wait()
            peer.send(answer(name))

    gates = {name: asyncio.Event() for name in (b"1", b"2", b"3")}
    pool = ConnectionPool()
    async with serving(script) as server, calling(pool) as client:
        calls = []
        for number in range(3):
            calls.append(asyncio.create_task(client.get(server.url)))
            await server.peer(number)
        for name, call in [(b"2", calls[1]), (b"3", calls[2]), (b"1", calls[0])]:
            gates[name].set()
            await call
        assert [(await client.get(server.url)).text for _ in range(2)] == ["1", "1"]
        assert repr(pool) == "<ConnectionPool 3 connections, 3 idle, 0 waiting>"


async def test_idle_connections_are_closed_after_a_while_with_nobody_asking() -> None:
    pool = ConnectionPool(keep_alive=0.02)
    async with serving(echo) as server, calling(pool) as client:
        await asyncio.gather(client.get(server.url), client.get(server.url))
        await server.all_gone()
        assert len(server.peers) == 2
        assert repr(pool) == EMPTY


async def test_sweeper_leaves_the_young_for_its_next_round() -> None:
    async with wiring(WiredPool(keep_alive=0.05)) as pool:
        calls = [asyncio.create_task(sent(pool, "GET", URL, [], [], {})) for _ in range(2)]
        old, young = [await wired(pool, number) for number in range(2)]
        old.connection.data_received(answer())
        young.connection.data_received(answer())
        await asyncio.gather(*calls)
        young.connection.idle_since += 0.06
        await settled(lambda: old.is_aborted)
        while not young.is_aborted:
            assert old.is_aborted
            await asyncio.sleep(0.01)


async def test_connection_that_grew_old_is_not_used_again() -> None:
    async with wiring(WiredPool()) as pool:
        for number in range(2):
            call = asyncio.create_task(sent(pool, "GET", URL, [], [], {}))
            wire = await wired(pool, number)
            wire.connection.data_received(answer())
            await call
            wire.connection.idle_since -= 61
        assert pool.wires[0].is_aborted
        assert repr(pool) == "<ConnectionPool 1 connections, 1 idle, 0 waiting>"


async def test_no_keep_alive_is_no_reuse() -> None:
    pool = ConnectionPool(keep_alive=0)
    async with serving(echo) as server, calling(pool) as client:
        assert [(await client.get(server.url)).text for _ in range(2)] == ["0", "0"]
        assert repr(pool) == EMPTY


@pytest.mark.parametrize(
    "said",
    [
        answer(b"", 200, b"connection: close"),
        answer(b"", 200, b"Connection: foo, CLOSE"),
        b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n",
    ],
)
async def test_connection_is_not_used_again_when_the_server_says_so(said: bytes) -> None:
    async with serving(saying(said)) as server, calling(ConnectionPool()) as client:
        for _ in range(2):
            await client.get(server.url)
        assert len(server.peers) == 2


async def test_http_1_0_can_keep_alive() -> None:
    said = b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nhi"
    async with serving(saying(said)) as server, calling(ConnectionPool()) as client:
        assert [(await client.get(server.url)).text for _ in range(2)] == ["hi", "hi"]
        assert len(server.peers) == 1


async def test_unread_answer_does_not_keep_its_connection() -> None:
    pool = ConnectionPool()
    async with serving(echo) as server, calling(pool) as client:
        incoming = await start(pool, server.url)
        assert (await client.get(server.url)).text == "1"
        assert await body_of(incoming) == b"0"


@pytest.mark.parametrize("extra", [b"HTTP/1.1 500 Evil\r\n\r\n", b"HT", b"\0", b"evil"])
@pytest.mark.parametrize("status", [200, 204])
async def test_bytes_after_an_answer_are_in_no_answer(extra: bytes, status: int) -> None:
    body = b"hi" if status == 200 else b""
    said = answer(body, status) + extra
    async with serving(saying(said)) as server, calling(ConnectionPool()) as client:
        for _ in range(2):
            response = await client.get(server.url)
            assert (response.status_code, response.content) == (status, body)
        assert len(server.peers) == 2


async def test_fields_after_an_answer_are_in_no_answer() -> None:
    said = answer(b"hi") + b"HTTP/1.1 500 Evil\r\nevil: 1\r\ncontent-length: 4\r\n\r\nevil"
    async with serving(saying(said)) as server, calling(ConnectionPool()) as client:
        response = await client.get(server.url)
        assert (response.status_code, response.content) == (200, b"hi")
        assert "evil" not in response.headers


async def test_bytes_on_an_idle_connection_close_it() -> None:
    pool = ConnectionPool()
    async with serving(echo) as server, calling(pool) as client:
        await client.get(server.url)
        server.peers[0].send(answer(b"evil"))
        await server.peers[0].gone()
        assert repr(pool) == EMPTY
        assert (await client.get(server.url)).text == "0"


async def test_idle_connection_closed_by_the_server_is_forgotten() -> None:
    pool = ConnectionPool()
    async with serving(echo) as server, calling(pool) as client:
        await client.get(server.url)
        server.peers[0].close()
        await server.peers[0].gone()
        await settled(lambda: len(repr(pool)))
        assert repr(pool) == EMPTY


# One more try


async def once(peer: Peer) -> None:
    """Answers the first request of a connection, and hangs up on the second."""
    await peer.request()
    peer.send(answer(b"1"))
    await peer.request()
    peer.close()


async def test_request_on_a_connection_that_dies_before_a_byte_is_sent_once_more() -> None:
    async with serving(once) as server, calling(ConnectionPool()) as client:
        for _ in range(2):
            response = await client.post(server.url, content=b"body")
            assert response.text == "1"
        assert len(server.peers) == 2


async def test_request_on_a_connection_that_is_reset_before_a_byte_is_sent_once_more() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(answer(b"1"))
        await peer.request()
        peer.reset()

    async with serving(script) as server, calling(ConnectionPool()) as client:
        assert [(await client.get(server.url)).text for _ in range(2)] == ["1", "1"]


@pytest.mark.parametrize(
    ("then", "error"), [("close", httpx.RemoteProtocolError), ("reset", httpx.ReadError)]
)
async def test_request_is_sent_once_on_a_fresh_connection(
    then: str, error: type[Exception]
) -> None:
    async with serving(saying(then=then)) as server, calling(ConnectionPool()) as client:
        with pytest.raises(error):
            await client.get(server.url)
        assert len(server.peers) == 1


async def test_second_try_is_the_last() -> None:
    async def script(peer: Peer) -> None:
        if len(server.peers) == 1:
            await once(peer)
        await saying(then="close")(peer)

    async with serving(script) as server, calling(ConnectionPool()) as client:
        await client.get(server.url)
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(server.url)
        assert len(server.peers) == 2


async def test_streamed_body_is_sent_once() -> None:
    async with serving(once) as server, calling(ConnectionPool()) as client:
        await client.get(server.url)
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(server.url, content=pieces_of(b"body"))
        assert len(server.peers) == 1


async def test_request_that_has_got_a_byte_is_sent_once() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(answer(b"1"))
        await peer.request()
        peer.send(b"H")
        peer.close()

    async with serving(script) as server, calling(ConnectionPool()) as client:
        await client.get(server.url)
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(server.url)
        assert len(server.peers) == 1


async def test_second_try_makes_room_for_itself_at_the_limit() -> None:
    async with wiring(WiredPool(max_connections=2)) as pool:
        calls = [asyncio.create_task(sent(pool, "GET", URL, [], [], {})) for _ in range(2)]
        for number in range(2):
            (await wired(pool, number)).connection.data_received(answer())
        await asyncio.gather(*calls)
        dying, other = pool.wires[1], pool.wires[0]
        again = asyncio.create_task(sent(pool, "GET", URL, [], [], {}))
        await asyncio.sleep(0)
        third = asyncio.create_task(sent(pool, "GET", httpx.URL("http://engine/3"), [], [], {}))
        await asyncio.sleep(0)
        assert not third.done()
        fourth = asyncio.create_task(sent(pool, "GET", httpx.URL("http://engine/4"), [], [], {}))
        await asyncio.sleep(0)
        assert repr(pool) == "<ConnectionPool 2 connections, 0 idle, 1 waiting>"
        # The one in line gets the place of the dead; who tries again stands behind it.
        dying.end()
        (await wired(pool, 2)).connection.data_received(answer())
        await fourth
        other.connection.data_received(answer())
        await third
        pool.wires[2].connection.data_received(answer())
        await again
        assert len(pool.wires) == 3


async def test_second_try_takes_the_place_of_an_idle_connection() -> None:
    async with wiring(WiredPool(max_connections=2)) as pool:
        calls = [asyncio.create_task(sent(pool, "GET", URL, [], [], {})) for _ in range(2)]
        for number in range(2):
            (await wired(pool, number)).connection.data_received(answer())
        await asyncio.gather(*calls)
        again, other = [asyncio.create_task(sent(pool, "GET", URL, [], [], {})) for _ in range(2)]
        await asyncio.sleep(0)
        idle, dying = pool.wires
        third = asyncio.create_task(sent(pool, "GET", URL, [], [], {}))
        asyncio.get_running_loop().call_soon(idle.connection.data_received, answer())
        dying.end()
        (await wired(pool, 3)).connection.data_received(answer())
        assert (await again).status == 200
        assert idle.is_aborted
        pool.wires[2].connection.data_received(answer())
        await asyncio.gather(other, third)
        assert repr(pool) == "<ConnectionPool 2 connections, 2 idle, 0 waiting>"


# Places and lines


async def in_line(pool: ConnectionPool, count: int) -> None:
    await turns(lambda: f"{count} waiting" in repr(pool))


async def test_limit_holds_and_the_line_is_fair() -> None:
    served = []

    async def script(peer: Peer) -> None:
        while True:
            served.append((await peer.request()).target)
            peer.send(answer(served[-1].encode()))

    pool = ConnectionPool(max_connections=2)
    async with serving(script) as server, calling(pool) as client:
        calls = [client.get(f"{server.url}{number}") for number in range(50)]
        answers = await asyncio.gather(*calls)
        assert [response.text for response in answers] == [f"/{number}" for number in range(50)]
        assert [int(target[1:]) for target in served] == pytest.approx(list(range(50)), abs=1)
        assert len(server.peers) == 2


async def test_waiting_ends_with_pool_timeout() -> None:
    pool = ConnectionPool(max_connections=1)
    async with serving(silence) as server, calling(pool) as client:
        first = asyncio.create_task(client.get(server.url))
        await server.peer(0)
        with pytest.raises(httpx.PoolTimeout):
            await client.get(server.url, timeout=httpx.Timeout(LIMIT, pool=0.01))
        assert repr(pool) == "<ConnectionPool 1 connections, 0 idle, 0 waiting>"
        first.cancel()
        await server.peers[0].gone()
        assert repr(pool) == EMPTY


async def test_caller_who_leaves_the_line_is_passed_over() -> None:
    async with wiring(WiredPool(max_connections=1)) as pool:
        calls = [asyncio.create_task(sent(pool, "GET", URL, [], [], {})) for _ in range(3)]
        wire = await wired(pool, 0)
        await in_line(pool, 2)
        calls[1].cancel()
        wire.connection.data_received(answer())
        await calls[0]
        wire.connection.data_received(answer())
        await calls[2]
        assert calls[1].cancelled()
        assert repr(pool) == "<ConnectionPool 1 connections, 1 idle, 0 waiting>"


async def test_caller_who_leaves_at_his_turn_passes_the_connection_on() -> None:
    async with wiring(WiredPool(max_connections=1)) as pool:
        calls = [asyncio.create_task(sent(pool, "GET", URL, [], [], {})) for _ in range(3)]
        wire = await wired(pool, 0)
        await in_line(pool, 2)
        wire.connection.data_received(answer())
        calls[1].cancel()
        await calls[0]
        await in_line(pool, 0)
        await turns(calls[1].done)
        wire.connection.data_received(answer())
        await calls[2]
        assert len(pool.wires) == 1


async def test_last_caller_who_leaves_at_his_turn_leaves_the_connection_idle() -> None:
    async with wiring(WiredPool(max_connections=1)) as pool:
        calls = [asyncio.create_task(sent(pool, "GET", URL, [], [], {})) for _ in range(2)]
        wire = await wired(pool, 0)
        await in_line(pool, 1)
        wire.connection.data_received(answer())
        calls[1].cancel()
        await asyncio.wait(calls)
        assert calls[1].cancelled()
        assert repr(pool) == "<ConnectionPool 1 connections, 1 idle, 0 waiting>"


async def test_caller_who_leaves_at_his_turn_passes_the_place_on() -> None:
    async with wiring(WiredPool(max_connections=1)) as pool:
        calls = [asyncio.create_task(sent(pool, "GET", URL, [], [], {})) for _ in range(3)]
        wire = await wired(pool, 0)
        await in_line(pool, 2)
        wire.connection.data_received(answer(b"", 200, b"connection: close"))
        calls[1].cancel()
        (await wired(pool, 1)).connection.data_received(answer())
        await asyncio.wait(calls)
        assert calls[1].cancelled()
        assert calls[2].result().status == 200
        assert repr(pool) == "<ConnectionPool 1 connections, 1 idle, 0 waiting>"


async def test_last_caller_who_leaves_at_his_turn_frees_the_place() -> None:
    async with wiring(WiredPool(max_connections=1)) as pool:
        calls = [asyncio.create_task(sent(pool, "GET", URL, [], [], {})) for _ in range(2)]
        wire = await wired(pool, 0)
        await in_line(pool, 1)
        wire.connection.data_received(answer(b"", 200, b"connection: close"))
        calls[1].cancel()
        await asyncio.wait(calls)
        assert repr(pool) == EMPTY


async def test_caller_who_leaves_as_his_connection_opens_closes_it() -> None:
    async with wiring(WiredPool()) as pool:
        call = asyncio.create_task(sent(pool, "GET", URL, [], [], {}))
        await turns(lambda: bool(pool.wires))
        call.cancel()
        await asyncio.wait([call])
        assert pool.wires[0].is_aborted


async def test_connection_that_died_at_the_turn_of_one_who_left_is_not_idle() -> None:
    async with wiring(WiredPool(max_connections=1)) as pool:
        calls = [asyncio.create_task(sent(pool, "GET", URL, [], [], {})) for _ in range(2)]
        wire = await wired(pool, 0)
        await in_line(pool, 1)
        wire.connection.data_received(answer())
        wire.end()
        calls[1].cancel()
        await asyncio.wait(calls)
        assert repr(pool) == EMPTY


async def test_connection_that_died_at_somebodys_turn_is_replaced() -> None:
    async with wiring(WiredPool(max_connections=1)) as pool:
        calls = [asyncio.create_task(sent(pool, "GET", URL, [], [], {})) for _ in range(2)]
        wire = await wired(pool, 0)
        await in_line(pool, 1)
        wire.connection.data_received(answer())
        wire.end()
        (await wired(pool, 1)).connection.data_received(answer())
        assert [incoming.status for incoming in await asyncio.gather(*calls)] == [200, 200]


async def test_nobody_takes_the_place_of_the_next_in_line() -> None:
    async with wiring(WiredPool(max_connections=1)) as pool:
        calls = [asyncio.create_task(sent(pool, "GET", URL, [], [], {})) for _ in range(2)]
        wire = await wired(pool, 0)
        await in_line(pool, 1)
        late = asyncio.create_task(sent(pool, "GET", httpx.URL("http://engine/late"), [], [], {}))
        wire.connection.data_received(answer(b"", 200, b"connection: close"))
        second = await wired(pool, 1)
        await settled(lambda: len(pool.wires))
        assert len(pool.wires) == 2
        assert b"late" not in second.written
        second.connection.data_received(answer())
        await turns(lambda: b"late" in second.written)
        second.connection.data_received(answer())
        await asyncio.gather(*calls, late)


async def test_place_of_a_failed_opening_is_the_next_ones() -> None:
    pool = ConnectionPool(max_connections=1)
    async with calling(pool) as client:
        with unused_address() as url:
            results = await asyncio.gather(
                *[client.get(url) for _ in range(3)], return_exceptions=True
            )
        assert [type(result) for result in results] == [httpx.ConnectError] * 3


async def test_cancelled_caller_gives_his_place_to_the_next() -> None:
    async def script(peer: Peer) -> None:
        if len(server.peers) == 1:
            await silence(peer)
        await echo(peer)

    pool = ConnectionPool(max_connections=1)
    async with serving(script) as server, calling(pool) as client:
        first = asyncio.create_task(client.get(server.url))
        await server.peer(0)
        second = asyncio.create_task(client.get(server.url))
        await in_line(pool, 1)
        first.cancel()
        assert (await second).text == "0"
        assert await settled(lambda: server.peers[0].is_gone)


async def test_crowd_that_comes_and_goes_leaves_nothing() -> None:
    pool = ConnectionPool(max_connections=3)
    async with serving(echo) as server, calling(pool) as client:
        calls = [asyncio.create_task(client.get(server.url)) for _ in range(60)]
        for number, call in enumerate(calls):
            if number % 3 == 0:
                await asyncio.sleep(0)
                call.cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(
            isinstance(result, (httpx.Response, asyncio.CancelledError)) for result in results
        )
        assert (await client.get(server.url)).status_code == 200
        await settled(lambda: len(repr(pool)))
        idle = len(pool._origins[("http", "127.0.0.1", httpx.URL(server.url).port)].idle)
        assert repr(pool) == f"<ConnectionPool {idle} connections, {idle} idle, 0 waiting>"


async def test_full_origin_does_not_block_another() -> None:
    pool = ConnectionPool(max_connections=1)
    async with serving(silence) as full, serving(echo) as server, calling(pool) as client:
        calls = [asyncio.create_task(client.get(full.url)) for _ in range(3)]
        await in_line(pool, 2)
        assert (await client.get(server.url)).text == "0"
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)


# What is sent


class Asked:
    """Keeps what it was asked, and answers."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    async def __call__(self, peer: Peer) -> None:
        while True:
            self.requests.append(await peer.request())
            peer.send(answer(b"ok"))


async def test_request_goes_out_as_it_was_written() -> None:
    async def script(peer: Peer) -> None:
        await peer.until(lambda: peer.received.endswith(b"body"))
        seen.append(bytes(peer.received))
        peer.send(answer())
        await peer.gone()

    seen: list[bytes] = []
    pool = ConnectionPool()
    async with serving(script) as server, calling(pool):
        fields = [(b"host", b"Engine"), (b"X-Odd", b"\xff "), (b"content-length", b"6")]
        url = httpx.URL(server.url + "a%20b?c=d#e")
        await sent(pool, "PUT", url, fields, [b"a ", memoryview(b"body")], {})
    assert seen == [
        b"PUT /a%20b?c=d HTTP/1.1\r\n"
        b"host: Engine\r\nX-Odd: \xff \r\ncontent-length: 6\r\n\r\na body"
    ]


class Buffers(httpx.AsyncByteStream):
    """A body that is there, in pieces."""

    def __init__(self, *buffers: bytes | memoryview) -> None:
        self.buffers = buffers


@pytest.mark.parametrize(
    ("options", "body", "framing"),
    [
        ({"content": b"abc"}, b"abc", {"content-length": "3"}),
        ({"json": {"a": 1}}, b'{"a":1}', {"content-length": "7"}),
        ({"data": {"a": "1"}}, b"a=1", {"content-length": "3"}),
        ({}, b"", {"content-length": "0"}),
    ],
)
async def test_posted_bodies_arrive(
    options: dict[str, Any], body: bytes, framing: dict[str, str]
) -> None:
    asked = Asked()
    async with serving(asked) as server, calling(ConnectionPool()) as client:
        assert (await client.post(server.url, **options)).text == "ok"
    assert asked.requests[0].body == body
    assert framing.items() <= asked.requests[0].headers.items()


async def test_streamed_bodies_arrive_with_a_length_or_in_chunks() -> None:
    asked = Asked()
    async with serving(asked) as server, calling(ConnectionPool()) as client:
        await client.post(server.url, content=pieces_of(b"ab", b"", b"c" * 70_000))
        await client.post(
            server.url, content=pieces_of(b"ab", b"c"), headers={"content-length": "3"}
        )
        assert len(server.peers) == 1
    in_chunks, with_length = asked.requests
    assert in_chunks.body == b"ab" + b"c" * 70_000
    assert in_chunks.headers["transfer-encoding"] == "chunked"
    assert with_length.body == b"abc"
    assert with_length.headers["content-length"] == "3"


async def test_multipart_and_buffers_arrive() -> None:
    asked = Asked()
    async with serving(asked) as server, calling(ConnectionPool()) as client:
        await client.post(server.url, files={"file": b"x" * 100_000})
        stream = Buffers(b"ab", memoryview(b"c"))
        await client.send(
            httpx.Request(
                "POST", server.url, headers={"host": "a", "content-length": "3"}, stream=stream
            )
        )
    assert asked.requests[0].body.count(b"x" * 100_000) == 1
    assert asked.requests[1].body == b"abc"


async def test_server_that_does_not_read_stops_a_streamed_body() -> None:
    taken = 0

    async def script(peer: Peer) -> None:
        peer.transport.pause_reading()
        await read.wait()
        peer.transport.resume_reading()
        assert len((await peer.request()).body) == 64 * MB
        peer.send(answer())
        await peer.gone()

    async def body() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(256):
            taken += MB // 4
            yield b"x" * (MB // 4)

    read = asyncio.Event()
    async with serving(script) as server, calling(ConnectionPool()) as client:
        headers = {"content-length": str(64 * MB)}
        call = asyncio.create_task(client.post(server.url, content=body(), headers=headers))
        await server.peer(0)
        assert await settled(lambda: taken) < 32 * MB
        read.set()
        assert (await call).status_code == 200
        assert len(server.peers) == 1


async def test_streamed_body_is_asked_for_as_the_wire_takes_it() -> None:
    async with wiring(WiredPool()) as pool:
        pool.is_slow = True
        body = pieces_of(b"0", b"1", b"2")
        call = asyncio.create_task(sent(pool, "POST", URL, [], body, {}))
        wire = await wired(pool, 0)
        for end in (b"\r\n\r\n0", b"\r\n\r\n01", b"\r\n\r\n012"):
            await settled(lambda: len(wire.written))
            assert wire.written.endswith(end)
            wire.connection.resume_writing()
        await settled(lambda: len(wire.written))
        wire.connection.data_received(answer())
        assert (await call).status == 200
        assert repr(pool) == "<ConnectionPool 1 connections, 1 idle, 0 waiting>"


async def test_early_answer_to_a_large_body_arrives_and_ends_the_connection() -> None:
    async def script(peer: Peer) -> None:
        await peer.until(lambda: b"\r\n\r\n" in peer.received)
        peer.send(answer(b"too large", 413))
        await peer.gone()

    async with serving(script) as server, calling(ConnectionPool()) as client:
        response = await client.post(server.url, content=b"x" * 20 * MB)
        assert (response.status_code, response.text) == (413, "too large")
        await client.post(server.url, content=b"x" * 20 * MB)
        assert len(server.peers) == 2


@pytest.mark.parametrize("reads", [False, True])
async def test_early_answer_ends_a_streamed_body(reads: bool) -> None:
    async def script(peer: Peer) -> None:
        await peer.until(lambda: b"\r\n\r\n" in peer.received)
        if not reads:
            peer.transport.pause_reading()
        peer.send(answer(b"too large", 413))
        await asyncio.Event().wait()

    async def body() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * MB
            await asyncio.sleep(0)

    async with serving(script) as server, calling(ConnectionPool()) as client:
        response = await client.post(server.url, content=body())
        assert (response.status_code, response.text) == (413, "too large")
        assert repr(client._transport) == EMPTY


async def test_early_answer_that_ends_with_the_connection_is_whole() -> None:
    async def script(peer: Peer) -> None:
        await peer.until(lambda: b"\r\n\r\n" in peer.received)
        peer.transport.pause_reading()
        peer.send(b"HTTP/1.1 413 Large\r\n\r\ntoo large")
        peer.transport.write_eof()
        await asyncio.Event().wait()

    async with serving(script) as server, calling(ConnectionPool()) as client:
        response = await client.post(server.url, content=b"x" * 20 * MB, timeout=1)
        assert (response.status_code, response.text) == (413, "too large")


async def test_body_that_fails_closes_the_connection() -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"x"
        raise KeyError("no more")

    async with serving(silence) as server, calling(ConnectionPool()) as client:
        with pytest.raises(KeyError):
            await client.post(server.url, content=body())
        await (await server.peer(0)).gone()
        assert repr(client._transport) == EMPTY


# What is received


async def test_plain_client_gets_decoded_bodies_and_follows_redirects() -> None:
    async def script(peer: Peer) -> None:
        while True:
            request = await peer.request()
            if request.target == "/":
                peer.send(answer(b"", 307, b"location: /there"))
            else:
                packed = gzip.compress(request.method.encode() + request.body)
                peer.send(answer(packed, 200, b"content-encoding: gzip", b"X-A: 1", b"x-a: 2"))

    async with serving(script) as server, calling(ConnectionPool()) as client:
        response = await client.post(server.url, content=b" it", follow_redirects=True)
        assert response.text == "POST it"
        assert response.headers.get_list("x-a") == ["1", "2"]
        assert response.http_version == "HTTP/1.1"
        assert len(server.peers) == 1


@pytest.mark.parametrize(
    "said",
    [
        answer(b"hello"),
        CHUNKED + chunk(b"he") + chunk(b"llo") + b"0\r\n\r\n",
        CHUNKED + b'2;a;b=c;d="e f"\r\nhe\r\n003\r\nllo\r\n000;z\r\nTrail: er\r\n\r\n',
        CHUNKED.replace(b"\r\n\r\n", b"\r\ncontent-length: 3\r\n\r\n")
        + chunk(b"hello")
        + chunk(b""),
        b"HTTP/1.1 100 Continue\r\n\r\n" + answer(b"hello"),
        b"HTTP/1.1 102 P\r\na: b\r\n\r\nHTTP/1.1 103 Hints\r\nlink: c\r\n\r\n" + answer(b"hello"),
        b"HTTP/1.1 200\r\ncontent-length: 5\r\n\r\nhello",
    ],
)
async def test_bodies_of_every_framing_are_read_and_the_connection_kept(said: bytes) -> None:
    byte_by_byte = [said[at : at + 1] for at in range(len(said))]
    async with serving(saying(said)) as server, calling(ConnectionPool()) as client:
        response = await client.get(server.url)
        assert (response.status_code, response.content) == (200, b"hello")
        assert not {"trail", "link", "a"} & set(response.headers)
        await client.get(server.url)
        assert len(server.peers) == 1
    async with serving(saying(*byte_by_byte)) as server, calling(ConnectionPool()) as client:
        assert (await client.get(server.url)).content == b"hello"


@pytest.mark.parametrize(
    "head", [UNTIL_CLOSE, b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nx: y\r\n\r\n"]
)
async def test_body_without_a_length_ends_with_the_connection(head: bytes) -> None:
    async with (
        serving(saying(head, b"hello", then="close")) as server,
        calling(ConnectionPool()) as client,
    ):
        assert (await client.get(server.url)).content == b"hello"


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("field", [b"x: y", b"content-length: 5", b"transfer-encoding: chunked"])
async def test_no_content_has_no_body(status: int, field: bytes) -> None:
    said = b"HTTP/1.1 %d None\r\n%b\r\n\r\n" % (status, field)
    async with serving(saying(said)) as server, calling(ConnectionPool()) as client:
        for _ in range(2):
            response = await client.get(server.url)
            assert (response.status_code, response.content) == (status, b"")
        assert len(server.peers) == 1


@pytest.mark.parametrize("field", [b"content-length: 5", b"transfer-encoding: chunked"])
async def test_answer_to_head_has_no_body_and_ends_the_connection(field: bytes) -> None:
    said = b"HTTP/1.1 200 OK\r\n%b\r\n\r\n" % field
    async with serving(saying(said)) as server, calling(ConnectionPool()) as client:
        for _ in range(2):
            response = await client.head(server.url)
            assert (response.status_code, response.content) == (200, b"")
            assert field.partition(b":")[0].decode() in response.headers
        assert len(server.peers) == 2


@pytest.mark.parametrize(
    "said",
    [
        answer(b"evil"),
        CHUNKED + chunk(b"evil"),
        pytest.param(CHUNKED + b"0\r\n"),
    ],
)
async def test_body_in_answer_to_head_is_in_no_answer(said: bytes) -> None:
    async with serving(saying(said)) as server, calling(ConnectionPool()) as client:
        for _ in range(2):
            assert (await client.head(server.url)).content == b""
        assert len(server.peers) == 2


async def test_pieces_are_handed_on_as_they_arrive() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(CHUNKED)
        for number in range(5):
            peer.send(chunk(b"%d" % number))
            await got[number].wait()
        peer.send(b"0\r\n\r\n")
        await peer.gone()

    got = [asyncio.Event() for _ in range(5)]
    async with serving(script) as server, calling(ConnectionPool()) as client:
        async with client.stream("GET", server.url) as response:
            pieces: list[bytes] = []
            async for piece in response.aiter_raw():
                got[len(pieces)].set()
                pieces.append(piece)
        assert pieces == [b"0", b"1", b"2", b"3", b"4"]


async def test_reader_that_does_not_read_stops_the_server() -> None:
    sent = 0

    async def script(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (50 * MB))
        for number in range(200):
            peer.send(bytes([number]) * (MB // 4))
            sent += MB // 4
            await peer.drain()
        await peer.request()
        peer.send(answer(b"next"))
        await peer.gone()

    async with serving(script) as server, calling(ConnectionPool()) as client:
        async with client.stream("GET", server.url) as response:
            assert await settled(lambda: sent) < 20 * MB
            at = 0
            async for piece in response.aiter_raw():
                assert len(piece) < 2 * MB
                assert piece[0] == at // (MB // 4)
                at += len(piece)
                assert piece[-1] == (at - 1) // (MB // 4)
            assert at == 50 * MB
        assert (await client.get(server.url)).text == "next"
        assert len(server.peers) == 1


async def test_answer_closed_while_the_server_is_stopped_is_over() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(CHUNKED + chunk(b"x" * 50 * MB))
        await peer.gone()

    pool = ConnectionPool()
    async with serving(script) as server, calling(pool):
        incoming = await start(pool, server.url)
        await settled(lambda: len(repr(pool)))
        await incoming.aclose()
        assert repr(pool) == EMPTY
        await server.all_gone()
        assert len(await anext(incoming)) > 0
        with pytest.raises(httpx.ReadError):
            await anext(incoming)


# What is refused


@pytest.mark.parametrize(
    "said",
    [
        b"garbage\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/3.7 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\na b: c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na : c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: b\0c\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nupgrade: a\r\nconnection: upgrade\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_a_protocol_error(said: bytes) -> None:
    async with serving(saying(said)) as server, calling(ConnectionPool()) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(server.url)
        assert repr(client._transport) == EMPTY
        await server.all_gone()


@pytest.mark.parametrize("fields", [b"", b"connection: upgrade\r\n"])
async def test_unasked_switch_of_protocols_is_refused(fields: bytes) -> None:
    said = b"HTTP/1.1 101 Switching\r\n%b\r\n" % fields
    async with serving(saying(said)) as server, calling(ConnectionPool()) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(server.url, timeout=1)


@pytest.mark.parametrize("status", [b"000", b"099"])
async def test_status_below_100_is_refused(status: bytes) -> None:
    said = b"HTTP/1.1 %b X\r\ncontent-length: 0\r\n\r\n" % status
    async with serving(saying(said)) as server, calling(ConnectionPool()) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(server.url)


async def test_white_space_around_a_value_is_no_part_of_it() -> None:
    incoming = await wired_answer(answer(b"", 200, b"x: \ta b \t ", b"y: \t"), "one")
    assert incoming.fields[1:] == [(b"x", b"a b"), (b"y", b"")]


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"chunked, gzip", b"gzip"])
async def test_transfer_coding_that_is_not_understood_is_refused(coding: bytes) -> None:
    said = b"HTTP/1.1 200 OK\r\ntransfer-encoding: %b\r\n\r\n" % coding
    with pytest.raises(httpx.RemoteProtocolError):
        await wired_answer(said + chunk(b"hello") + chunk(b""), "one")


async def test_chunks_are_never_taken_for_a_body() -> None:
    # The parser overlooks this coding, for the white space behind it.
    said = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\t\r\n\r\n" + chunk(b"hello") + chunk(b"")
    pieces = []
    with suppress(httpx.RemoteProtocolError):
        async for piece in await wired_answer(said, "one"):
            pieces.append(piece)  # noqa: PERF401 - those before an error count
    assert b"".join(pieces) in (b"", b"hello")


def head_of(size: int) -> bytes:
    """A head of so many bytes, in few fields."""
    start, end = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nx: ", b"\r\n\r\n"
    return start + b"x" * (size - len(start) - len(end)) + end


@pytest.mark.parametrize("pieces", ["one", "many"])
async def test_head_below_64_kib_is_read(pieces: str) -> None:
    assert (await wired_answer(head_of(63 << 10), pieces)).status == 200


@pytest.mark.parametrize(
    "pieces",
    [
        "one",
        "many",
    ],
)
async def test_head_over_64_kib_is_refused(pieces: str) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        await wired_answer(head_of(65 << 10), pieces)


async def wired_answer(said: bytes, pieces: str) -> Incoming:
    step = len(said) if pieces == "one" else 1000
    async with wiring(
        WiredPool([said[at : at + step] for at in range(0, len(said), step)])
    ) as pool:
        return await sent(pool, "GET", URL, [], [], {})


async def test_endless_head_is_refused() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\nx: ")
        while not peer.is_gone:
            peer.send(b"x" * 10_000)
            await peer.drain()
            await asyncio.sleep(0)

    async with serving(script) as server, calling(ConnectionPool()) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(server.url)


async def test_endless_interim_answers_are_refused() -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        await wired_answer(b"HTTP/1.1 102 Wait\r\n\r\n" * 5000, "many")


async def test_more_than_128_fields_are_refused() -> None:
    def head(count: int) -> bytes:
        return answer(b"", 200, *[b"x: y"] * (count - 1))

    assert len((await wired_answer(head(128), "one")).fields) == 128
    with pytest.raises(httpx.RemoteProtocolError):
        await wired_answer(head(129), "one")


# How answers end early


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhello",
        CHUNKED + chunk(b"hello"),
        CHUNKED + b"9\r\nhello",
    ],
)
@pytest.mark.parametrize(
    ("then", "error"), [("close", httpx.RemoteProtocolError), ("reset", httpx.ReadError)]
)
async def test_cut_body_is_an_error_after_its_pieces(
    said: bytes, then: str, error: type[Exception]
) -> None:
    await cut_after_hello(said, then, error)


async def test_reset_is_no_end_of_a_body_without_a_length() -> None:
    await cut_after_hello(UNTIL_CLOSE + b"hello", "reset", httpx.ReadError)


async def test_broken_chunk_is_an_error_after_the_pieces() -> None:
    said = CHUNKED + chunk(b"hello") + b"x\r\n"
    await cut_after_hello(said, "stay", httpx.RemoteProtocolError)


async def cut_after_hello(said: bytes, then: str, error: type[Exception]) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(said)
        if then != "stay":
            await read.wait()
            peer.close() if then == "close" else peer.reset()
        await peer.gone()

    read = asyncio.Event()
    async with serving(script) as server, calling(ConnectionPool()) as client:
        async with client.stream("GET", server.url) as response:
            pieces = response.aiter_raw()
            assert await anext(pieces) == b"hello"
            read.set()
            with pytest.raises(error):
                await anext(pieces)
        assert repr(client._transport) == EMPTY


@pytest.mark.parametrize(
    ("then", "error"), [("close", httpx.RemoteProtocolError), ("reset", httpx.ReadError)]
)
async def test_cut_head_is_an_error(then: str, error: type[Exception]) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\na")
        await settled(lambda: 0)
        peer.close() if then == "close" else peer.reset()

    async with serving(script) as server, calling(ConnectionPool()) as client:
        with pytest.raises(error):
            await client.get(server.url)


async def test_silence_before_the_head_is_a_read_timeout() -> None:
    async with serving(silence) as server, calling(ConnectionPool()) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.get(server.url, timeout=httpx.Timeout(LIMIT, read=0.03))
        assert repr(client._transport) == EMPTY
        await server.all_gone()


async def test_silence_between_pieces_is_a_read_timeout_which_every_piece_puts_off() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(CHUNKED)
        for _ in range(6):
            await asyncio.sleep(0.1)
            peer.send(chunk(b"x"))
        await peer.gone()

    async with serving(script) as server, calling(ConnectionPool()) as client:
        timeout = httpx.Timeout(LIMIT, read=0.3)
        async with client.stream("GET", server.url, timeout=timeout) as response:
            pieces = response.aiter_raw()
            assert [await anext(pieces) for _ in range(6)] == [b"x"] * 6
            with pytest.raises(httpx.ReadTimeout):
                await anext(pieces)
        assert repr(client._transport) == EMPTY


@pytest.mark.parametrize(
    ("head", "idle"), [(None, 0.03), (LIMIT, 0.03), (0.03, LIMIT), (0.03, None)]
)
async def test_silence_before_the_head_and_between_pieces_have_limits_of_their_own(
    head: float | None, idle: float | None
) -> None:
    async with wiring(WiredPool()) as pool:
        limits = Limits(head=head, idle=idle)
        call = asyncio.create_task(pool.send(pool.origin(URL), GET, [], limits))
        wire = await wired(pool, 0)
        if head != 0.03:
            wire.connection.data_received(CHUNKED + chunk(b"x"))
            pieces = aiter(await call)
            assert await anext(pieces) == b"x"
            with pytest.raises(httpx.ReadTimeout):
                await anext(pieces)
        else:
            with pytest.raises(httpx.ReadTimeout):
                await call


async def test_the_limit_of_the_head_is_none_of_the_body() -> None:
    async with wiring(WiredPool()) as pool:
        call = asyncio.create_task(pool.send(pool.origin(URL), GET, [], Limits(head=0.05)))
        wire = await wired(pool, 0)
        wire.connection.data_received(CHUNKED)
        incoming = await call
        reading = asyncio.create_task(body_of(incoming))
        await asyncio.sleep(0.1)
        wire.connection.data_received(chunk(b"x") + b"0\r\n\r\n")
        assert await reading == b"x"


async def test_a_piece_of_the_request_that_is_not_taken_in_time_is_a_write_timeout() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"x"

    async with wiring(WiredPool()) as pool:
        pool.is_slow = True
        with pytest.raises(httpx.WriteTimeout):
            await sent(pool, "POST", URL, [], pieces(), {"write": 0.02})


async def test_who_waited_for_a_connection_to_one_that_has_gone_sends_nothing_on_it() -> None:
    gone: list[bool] = []
    async with wiring(WiredPool(max_connections=1)) as pool:
        origin = pool.origin(URL)
        first = asyncio.create_task(pool.send(origin, GET, [], Limits()))
        wire = await wired(pool, 0)
        waiting = asyncio.create_task(
            pool.send(origin, GET, [], Limits(), is_gone=lambda: bool(gone))
        )
        next_one = asyncio.create_task(pool.send(origin, GET, [], Limits()))
        await turns(lambda: "2 waiting" in repr(pool))
        gone.append(True)
        wire.connection.data_received(answer())
        await first
        with pytest.raises(httpx.ConnectError, match="has been removed"):
            await waiting
        # The connection is for whoever waits next.
        await turns(lambda: wire.written.count(b"GET") == 2)
        wire.connection.data_received(answer())
        assert (await next_one).status == 200
        assert len(pool.wires) == 1


async def test_a_request_is_not_sent_again_to_one_that_has_gone_meanwhile() -> None:
    answers = iter([False, True])
    async with wiring(WiredPool()) as pool:
        origin = pool.origin(URL)
        first = asyncio.create_task(pool.send(origin, GET, [], Limits()))
        wire = await wired(pool, 0)
        wire.connection.data_received(answer())
        await first
        again = asyncio.create_task(
            pool.send(origin, GET, [], Limits(), is_gone=lambda: next(answers))
        )
        await turns(lambda: wire.written.count(b"GET") == 2)
        wire.end()
        with pytest.raises(httpx.ConnectError, match="has been removed"):
            await again
        assert [bytes(one.written) for one in pool.wires[1:]] == [b""]


async def test_who_asks_for_a_connection_gets_one_that_is_idle_unless_it_must_be_fresh() -> None:
    async with wiring(WiredPool()) as pool:
        call = asyncio.create_task(sent(pool, "GET", URL, [], [], {}))
        wire = await wired(pool, 0)
        wire.connection.data_received(answer())
        await call
        origin = pool.origin(URL)
        used = await origin.take(Limits())
        assert used is wire.connection
        origin.give_back(used)
        fresh = await origin.take(Limits(), fresh=True)
        assert fresh is not used
        fresh.abort()


async def test_reader_may_take_his_time() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(CHUNKED + chunk(b"x"))
        await read.wait()
        peer.send(chunk(b"y") + b"0\r\n\r\n")
        await peer.gone()

    read, pool = asyncio.Event(), ConnectionPool()
    async with serving(script) as server, calling(pool):
        incoming = await start(pool, server.url, read=0.05)
        pieces = aiter(incoming)
        assert await anext(pieces) == b"x"
        await asyncio.sleep(0.1)
        read.set()
        assert await anext(pieces) == b"y"
        with pytest.raises(StopAsyncIteration):
            await anext(pieces)


async def test_piece_that_came_while_the_loop_was_busy_is_no_silence() -> None:
    async with wiring(WiredPool()) as pool:
        call = asyncio.create_task(sent(pool, "GET", URL, [], [], {"read": 0.02}))
        wire = await wired(pool, 0)

        def late() -> None:
            time.sleep(0.03)
            # Where the timer comes between the piece and its reader.
            if "uvloop" in type(loop).__module__:
                wire.connection.data_received(answer(b"hello"))
            else:
                loop.call_soon(wire.connection.data_received, answer(b"hello"))

        loop = asyncio.get_running_loop()
        loop.call_soon(late)
        incoming = await call
        assert await body_of(incoming) == b"hello"
        assert repr(pool) == "<ConnectionPool 1 connections, 1 idle, 0 waiting>"


# Closing


async def test_answer_closed_early_closes_the_socket_at_once() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(CHUNKED + chunk(b"hello"))
        await peer.gone()

    async with serving(script) as server, calling(ConnectionPool()) as client:
        async with client.stream("GET", server.url) as response:
            assert await anext(response.aiter_raw()) == b"hello"
        async with asyncio.timeout(1):
            await server.peers[0].gone()
        assert repr(client._transport) == EMPTY


@pytest.mark.parametrize("said", [b"", CHUNKED, CHUNKED + chunk(b"hello")])
async def test_cancelled_caller_closes_the_socket_at_once(said: bytes) -> None:
    async with serving(saying(said)) as server, calling(ConnectionPool()) as client:
        call = asyncio.create_task(client.get(server.url))
        peer = await server.peer(0)
        await settled(lambda: peer.count)
        call.cancel()
        async with asyncio.timeout(1):
            await peer.gone()
        assert repr(client._transport) == EMPTY


async def test_cancelled_upload_closes_the_socket_at_once() -> None:
    async def script(peer: Peer) -> None:
        peer.transport.pause_reading()
        await stop.wait()

    async def body() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * MB

    stop = asyncio.Event()
    async with serving(script) as server, calling(ConnectionPool()) as client:
        call = asyncio.create_task(client.post(server.url, content=body()))
        await server.peer(0)
        await settled(lambda: server.peers[0].count)
        call.cancel()
        await asyncio.wait([call])
        assert repr(client._transport) == EMPTY
        async with asyncio.timeout(1):
            await server.all_gone()


async def test_closing_an_answer_twice_or_at_its_end_is_nothing() -> None:
    pool = ConnectionPool()
    async with serving(echo) as server, calling(pool):
        incoming = await start(pool, server.url, read=LIMIT)
        assert await body_of(incoming) == b"0"
        await incoming.aclose()
        await incoming.aclose()
        assert repr(pool) == "<ConnectionPool 1 connections, 1 idle, 0 waiting>"


async def test_closed_pool_leaves_nothing() -> None:
    async def script(peer: Peer) -> None:
        if (await peer.request()).target == "/idle":
            peer.send(answer())
        else:
            asked.release()
        await peer.gone()

    asked = asyncio.Semaphore(0)
    pool = ConnectionPool(max_connections=2)
    async with serving(script) as server, serving(script) as other, calling(pool) as client:
        await client.get(other.url + "idle")
        calls = [asyncio.create_task(client.get(server.url)) for _ in range(4)]
        await asked.acquire()
        await asked.acquire()
        assert repr(pool) == "<ConnectionPool 3 connections, 1 idle, 2 waiting>"
        await pool.aclose()
        assert repr(pool) == EMPTY
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, httpx.TransportError) for result in results)
        async with asyncio.timeout(1):
            await server.all_gone()
            await other.all_gone()
        assert len(server.peers) == 2


async def test_closed_pool_passes_over_who_has_left_the_line() -> None:
    async with wiring(WiredPool(max_connections=1)) as pool:
        calls = [asyncio.create_task(sent(pool, "GET", URL, [], [], {})) for _ in range(2)]
        await wired(pool, 0)
        await in_line(pool, 1)
        calls[1].cancel()
        await pool.aclose()
        await asyncio.wait(calls)
        assert calls[1].cancelled()
        assert isinstance(calls[0].exception(), httpx.TransportError)
        assert repr(pool) == EMPTY


async def test_connection_that_opens_as_the_pool_closes_is_closed() -> None:
    pool = ConnectionPool()
    async with serving(echo) as server, calling(pool) as client:
        call = asyncio.create_task(client.get(server.url))
        await turns(lambda: "1 connections" in repr(pool))
        await pool.aclose()
        with pytest.raises(httpx.ConnectError):
            await call


async def test_answer_that_ends_after_the_pool_was_closed_is_an_error() -> None:
    pool = ConnectionPool()
    async with serving(saying(CHUNKED, chunk(b"x"))) as server, calling(pool):
        incoming = await start(pool, server.url)
        await pool.aclose()
        with pytest.raises(httpx.TransportError):
            await body_of(incoming)


async def test_closed_pool_opens_nothing() -> None:
    pool = ConnectionPool()
    await pool.aclose()
    async with serving(echo) as server, calling(pool):
        with pytest.raises(httpx.ConnectError):
            await start(pool, server.url)


# Opening


async def test_nobody_there_is_a_connect_error() -> None:
    async with calling(ConnectionPool()) as client:
        with unused_address() as url, pytest.raises(httpx.ConnectError):
            await client.get(url)


@pytest.fixture
def full_backlog() -> Iterator[str]:
    """An address whose kernel takes no more connections, nor refuses them."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        takers = [socket.socket() for _ in range(3)]
        for taker in takers:
            taker.setblocking(False)
            taker.connect_ex(("127.0.0.1", port))
        yield f"http://127.0.0.1:{port}/"
        for taker in takers:
            taker.close()


async def test_slow_opening_is_a_connect_timeout(full_backlog: str) -> None:
    async with calling(ConnectionPool()) as client:
        with pytest.raises(httpx.ConnectTimeout):
            await client.get(full_backlog, timeout=httpx.Timeout(LIMIT, connect=0.05))


async def test_opening_can_be_cancelled(full_backlog: str) -> None:
    pool = ConnectionPool(max_connections=1)
    async with calling(pool) as client:
        calls = [asyncio.create_task(client.get(full_backlog)) for _ in range(2)]
        await in_line(pool, 1)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert repr(pool) == EMPTY


async def test_closed_pool_waits_for_no_opening(full_backlog: str) -> None:
    pool = ConnectionPool()
    async with calling(pool) as client:
        call = asyncio.create_task(client.get(full_backlog, timeout=2))
        await turns(lambda: "1 connections" in repr(pool))
        await pool.aclose()
        await settled(lambda: len(repr(pool)))
        assert repr(pool) == EMPTY
        with pytest.raises(httpx.ConnectError):
            await call


async def test_unknown_scheme_is_refused() -> None:
    async with calling(ConnectionPool()) as client:
        with pytest.raises(httpx.UnsupportedProtocol):
            await client.get("ftp://engine/")


async def test_unix_socket_is_an_origin() -> None:
    asked = Asked()
    with tempfile.TemporaryDirectory(prefix="UPPER") as folder:
        path = str(Path(folder) / "engine.sock")
        # httpx lowers the letters of a host: those of a path go in as %41.
        host = "".join(
            f"%{ord(c):02X}" if c.isupper() else c
            for c in quote(path, safe="").replace("%2F", "%2f")
        )
        async with serving(asked, path=path) as server, calling(ConnectionPool()) as client:
            for _ in range(2):
                assert (await client.post(f"http+unix://{host}/v1", content=b"a")).text == "ok"
            assert len(server.peers) == 1
        assert asked.requests[0].target == "/v1"
        async with calling(ConnectionPool()) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get("http+unix://%2Ftmp%2Fnobody%2Fhere/")


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    return context


async def test_tls_is_spoken_to_a_trusted_server(authority: trustme.CA) -> None:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    asked, pool = Asked(), ConnectionPool(ssl_context=context)
    async with serving(asked, context=tls(authority)) as server, calling(pool) as client:
        for _ in range(2):
            assert (await client.post(server.url, content=b"x" * MB)).text == "ok"
        assert len(server.peers) == 1
    assert [len(request.body) for request in asked.requests] == [MB, MB]


async def test_reader_that_does_not_read_stops_the_server_behind_tls(
    authority: trustme.CA,
) -> None:
    sent = 0

    async def script(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (32 * MB))
        for _ in range(128):
            peer.send(b"x" * (MB // 4))
            sent += MB // 4
            await peer.drain()
        await peer.gone()

    context = ssl.create_default_context()
    authority.configure_trust(context)
    pool = ConnectionPool(ssl_context=context)
    async with (
        serving(script, context=tls(authority)) as server,
        calling(pool) as client,
        client.stream("GET", server.url) as response,
    ):
        assert await settled(lambda: sent) < 20 * MB
        assert len(await response.aread()) == 32 * MB


async def test_untrusted_certificate_is_a_connect_error(authority: trustme.CA) -> None:
    async with serving(echo, context=tls(authority)) as server, calling(ConnectionPool()) as client:
        with pytest.raises(httpx.ConnectError, match="certificate"):
            await client.get(server.url)


async def test_closed_pool_waits_for_no_handshake() -> None:
    pool = ConnectionPool()
    async with serving(silence) as server, calling(pool) as client:
        url = server.url.replace("http:", "https:")
        call = asyncio.create_task(client.get(url, timeout=2))
        peer = await server.peer(0)
        await peer.until(lambda: peer.count > 0)
        await pool.aclose()
        try:
            async with asyncio.timeout(1):
                await peer.gone()
        finally:
            with pytest.raises(httpx.ConnectError):
                await call


# The oracle


@dataclass(frozen=True)
class Verdict:
    """What a client made of the bytes of a connection."""

    status: int = 0
    fields: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    is_whole: bool = False
    is_reusable: bool = False


async def verdict_of_pool(method: str, pieces: Sequence[bytes]) -> Verdict:
    async with wiring(WiredPool(pieces)) as pool:
        verdict = await verdict_of_call(pool, method)
        return replace(verdict, is_reusable=pool.wires[0].was_kept)


async def verdict_of_call(pool: WiredPool, method: str) -> Verdict:
    try:
        incoming = await sent(pool, method, URL, [(b"host", b"engine")], [], {})
    except httpx.TransportError:
        return Verdict()
    body, is_whole = b"", True
    try:
        async for piece in incoming:
            body += piece
    except httpx.TransportError:
        is_whole = False
    fields = tuple(
        # h11 lowers this value, which has no case.
        (name.lower(), value.lower() if name.lower() == b"transfer-encoding" else value)
        for name, value in incoming.fields
    )
    return Verdict(incoming.status, fields, body, is_whole)


async def verdict_after_another(before: Sequence[bytes], pieces: Sequence[bytes]) -> Verdict | None:
    """Of the second answer on a connection; None if it was not kept after the first."""
    async with wiring(WiredPool()) as pool:
        first = asyncio.create_task(verdict_of_call(pool, "GET"))
        wire = await wired(pool, 0)
        for piece in before:
            if not wire.is_aborted:
                wire.connection.data_received(piece)
        if not wire.connection.was_used:
            wire.end()
        await first
        if wire.is_aborted or not wire.connection.was_used:
            return None
        wire.written.clear()
        second = asyncio.create_task(verdict_of_call(pool, "GET"))
        await wired(pool, 0)
        for piece in pieces:
            if not wire.is_aborted:
                wire.connection.data_received(piece)
        wire.end()
        return await second


def verdict_of_h11(method: str, pieces: Sequence[bytes]) -> Verdict:
    client = h11.Connection(h11.CLIENT, max_incomplete_event_size=MB)
    client.send(h11.Request(method=method, target="/", headers=[("host", "engine")]))
    client.send(h11.EndOfMessage())
    verdict = Verdict()
    try:
        for piece in (*pieces, b""):
            client.receive_data(piece)
            while (event := client.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Response):
                    fields = tuple((bytes(name), bytes(value)) for name, value in event.headers)
                    verdict = replace(verdict, status=event.status_code, fields=fields)
                elif isinstance(event, h11.Data):
                    verdict = replace(verdict, body=verdict.body + event.data)
                elif isinstance(event, h11.EndOfMessage):
                    # Empty lines after an answer are skipped by every parser of the next.
                    rest = client.trailing_data[0].strip(b"\r\n")
                    is_reusable = client.their_state is h11.DONE and not rest
                    return replace(verdict, is_whole=True, is_reusable=is_reusable)
                elif isinstance(event, h11.ConnectionClosed):
                    return verdict
    except h11.RemoteProtocolError:
        pass
    return verdict


TOKEN = b"!#$%&'*+-.^_`|~0123456789abcXYZ"


def among(alphabet: bytes, least: int, most: int) -> st.SearchStrategy[bytes]:
    return st.lists(st.sampled_from(alphabet), min_size=least, max_size=most).map(bytes)


SPACE = st.sampled_from([b"", b" ", b"\t", b" \t "])
NAMES = among(TOKEN, 1, 8).map(lambda token: b"X" + token)
VALUES = among(b"abz ,;=\"'\\\t\x80\xff:", 0, 12)
FIELDS = st.lists(
    st.builds(lambda *parts: b"%b:%b%b%b\r\n" % parts, NAMES, SPACE, VALUES, SPACE), max_size=4
)
KNOWN_FIELDS = st.lists(
    st.sampled_from(
        [
            b"Connection: close\r\n",
            b"connection: keep-alive\r\n",
            b"CONNECTION: te,  close\r\n",
            b"connection:\r\n",
            b"keep-alive: timeout=5\r\n",
            b"upgrade: h2c\r\n",
            b"content-type: application/json\r\n",
            b"date: Thu, 01 Jan 1970 00:00:00 GMT\r\n",
        ]
    ),
    max_size=2,
)
REASONS = st.sampled_from([b"", b" ", b" OK", b" Not  so\tfast", b" caf\xe9"])
EXTENSIONS = st.sampled_from([b"", b"", b";a", b";a=b", b';a="b c";d'])


@st.composite
def chunked(draw: st.DrawFn, body: bytes) -> bytes:
    parts = []
    while body:
        size = draw(st.integers(1, len(body)))
        digits = draw(st.sampled_from([b"%x", b"%X", b"0%x", b"000%x"])) % size
        parts.append(b"%b%b\r\n%b\r\n" % (digits, draw(EXTENSIONS), body[:size]))
        body = body[size:]
    last = draw(st.sampled_from([b"0", b"000"]))
    trailers = b"".join(draw(FIELDS)) if draw(st.booleans()) else b""
    return b"".join([*parts, last, draw(EXTENSIONS), b"\r\n", trailers, b"\r\n"])


@st.composite
def interim(draw: st.DrawFn) -> bytes:
    status = draw(st.sampled_from([b"100", b"102", b"103", b"199"]))
    return b"HTTP/1.1 %b%b\r\n%b\r\n" % (status, draw(REASONS), b"".join(draw(FIELDS)))


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """The bytes of an answer: legal, however odd."""
    body = draw(
        st.binary(max_size=60) | st.sampled_from([b"0\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
    )
    framing = draw(st.sampled_from(["length", "chunked", "both", "close"]))
    fields = draw(FIELDS) + draw(KNOWN_FIELDS)
    if framing == "length":
        fields.append(b"Content-Length:%b%d%b\r\n" % (draw(SPACE), len(body), draw(SPACE)))
    elif framing != "close":
        name = draw(st.sampled_from([b"chunked", b"Chunked", b"CHUNKED"]))
        fields.append(b"Transfer-Encoding:%b%b\r\n" % (draw(SPACE), name))
        if framing == "both":
            fields.append(b"content-length: %d\r\n" % draw(st.integers(0, 99)))
        body = draw(chunked(body))
    version = draw(st.sampled_from([b"1.1", b"1.1", b"1.1", b"1.0"]))
    status = draw(st.sampled_from([200, 200, 200, 201, 204, 304, 404, 413, 503, 600, 999]))
    head = b"HTTP/%b %d%b\r\n" % (version, status, draw(REASONS))
    before = b"".join(draw(st.lists(interim(), max_size=2)))
    after = draw(st.sampled_from([b"", b"", b"", b"x", b"HTTP/1.1 500 No\r\n\r\n"]))
    return b"".join([before, head, *draw(st.permutations(fields)), b"\r\n", body, after])


@st.composite
def garbled(draw: st.DrawFn) -> bytes:
    """An answer that something has happened to."""
    said = draw(answers())
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(said)))
        end = min(len(said), at + draw(st.integers(0, 4)))
        put = draw(
            among(b"\0\r\n :;,0189afHT/\x80", 0, 3)
            | st.sampled_from(
                [b"\r\n", b"\r\n\r\n", b"0\r\n\r\n", b"HTTP/1.1 ", b"ffffffffffffffff"]
            )
        )
        said = said[:at] + put + said[end:]
    return said[: draw(st.integers(0, len(said)))] if draw(st.booleans()) else said


@st.composite
def in_pieces(draw: st.DrawFn, said: st.SearchStrategy[bytes]) -> list[bytes]:
    whole = draw(said)
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    ends = [0, *cuts, len(whole)]
    return [whole[a:b] for a, b in itertools.pairwise(ends) if a < b]


METHODS = st.sampled_from(["GET", "GET", "GET", "HEAD"])


def test_every_legal_answer_is_read_as_h11_reads_it() -> None:
    with asyncio.Runner() as runner:

        @settings(max_examples=200, derandomize=True, database=None, deadline=None)
        @given(METHODS, in_pieces(answers()))
        def check(method: str, pieces: list[bytes]) -> None:
            ours = runner.run(verdict_of_pool(method, pieces))
            theirs = verdict_of_h11(method, pieces)
            if b"HTTP/1.0" not in b"".join(pieces):
                # h11 never keeps a connection to HTTP/1.0, which may ask for it.
                assert ours.is_reusable <= theirs.is_reusable
            assert replace(ours, is_reusable=theirs.is_reusable) == theirs

        check()


def test_what_an_answer_was_does_not_show_in_the_next_on_its_connection() -> None:
    kept = 0
    with asyncio.Runner() as runner:

        @settings(max_examples=200, derandomize=True, database=None, deadline=None)
        @given(in_pieces(answers()), in_pieces(answers()))
        def check(before: list[bytes], pieces: list[bytes]) -> None:
            nonlocal kept
            ours = runner.run(verdict_after_another(before, pieces))
            if ours is not None:
                kept += 1
                assert ours == replace(verdict_of_h11("GET", pieces), is_reusable=False)

        check()
    assert kept > 20


LAX = re.compile(
    # Empty lines before a status line hide nothing.
    rb"(^|\r\n\r\n)[\r\n]+HTTP/"
    # Nobody sees a control character in a reason.
    rb"|HTTP/\d\.\d \d{3}[^\r\n]*[^\t -~\x80-\xff\r\n]"
)
"""What httptools reads and h11 refuses, with the reasons why that is good enough."""


def test_whatever_is_accepted_of_a_garbled_answer_is_read_as_h11_reads_it() -> None:
    with asyncio.Runner() as runner:

        @settings(max_examples=300, derandomize=True, database=None, deadline=None)
        @given(METHODS, in_pieces(garbled()))
        def check(method: str, pieces: list[bytes]) -> None:
            assume(not LAX.search(b"".join(pieces)))
            ours = runner.run(verdict_of_pool(method, pieces))
            theirs = verdict_of_h11(method, pieces)
            if b"HTTP/1.0" not in b"".join(pieces):
                # h11 never keeps a connection to HTTP/1.0, which may ask for it.
                assert ours.is_reusable <= theirs.is_reusable
            if ours.is_whole:
                assert replace(ours, is_reusable=theirs.is_reusable) == theirs
            elif ours.status and theirs.status:
                # Either may hand on more than the other of a body that breaks.
                assert (ours.status, ours.fields) == (theirs.status, theirs.fields)
                assert ours.body.startswith(theirs.body) or theirs.body.startswith(ours.body)

        check()
