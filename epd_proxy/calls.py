"""
The engines as one request sees them: who serves a call, how it is made, what is noted about it.

Every stage stands on this: ``pick`` goes to the selectors, ``ask`` and ``open`` to ``upstream``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from epd_proxy.asgi import Exchange, Step
from epd_proxy.errors import RawHeaders
from epd_proxy.payload import Buffer
from epd_proxy.registry import Instance, Replica, Role
from epd_proxy.selectors import Selection
from epd_proxy.upstream import Answer, Upstream, accepted, forwarded_headers


class Calls:
    """The calls made on behalf of one request."""

    def __init__(self, exchange: Exchange, selection: Selection, upstream: Upstream) -> None:
        self._exchange = exchange
        self._selection = selection
        self._upstream = upstream
        self._headers = forwarded_headers(exchange.headers.raw)
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
        async with self._open(instance, name, body, self._headers) as answer:
            return await accepted(answer)

    def open(
        self, instance: Instance, name: str, body: Sequence[Buffer]
    ) -> AbstractAsyncContextManager[Answer]:
        """
        A decode call: its answer, whatever its status, once the head is there.

        Leaving the context before the answer's end drops the connection. Raises UpstreamError.
        """
        headers = list(self._headers)
        if encodings := self._exchange.headers.get("accept-encoding"):
            headers.append((b"accept-encoding", encodings.encode("latin-1")))
        if (rank := self.replica(instance).rank) is not None:
            headers.append((b"x-data-parallel-rank", str(rank).encode()))
        return self._open(instance, name, body, headers)

    @asynccontextmanager
    async def _open(
        self, instance: Instance, name: str, body: Sequence[Buffer], headers: RawHeaders
    ) -> AsyncIterator[Answer]:
        # Engines keep requests by their ids, so no two calls may share one, retries included.
        request_id = f"{self._exchange.request_id}:{name}:{secrets.token_hex(3)}"
        began = time.perf_counter()
        status = 0
        try:
            async with await self._upstream.chat(instance, headers, request_id, body) as answer:
                status = answer.status
                yield answer
        finally:
            seconds = time.perf_counter() - began
            self._exchange.trace.append(Step(instance.role, instance.url, seconds, status))
