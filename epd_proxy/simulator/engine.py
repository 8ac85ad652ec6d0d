"""
One engine: what it is told, what tests see of it, and the way of a chat request through it.

    _serve -> _chat -> _answer -> _outcome    a Failure or an EngineError, as a Response
                                  _reply      or a Reply, whole or as a _stream
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from epd_proxy.simulator.answers import Reply, events, whole
from epd_proxy.simulator.body import Json, check_body, choice_count, load_body
from epd_proxy.simulator.errors import EngineError, Failure
from epd_proxy.simulator.features import Feature, Processor
from epd_proxy.simulator.parts import check_items, read_messages
from epd_proxy.simulator.serving import CHAT, lifespan, page, run_until_left
from epd_proxy.simulator.speech import Speech, speak
from epd_proxy.simulator.transfers import KVHandles, lost, report

ROLES = ("encode", "prefill", "decode", "prefill_decode")


@dataclass(frozen=True)
class Received:
    """One request to ``/v1/chat/completions``, as it arrived."""

    headers: list[tuple[bytes, bytes]]
    body: bytes


class Simulator:
    """
    One engine, an ASGI app.

    ``role`` is encode, prefill, decode or prefill_decode; ``model`` the one
    name it answers to, ``"*"`` for any. An answer takes ``latency`` seconds; in
    a stream the head comes at once, the first event after ``latency``, each
    further one after a twentieth of it. ``chunks`` is the number of content
    chunks, and of tokens, of an answer that nothing cuts short. ``name`` is
    told in ``system_fingerprint``.

    Tests look at ``received`` (newest last) and ``active`` (chat requests
    running now), and put what should go wrong into ``failures``.
    """

    def __init__(
        self,
        role: str,
        *,
        model: str = "epd-demo",
        latency: float = 0.0,
        chunks: int = 8,
        name: str = "",
    ) -> None:
        if role not in ROLES:
            raise ValueError(f"role must be one of {', '.join(ROLES)}, not {role!r}")
        if chunks < 1:
            raise ValueError(f"chunks must be at least 1, not {chunks}")
        self.role = role
        self.model = model
        self.latency = latency
        self.chunks = chunks
        self.name = name
        self.received: deque[Received] = deque(maxlen=64)
        self.failures: deque[Failure] = deque()
        self.active = 0
        self._processor = Processor()
        self._handles = KVHandles()

    def __repr__(self) -> str:
        return f"<Simulator {self.role} {self.name!r} [{self.active} active]>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if (scope["method"], path) == ("POST", CHAT):
            await self._chat(scope, receive, send)
        else:
            await page(scope["method"], path, self.model)(scope, receive, send)

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            raw = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        self.received.append(Received(list(scope["headers"]), raw))
        await run_until_left(self._answer(raw, scope, receive, send), receive)

    async def _answer(self, raw: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        self.active += 1
        try:
            outcome = self._outcome(Headers(scope=scope), load_body(raw))
            if isinstance(outcome, Response):
                await outcome(scope, receive, send)
            elif outcome.stream:
                await self._stream(outcome, send)
            else:
                await asyncio.sleep(self.latency)
                await whole(outcome)(scope, receive, send)
        finally:
            self.active -= 1

    async def _stream(self, reply: Reply, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        pause = self.latency
        for event in events(reply):
            await asyncio.sleep(pause)
            await send({"type": "http.response.body", "body": event, "more_body": True})
            pause = self.latency / 20
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _outcome(self, headers: Headers, body: Any) -> Response | Reply:
        # A decode that refuses a request has told prefill to free the blocks.
        fresh = self._handles.spend(body)
        if self.failures:
            return self.failures.popleft().response()
        try:
            check_body(headers, body, self.model)
            return self._reply(headers, body, fresh)
        except EngineError as error:
            return error.response()

    def _reply(self, headers: Headers, body: Json, fresh: bool) -> Reply:
        items, words = read_messages(body)
        check_items(items, self.role)
        features = self._processor.features(items, body, self.model)
        prompt_tokens = _prompt_tokens(features, words)
        speech = self._speech(features, words, body)
        request_id = _request_id(headers, body)
        hands_on = self._hands_on(speech, body)
        return Reply(
            id=request_id,
            model=body.get("model") or self.model,
            fingerprint=f"epd-simulator-{self.name}",
            created=int(time.time()),
            choices=choice_count(body),
            prompt_tokens=prompt_tokens,
            speech=speech,
            kv=self._handles.make(request_id, prompt_tokens) if hands_on else None,
            ec=report(features) if self.role == "encode" else None,
            stream=bool(body.get("stream")),
            include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
            lost=lost(self.role, features, body, fresh),
        )

    def _speech(self, features: list[Feature], words: str, body: Json) -> Speech:
        if self.role == "encode":
            return Speech([])
        return speak(features, words, self.chunks, body)

    def _hands_on(self, speech: Speech, body: Json) -> bool:
        """Whether a decode is to go on from here; not if the text has come to its end."""
        asked = body.get("kv_transfer_params") or {}
        goes_on = speech.finish_reason == "length"
        return self.role == "prefill" and goes_on and bool(asked.get("do_remote_decode"))


def _prompt_tokens(features: list[Feature], words: str) -> int:
    return 8 + len(words) // 4 + sum(feature.tokens() or 1 for feature in features)


def _request_id(headers: Headers, body: Json) -> str:
    name = headers.get("x-request-id") or body.get("request_id") or uuid.uuid4().hex
    return f"chatcmpl-{name}"
