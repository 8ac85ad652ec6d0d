"""
Scripted engines on real sockets, in the event loop of the test.

An engine answers well until it is told otherwise: ``then`` is for its next calls, ``always`` for
all of them. What it does with one call is an ``Act``; ``plays`` makes one out of bytes and of other
acts, so that ``plays(STREAM, chunk(ROLE), reset)`` reads as what goes over the wire.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from http.client import responses
from typing import Any

from tests.driver import CHAT
from tests.wire import Peer, Request, Server

Act = Callable[["Call"], Awaitable[None]]
"""What an engine does with one call. If it leaves the connection open, the next call may come."""


class Call:
    """A chat request as an engine got it, and the connection on which it came."""

    def __init__(self, request: Request, peer: Peer) -> None:
        self.headers = request.headers
        self.body = request.body
        self.peer = peer

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def parts(self) -> list[Any]:
        """The content of the last message."""
        parts: list[Any] = self.json["messages"][-1]["content"]
        return parts

    async def gone(self) -> None:
        """Until the connection has been closed."""
        await self.peer.gone()


class Engine(Server):
    """One engine: the calls it got, and what it does with those that come."""

    def __init__(self, answer: Act) -> None:
        super().__init__(self._converse)
        self.listener: asyncio.Server
        self.calls: list[Call] = []
        self.answer = answer
        self._well = answer
        self._next: deque[Act] = deque()
        self._called = asyncio.Event()

    def then(self, *acts: Act) -> None:
        """One act for each of the next calls; after them it does what it did before."""
        self._next.extend(acts)

    def always(self, act: Act) -> None:
        self.answer = act

    def restore(self) -> None:
        """It answers well again."""
        self._next.clear()
        self.answer = self._well

    async def call(self, number: int = 0) -> Call:
        """The call of that number, from 0, once it is there."""
        while len(self.calls) <= number:
            self._called.clear()
            await self._called.wait()
        return self.calls[number]

    @property
    def open_connections(self) -> int:
        return sum(not peer.is_gone for peer in self.peers)

    async def stop(self) -> None:
        self.listener.close()
        await super().stop()

    async def _converse(self, peer: Peer) -> None:
        while True:
            request = await peer.request()
            if request.target != CHAT:
                # ``GET /health``
                peer.send(whole(200))
                continue
            call = Call(request, peer)
            self.calls.append(call)
            self._called.set()
            await (self._next.popleft() if self._next else self.answer)(call)


@asynccontextmanager
async def listening(engine: Engine) -> AsyncIterator[Engine]:
    """The engine on a port of its own. It may be stopped before the end."""
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: Peer(engine), "127.0.0.1", 0, backlog=500)
    engine.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    engine.listener = listener
    try:
        yield engine
    finally:
        await engine.stop()


@contextmanager
def deaf_address() -> Iterator[str]:
    """Where a connection is neither made nor refused: the listener's queue is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = listener.getsockname()
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(address)
        yield f"http://127.0.0.1:{address[1]}"


# What engines do.


def plays(*steps: bytes | Act) -> Act:
    """Bytes are sent, acts are done, one after another, for as long as somebody listens."""

    async def act(call: Call) -> None:
        for step in steps:
            if call.peer.is_gone:
                return
            if isinstance(step, bytes):
                call.peer.send(step)
                await call.peer.drain()
            else:
                await step(call)

    return act


async def hang(call: Call) -> None:
    """Nothing, until the caller has gone."""
    await call.gone()


async def reset(call: Call) -> None:
    if not call.peer.is_gone:
        call.peer.reset()


async def close(call: Call) -> None:
    call.peer.close()


def until(event: asyncio.Event) -> Act:
    """Waits for the test."""

    async def act(call: Call) -> None:
        await event.wait()

    return act


def pause(seconds: float) -> Act:
    """Waits: for tests of time alone."""

    async def act(call: Call) -> None:
        await asyncio.sleep(seconds)

    return act


