"""
What is not inference: ``/health``, ``/live``, ``/v1/models`` and profiling.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import msgspec

from epd_proxy.admission import AdminKey
from epd_proxy.asgi import Exchange, Patience
from epd_proxy.calls import Fleet
from epd_proxy.config import Config
from epd_proxy.decode import relay
from epd_proxy.door import Door
from epd_proxy.errors import Forbidden, NoInstance, NotFound, RawHeaders, UpstreamError
from epd_proxy.keeper import Keeper
from epd_proxy.payload import NO_JSON, to_json
from epd_proxy.registry import Instance, Role
from epd_proxy.upstream import Forwarded, accepted, error_of

_JSON: RawHeaders = [(b"content-type", b"application/json")]


_MODELS = "/v1/models"
_SECONDS_KEPT = 1.0
_MOST_KEPT = 100


class _Models(msgspec.Struct):
    data: list[dict[str, object]]


class Admin:
    """The handlers of these paths."""

    def __init__(self, config: Config, fleet: Fleet, keeper: Keeper, door: Door) -> None:
        self._config = config
        self._registry = fleet.selection.registry
        self._upstream = fleet.upstream
        self._keeper = keeper
        self._door = door
        self._models: dict[bytes, tuple[float, bytes]] = {}
        self._key = AdminKey(config.admin_api_key)
        self._bearer = f"Bearer {config.profile_api_key}".encode()
        self._patience = Patience(config.body_timeout)
        self._max_body_size = config.max_body_size

    async def live(self, exchange: Exchange) -> None:
        """200 as long as the process answers at all."""
        await exchange.respond(200, _JSON, b'{"proxy":"healthy"}')

    async def health(self, exchange: Exchange) -> None:
        """
        200, or 503 if some role of the fleet has no engine that answers ``GET /health`` with 200.

        Asks every engine at each call, all at once. The body is that of vLLM's proxy, and
        ``sources`` says what is wrong with where the fleet comes from. 503 while shutting down.
        """
        states = dict(zip(Role, await asyncio.gather(*map(self._state, Role)), strict=True))
        content: dict[str, object] = {"proxy": "healthy"}
        content |= {f"{role}_cluster": state for role, state in states.items()}
        if problems := self._keeper.problems():
            hidden = {name.split()[0]: "in trouble, the log says why" for name in problems}
            content["sources"] = problems if self._config.expose_topology else hidden
        is_well = "unhealthy" not in states.values()
        if self._door.is_closing:
            content["proxy"], is_well = "shutting down", False
        await exchange.respond(200 if is_well else 503, _JSON, msgspec.json.encode(content))

    async def _state(self, role: Role) -> str:
        members = self._registry.members(role)
        if not members:
            # A fleet that fills by itself may be empty still.
            missing = self._registry.is_configured(role) and not self._config.is_open
            return "unhealthy" if missing else "empty"
        answers = await asyncio.gather(*map(self._keeper.is_well, members))
        return "healthy" if any(answers) else "unhealthy"

    async def models(self, exchange: Exchange) -> None:
        """
        What the decode servers serve, each model once; of a single server its own words.

        Raises NoInstance, UpstreamError. Kept for a second for callers with the same headers.
        """
        forwarded = Forwarded(exchange.headers, self._upstream.forwarding)
        ready = self._registry.ready(Role.DECODE)
        if not ready:
            raise NoInstance("no decode server is ready", stage=Role.DECODE)
        if len(ready) == 1:
            async with await self._upstream.get(ready[0], _MODELS, forwarded.fields) as answer:
                if answer.status >= 300:
                    raise await error_of(answer)
                await relay(answer, exchange)
            return
        now = time.monotonic()
        kept_at, content = self._models.get(forwarded.block, (-math.inf, b""))
        if now - kept_at > _SECONDS_KEPT:
            content = await self._union(ready, forwarded)
            if len(self._models) >= _MOST_KEPT:
                self._models.clear()
            self._models[forwarded.block] = now, content
        await exchange.respond(200, _JSON, content)

    async def _union(self, ready: Sequence[Instance], forwarded: Forwarded) -> bytes:
        answers = await asyncio.gather(
            *(self._models_of(one, forwarded) for one in ready), return_exceptions=True
        )
        found: dict[object, object] = {}
        failures: list[BaseException] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                failures.append(answer)
            else:
                found = {card.get("id"): card for card in answer} | found
        if len(failures) == len(answers):
            raise failures[0]
        return msgspec.json.encode({"object": "list", "data": list(found.values())})

    async def _models_of(self, instance: Instance, forwarded: Forwarded) -> list[dict[str, object]]:
        async with await self._upstream.get(instance, _MODELS, forwarded.fields) as answer:
            if answer.status != 200:
                raise await error_of(answer)
            content = await answer.read()
        try:
            return msgspec.json.decode(content, type=_Models).data
        except NO_JSON as exc:
            reason = "answered with what is no list of models"
            raise UpstreamError(instance, reason, cause=str(exc)) from exc

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
        if not self._key.matches(exchange.header(b"x-api-key")):
            raise Forbidden("profiling needs the right X-API-Key")
        body = await exchange.read(self._max_body_size, self._patience)
        # The first, not the next: what was started must be stopped.
        ready = {role: self._registry.ready(role) for role in Role}
        for role in Role:
            # In an open fleet nobody may have joined in a role yet.
            is_missing = self._registry.is_configured(role) and not self._config.is_open
            if not ready[role] and (is_missing or self._registry.members(role)):
                raise NoInstance(f"no {role} server is ready", stage=role)
        roles = [role for role in Role if ready[role]]
        instances = [ready[role][0] for role in roles]
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
