"""
The engines as one request sees them: who serves a call, how it is made, what is noted about it.

Every stage stands on this: ``pick`` goes to the selectors, ``ask`` and ``open`` to ``upstream``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from epd_proxy.asgi import Exchange, Step
from epd_proxy.errors import RawHeaders
from epd_proxy.payload import Buffer
from epd_proxy.registry import Instance, Replica, Role
from epd_proxy.selectors import Selection
from epd_proxy.upstream import Answer, Forwarded, Upstream, accepted


class Calls:
    """The calls made on behalf of one request."""

    def __init__(self, exchange: Exchange, selection: Selection, upstream: Upstream) -> None:
        self._exchange = exchange
        self._selection = selection
        self._upstream = upstream
        self._forwarded = Forwarded(exchange.headers)
        self._replicas: dict[Instance, Replica] = {}

    def has(self, role: Role) -> bool:
        """Whether the fleet has the role. Raises NoInstance (503) if it has, but nobody ready."""
        return self._selection.has(role)

    def pick(
        self, role: Role, key: str | None = None, *, avoid: Instance | None = None
    ) -> Instance:
        return self._selection.pick(role, key, avoid=avoid)

    def replica(self, instance: Instance) -> Replica:
        """Chosen once, so that encode and the consumer mean the same, on a retry too."""
        if instance not in self._replicas:
            self._replicas[instance] = instance.next_replica()
        return self._replicas[instance]

    async def ask(self, instance: Instance, name: str, body: Sequence[Buffer]) -> bytes:
        """
        An encode or prefill call from beginning to end; the body of its 200.

        Raises EngineRefusal for what the caller has to know, 4xx above all, and UpstreamError.
        """
        async with self._call(instance, name, body) as answer:
            return await accepted(answer)

    def open(self, instance: Instance, name: str, body: Sequence[Buffer]) -> Call:
        """A decode call."""
        extra: RawHeaders = []
        if encodings := self._exchange.header(b"accept-encoding"):
            extra.append((b"accept-encoding", encodings.encode("latin-1")))
        if (rank := self.replica(instance).rank) is not None:
            extra.append((b"x-data-parallel-rank", str(rank).encode()))
        return self._call(instance, name, body, extra)

    def _call(
        self,
        instance: Instance,
        name: str,
        body: Sequence[Buffer],
        extra: RawHeaders | None = None,
    ) -> Call:
        # Engines keep requests by their ids, so no two calls may share one, retries included.
        request_id = f"{self._exchange.request_id}:{name}:{random.getrandbits(24):06x}"
        answer = self._upstream.chat(instance, self._forwarded, request_id, body, extra)
        return Call(instance, answer, self._exchange.trace)


class Call:
    """
    One call, as a context: its answer, whatever its status, once the head is there.

    Leaving the context before the answer's end drops the connection. Raises UpstreamError.
    """

    __slots__ = ("_answer", "_began", "_coming", "_instance", "_trace")

    def __init__(
        self, instance: Instance, coming: Coroutine[Any, Any, Answer], trace: list[Step]
    ) -> None:
        self._instance = instance
        self._coming = coming
        self._trace = trace
        self._answer: Answer

    async def __aenter__(self) -> Answer:
        self._began = time.perf_counter()
        try:
            self._answer = await self._coming
        except BaseException:
            self._note(0)
            raise
        return self._answer

    async def __aexit__(self, *exc_info: object) -> None:
        await self._answer.aclose()
        self._note(self._answer.status)

    def _note(self, status: int) -> None:
        seconds = time.perf_counter() - self._began
        self._trace.append(Step(self._instance.role, self._instance.url, seconds, status))