def answers(status: int, body: bytes = b"", *fields: str) -> Act:
    """A whole answer."""
    return plays(whole(status, body, *fields))


def streams(*steps: bytes | Act, end: bytes | Act = b"0\r\n\r\n") -> Act:
    """A stream: events, each a chunk of its own, and acts between them."""
    return plays(STREAM, *[chunk(step) if isinstance(step, bytes) else step for step in steps], end)


# What goes over the wire.


def head(status: int, *fields: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} {responses.get(status, '')}", *fields, "", ""]).encode()


def whole(status: int, body: bytes = b"", *fields: str) -> bytes:
    """JSON, unless a field says otherwise."""
    if not any(field.startswith("content-type:") for field in fields):
        fields = ("content-type: application/json", *fields)
    return head(status, *fields, f"content-length: {len(body)}") + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"
CHUNKED = "transfer-encoding: chunked"
STREAM = head(200, "content-type: text/event-stream; charset=utf-8", CHUNKED)


def event(data: bytes | dict[str, Any]) -> bytes:
    """An event of JSON as vLLM writes it, or of bytes as they are."""
    if isinstance(data, dict):
        data = json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
    return b"data: " + data + b"\n\n"


def delta(finish_reason: str | None = None, **fields: Any) -> bytes:
    """A chunk of a streamed answer."""
    choice = {"index": 0, "delta": fields, "logprobs": None, "finish_reason": finish_reason}
    return event({"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [choice]})


def error_event(code: Any, message: str = "the engine gave up") -> bytes:
    error = {"message": message, "type": "InternalServerError", "param": None, "code": code}
    return event({"error": error})


ROLE = delta(role="assistant", content="")
CONTENT = delta(content="描述 café 🟥")
STOP = delta("stop", content="")
ABORT = delta("abort")
DONE = event(b"[DONE]")
KEEP_ALIVE = b": keep-alive\n\n"

EVENTS = (ROLE, CONTENT, STOP, DONE)
COMPLETION = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "描述 café 🟥"},
                "finish_reason": "stop",
            }
        ],
    },
    ensure_ascii=False,
).encode()


def good(stream: bool) -> bytes:
    """The body of what a decode engine answers by default."""
    return b"".join(EVENTS) if stream else COMPLETION


# What an engine of each role answers by default.


def completion(finish_reason: str = "stop", **fields: Any) -> bytes:
    message = {"role": "assistant", "content": ""}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    params = {"kv_transfer_params": None, "ec_transfer_params": None}
    body = {"object": "chat.completion", "choices": [choice], **params, **fields}
    return json.dumps(body).encode()


async def encodes(call: Call) -> None:
    """Reports every part by its uuid, with its place and the handle of the connector in use."""
    entries: dict[str, dict[str, Any]] = {}
    pushed = (call.json.get("ec_transfer_params") or {}).get("ec_items")
    for index, part in enumerate(call.parts):
        if pushed:
            handle = {"transfer_id": pushed[index]["transfer_id"]}
        else:
            handle = {"peer_host": "10.0.0.11", "peer_port": 5601, "size_bytes": 4096}
        entry = {
            "modality": "image",
            "item_indices": [],
            "metadata": {"image_grid_thw": [[1, 2, 2]]},
        }
        entries.setdefault(part["uuid"], {**entry, **handle})["item_indices"].append(index)
    call.peer.send(whole(200, completion(ec_transfer_params=entries)))


HANDLE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[12, 13]],
    "remote_engine_id": "6d1f",
    "remote_request_id": "chatcmpl-1-0c77",
    "remote_host": "10.0.0.31",
    "remote_port": 5600,
}

prefills = answers(200, completion("length", kv_transfer_params=HANDLE))
no_handle = answers(200, completion("length"))


async def decodes(call: Call) -> None:
    act = streams(*EVENTS) if call.json.get("stream") else answers(200, COMPLETION)
    await act(call)


DEFAULTS: dict[str, Act] = {"encode": encodes, "prefill": prefills, "decode": decodes}
