"""
The engines as one request sees them: who serves a call, how it is made, what may be tried again.

Every stage stands on this: ``pick`` goes to the selectors, ``ask`` and ``decode`` to ``upstream``.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from epd_proxy.asgi import Exchange, Step
from epd_proxy.budget import RetryBudget, backoff
from epd_proxy.config import Config
from epd_proxy.errors import (
    Engine,
    EngineError,
    Exhausted,
    NoInstance,
    RawHeaders,
    Redo,
    Unreachable,
    UpstreamError,
)
from epd_proxy.health import RoleHealth
from epd_proxy.payload import Buffer
from epd_proxy.registry import Instance, Lease, Replica, Role
from epd_proxy.selectors import Selection
from epd_proxy.upstream import Answer, Forwarded, Upstream, accepted

logger = logging.getLogger("epd_proxy")

Result = TypeVar("Result")


class Fleet:
    """What all requests share: the selectors, the connections, and how much may be done again."""

    def __init__(self, config: Config, selection: Selection, upstream: Upstream) -> None:
        self.config = config
        self.selection = selection
        self.upstream = upstream
        self.budget = RetryBudget()
        self.rng = random.Random()


class Calls:
    """The calls made on behalf of one request."""

    def __init__(self, exchange: Exchange, fleet: Fleet, model: str = "") -> None:
        fleet.budget.note_request()
        self.exchange = exchange
        self._fleet = fleet
        self._model = model
        self._selection = fleet.selection
        self._registry = fleet.selection.registry
        self._upstream = fleet.upstream
        self._forwarded = Forwarded(exchange.headers, fleet.upstream.forwarding)
        self._replicas: dict[Instance, Replica] = {}
        self._failed: set[Instance] = set()
        self._full: set[Instance] = set()
        """Those that sent this request elsewhere: they are not asked again."""

    def lacking(self, roles: Iterable[Role]) -> list[Role]:
        """Those of the roles that nobody is ready for."""
        ready, model = self._registry.ready, self._model
        return sorted([role for role in roles if not ready(role, model)])

    async def expect(self, role: Role) -> None:
        """Raises NoInstance (503) if nobody in the role is ready within ``--wait-for-ready``."""
        if patience := self._fleet.config.wait_for_ready:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    while not self._registry.ready(role, self._model):
                        await self._registry.changed()
        self._selection.ready(role, self._model)

    def pick(self, role: Role, key: str | None = None) -> Instance:
        """One that has not failed this request, if there is one. Raises NoInstance (503)."""
        return self._selection.pick(
            role, key, model=self._model, avoid=self._failed, never=self._full
        )

    def replica(self, instance: Instance) -> Replica:
        """Chosen once, so that encode and the consumer mean the same, on a retry too."""
        if instance not in self._replicas:
            self._replicas[instance] = instance.next_replica()
        return self._replicas[instance]

    async def reach(
        self,
        instance: Instance,
        lease: Lease,
        call: Callable[[Instance], Awaitable[Result]],
        key: str | None = None,
    ) -> tuple[Instance, Result]:
        """
        ``call`` with ``instance`` or, as long as there is no connection, with all the others.

        That is no redo: nobody has got anything. ``lease`` goes along. Raises what ``call`` does.
        """
        refused: list[Instance] = []
        while True:
            try:
                return instance, await call(instance)
            except Unreachable as failure:
                refused.append(instance)
                self.require_another(failure, refused)
                logger.info("request %s: %s", self.exchange.request_id, failure.log_line())
                instance = self._selection.pick(
                    instance.role,
                    key,
                    model=self._model,
                    avoid=self._failed,
                    never=self._full.union(refused),
                )
                lease.move(instance)

    def require_another(self, failure: Unreachable, refused: Sequence[Instance] = ()) -> None:
        """Raises what the request ends with, if nobody is left who might serve it."""
        if self.turn_away(failure.engine, refused):
            return
        if isinstance(failure.engine, Instance) and failure.engine.is_removed:
            role = failure.engine.role
            raise NoInstance(f"no {role} server is ready", stage=role) from None
        raise failure

    def turn_away(self, instance: Engine, refused: Sequence[Instance] = ()) -> bool:
        """Notes that an instance cannot serve this request; whether one is left that might."""
        assert isinstance(instance, Instance)
        self._failed.add(instance)
        ready = self._registry.ready(instance.role, self._model)
        return any(one not in self._full.union(refused or self._failed) for one in ready)

    async def redo(self, failure: UpstreamError, attempt: int) -> None:
        """
        Returns after a pause if what failed may be done once more, else raises ``failure``.

        ``attempt`` counts from 1. Takes it out of the budget of all requests.
        """
        if not self._may_redo(failure):
            raise failure
        logger.warning(
            "request %s: %s, which is done again", self.exchange.request_id, failure.log_line()
        )
        await asyncio.sleep(backoff(attempt, self._fleet.rng))

    def _may_redo(self, failure: UpstreamError) -> bool:
        if failure.redo is Redo.NEVER:
            return False
        others = self.turn_away(failure.engine)
        if failure.redo is Redo.ELSEWHERE:
            assert isinstance(failure.engine, Instance)
            self._full.add(failure.engine)
            if not others:
                return False
        return self._fleet.budget.may_redo()

    def ask(self, instance: Instance, name: str, body: Sequence[Buffer]) -> Awaitable[bytes]:
        """
        An encode or prefill call, to await the body of its 200.

        Raises EngineError for what the caller has to know, 4xx above all, and UpstreamError.
        """
        return self._call(instance, name, body, accepted)

    def decode(
        self, instance: Instance, body: Sequence[Buffer], use: Callable[[Answer], Awaitable[None]]
    ) -> Awaitable[None]:
        """A decode call, to await what is done with its answer, whatever its status."""
        extra: RawHeaders = []
        if encodings := self._forwarded.encodings:
            extra.append((b"accept-encoding", encodings))
        if (rank := self.replica(instance).rank) is not None:
            extra.append((b"x-data-parallel-rank", str(rank).encode()))
        return self._call(instance, "d", body, use, extra)

    async def _call(
        self,
        instance: Instance,
        name: str,
        body: Sequence[Buffer],
        use: Callable[[Answer], Awaitable[Result]],
        extra: RawHeaders | None = None,
    ) -> Result:
        """
        A call from its first byte to what ``use`` makes of its answer.

        An answer that has not come to its end by then is dropped, and its connection with it.
        Raises UpstreamError, and what ``use`` does.
        """
        exchange = self.exchange
        exchange.stage = role = instance.role
        health = self._registry.health[role]
        # Engines keep requests by their ids, so no two calls may share one, retries included.
        request_id = f"{exchange.request_id}:{name}:{self._fleet.rng.getrandbits(24):06x}"
        began, status = time.perf_counter(), 0
        try:
            answer = await self._upstream.chat(instance, self._forwarded, request_id, body, extra)
            status = answer.status
            try:
                result = await use(answer)
            finally:
                if not answer.is_whole:
                    await answer.aclose()
        except BaseException as exc:
            _judge(instance, health, exc)
            raise
        finally:
            step = Step(role, instance.url, time.perf_counter() - began, status)
            exchange.trace.append(step)
        health.succeeded(instance)
        return result


def _judge(instance: Instance, health: RoleHealth[Instance], exc: BaseException) -> None:
    """What a failure says of the instance; nothing, if it was the caller who left."""
    if isinstance(exc, Unreachable):
        if not isinstance(exc, Exhausted):
            health.refused(instance)
    elif isinstance(exc, UpstreamError):
        status = exc.status if isinstance(exc, EngineError) else 0
        is_callers_fault = 400 <= status < 500 or status == 501
        (health.succeeded if is_callers_fault else health.failed)(instance)
