"""
What is not inference: ``/health``, ``/live`` and ``/v1/models``.
"""

from __future__ import annotations

import asyncio

import msgspec

from epd_proxy.asgi import Exchange
from epd_proxy.config import Config
from epd_proxy.decode import relay
from epd_proxy.errors import RawHeaders, UpstreamError
from epd_proxy.registry import Instance, Role
from epd_proxy.selectors import RoundRobin, Selection
from epd_proxy.upstream import Upstream, forwarded_headers

_JSON: RawHeaders = [(b"content-type", b"application/json")]


class Admin:
    """The handlers of these paths."""

    def __init__(self, config: Config, selection: Selection, upstream: Upstream) -> None:
        self._timeout = config.probe_timeout or None
        self._selection = selection
        self._upstream = upstream
        # A rotation of its own: questions about models must not shift that of the answers.
        self._informants = RoundRobin()

    async def live(self, exchange: Exchange) -> None:
        """200 as long as the process answers at all."""
        await exchange.respond(200, _JSON, b'{"proxy":"healthy"}')

    async def health(self, exchange: Exchange) -> None:
        """
        200, or 503 if some role of the fleet has no engine that answers ``GET /health`` with 200.

        Asks every engine at each call, all at once. The body is that of vLLM's proxy.
        """
        states = dict(zip(Role, await asyncio.gather(*map(self._state, Role)), strict=True))
        clusters = {f"{role}_cluster": state for role, state in states.items()}
        body = msgspec.json.encode({"proxy": "healthy", **clusters})
        await exchange.respond(503 if "unhealthy" in states.values() else 200, _JSON, body)

    async def _state(self, role: Role) -> str:
        if not self._selection.registry.is_configured(role):
            return "empty"
        ready = self._selection.registry.ready(role)
        return (
            "healthy" if any(await asyncio.gather(*map(self._is_healthy, ready))) else "unhealthy"
        )

    async def _is_healthy(self, instance: Instance) -> bool:
        try:
            async with (
                asyncio.timeout(self._timeout),
                await self._upstream.get(instance, "/health", []) as answer,
            ):
                await answer.read()
                return answer.status == 200
        except (UpstreamError, TimeoutError):
            return False

    async def models(self, exchange: Exchange) -> None:
        """The list of models of a decode server. Raises NoInstance, UpstreamError."""
        instance = self._informants.pick(self._selection.ready(Role.DECODE), None)
        headers = forwarded_headers(exchange.headers.raw)
        with instance.in_use():
            async with await self._upstream.get(instance, "/v1/models", headers) as answer:
                await relay(answer, exchange)
