"""
What is not inference: ``/health``, ``/live``, ``/v1/models`` and profiling.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Coroutine, Iterable
from typing import Any

import msgspec

from epd_proxy.asgi import Exchange, Patience
from epd_proxy.config import Config
from epd_proxy.decode import relay
from epd_proxy.errors import Forbidden, NoInstance, NotFound, RawHeaders, UpstreamError
from epd_proxy.payload import NO_JSON, to_json
from epd_proxy.registry import Instance, Lease, Role
from epd_proxy.selectors import RoundRobin, Selection
from epd_proxy.upstream import Forwarded, Upstream, accepted, error_of

_JSON: RawHeaders = [(b"content-type", b"application/json")]


class Admin:
    """The handlers of these paths."""

    def __init__(self, config: Config, selection: Selection, upstream: Upstream) -> None:
        self._config = config
        self._timeout = config.probe_timeout or None
        self._selection = selection
        self._upstream = upstream
        # A rotation of its own: questions about models must not shift that of the answers.
        self._informants = RoundRobin()
        self._key = config.admin_api_key.encode()
        self._bearer = f"Bearer {config.profile_api_key}".encode()
        self._patience = Patience(config.body_timeout)
        self._max_body_size = config.max_body_size

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
        headers = Forwarded(exchange.headers, self._config).fields
        with Lease() as lease:
            lease.take(instance)
            async with await self._upstream.get(instance, "/v1/models", headers) as answer:
                if answer.status >= 300:
                    raise await error_of(answer)
                await relay(answer, exchange)

    async def start_profile(self, exchange: Exchange) -> None:
        await self._profile(exchange, "/start_profile")

    async def stop_profile(self, exchange: Exchange) -> None:
        await self._profile(exchange, "/stop_profile")

    async def _profile(self, exchange: Exchange, path: str) -> None:
        """
        Passes the body to one instance of each role, and answers what each of them said.

        A server without a profiler lacks the path, which is null in the answer. Raises NotFound
        where no key is set, Forbidden (403), NoInstance (503) if nobody has a profiler.
        """
        if not self._key:
            raise NotFound(f"there is nothing at {path}")
        given = exchange.header(b"x-api-key").encode("latin-1")
        if not hmac.compare_digest(given, self._key):
            raise Forbidden("profiling needs the right X-API-Key")
        body = await exchange.read(self._max_body_size, self._patience)
        roles = [role for role in Role if self._selection.has(role)]
        # The first, not the next: what was started must be stopped.
        instances = [self._selection.ready(role)[0] for role in roles]
        said = await _all(self._profile_one(each, path, body) for each in instances)
        if not any(said):
            raise NoInstance("no server has a profiler")
        answers = {role: msgspec.Raw(each) for role, each in zip(roles, said, strict=True) if each}
        content = to_json({role: answers.get(role) for role in Role})
        await exchange.respond(200, _JSON, content)

    async def _profile_one(self, instance: Instance, path: str, body: bytes) -> bytes | None:
        headers = [(b"authorization", self._bearer)]
        async with await self._upstream.post(instance, path, headers, [body]) as answer:
            if answer.status == 404:
                return None
            content = await accepted(answer)
        return content if _is_json(content) else b"{}"


async def _all(calls: Iterable[Coroutine[Any, Any, bytes | None]]) -> list[bytes | None]:
    """All results; the first failure when every call has ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def _is_json(content: bytes) -> bool:
    try:
        msgspec.json.decode(content)
    except NO_JSON:
        return False
    return True
