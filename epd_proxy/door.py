"""
``Door``: what a chat request goes through before the pipeline, and who keeps an eye on its caller.
"""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect

from epd_proxy.admission import Gate, Keys
from epd_proxy.asgi import Exchange, Patience, current_task
from epd_proxy.config import Config
from epd_proxy.errors import DeadlineExceeded, Overloaded
from epd_proxy.pipeline import Pipeline


class Door:
    """
    Checks the key, waits for room, reads the body, and lets the pipeline answer.

    A caller who leaves ends all of it at once, whatever is going on: the engines' sockets are
    closed, and they stop. So does the caller's own time limit.
    """

    def __init__(self, config: Config, keys: Keys, pipeline: Pipeline) -> None:
        self._config = config
        self._keys = keys
        self._pipeline = pipeline
        self._patience = Patience(config.body_timeout)
        self.is_closing = False
        """Whether the proxy is going to end: ``/health`` tells."""
        self._gate = Gate(config.max_concurrency, config.max_queue, config.queue_timeout)

    async def __call__(self, exchange: Exchange) -> None:
        """Raises ProxyError, and ClientDisconnect if the caller has left."""
        owner = self._keys.owner(exchange.header(b"authorization"))
        limit = exchange.time_limit()
        if limit is None:
            await self._enter(exchange, owner)
            return
        try:
            async with asyncio.timeout(limit):
                await self._enter(exchange, owner)
        except TimeoutError:
            reason = f"the request did not end within the caller's x-request-timeout of {limit:g} s"
            raise DeadlineExceeded(reason, stage=exchange.stage) from None

    async def _enter(self, exchange: Exchange, owner: str | None) -> None:
        turn = self._gate.enter()
        try:
            body = await exchange.read(self._config.max_body_size, self._patience)
            watcher = exchange.watch()
            try:
                if turn is not None:
                    await self._gate.wait(turn)
                await self._pipeline(exchange, body, owner)
            except asyncio.CancelledError:
                if exchange.is_gone and not current_task().uncancel():
                    raise ClientDisconnect from None
                if self.is_closing and not exchange.is_started:
                    current_task().uncancel()
                    raise Overloaded("the proxy is shutting down") from None
                raise
            finally:
                watcher.cancel()
        finally:
            self._gate.leave(turn)
