"""
``EPDProxy``: the ASGI callable, and the only place that wires the parts together.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from epd_proxy.admin import Admin
from epd_proxy.admission import Keys
from epd_proxy.asgi import Exchange, local_path
from epd_proxy.calls import Fleet
from epd_proxy.config import Config
from epd_proxy.door import Door
from epd_proxy.errors import ConfigError, MethodNotAllowed, NotFound, ProxyError, RequestError
from epd_proxy.instances import Instances
from epd_proxy.keeper import Keeper, check_sources
from epd_proxy.payload import TOO_DEEP
from epd_proxy.pipeline import Pipeline
from epd_proxy.registry import Registry
from epd_proxy.selectors import Selection
from epd_proxy.upstream import CHAT_PATH, Upstream, check_address, default_transport

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger("epd_proxy")

Handler: TypeAlias = Callable[[Exchange], Awaitable[None]]
Methods: TypeAlias = Mapping[str, str]

# path: method: name of the handler
ROUTES: Mapping[str, Methods] = {
    CHAT_PATH: {"POST": "chat"},
    "/v1/models": {"GET": "models", "HEAD": "models"},
    "/health": {"GET": "health", "HEAD": "health"},
    "/live": {"GET": "live", "HEAD": "live"},
    "/instances": {"GET": "show", "POST": "register", "DELETE": "deregister"},
    "/instances/drain": {"POST": "drain", "DELETE": "undrain"},
    "/start_profile": {"POST": "start_profile"},
    "/stop_profile": {"POST": "stop_profile"},
}


class Runtime(NamedTuple):
    """What belongs to one event loop: connections, watching, and the handlers that use them."""

    upstream: Upstream
    keeper: Keeper
    door: Door
    handlers: Mapping[str, Handler]


class EPDProxy:
    """
    One OpenAI-compatible server in front of encode, prefill and decode servers.

    Alone it serves its own paths and answers everything else with a JSON 404. Around an inner
    ``app`` it is a middleware: ``POST /v1/chat/completions`` is its own, and so are the ``paths``
    named (out of ``/v1/models``, ``/health``, ``/live``, ``/instances``, ``/instances/drain``,
    ``/start_profile``, ``/stop_profile``); all else is passed on.

    It starts with the first request, once per event loop, so that it can be mounted where no
    lifespan reaches it. ``async with proxy:`` and ``lifespan=proxy.lifespan`` start and end it
    explicitly. ``registry`` holds the fleet.

    ``file``: a path that is read again when it changes, and what reads it; the instances of the
    ``Config`` that comes back take the place of those that were configured.

    ``is_alone``: no other process serves the same address. Else the fleet cannot be changed by a
    request, which only one of them gets, unless they share a ``--registry``.

    ``transport``: any ``httpx.AsyncBaseTransport``; it stays its owner's to close. Raises
    ConfigError, which names the flag.
    """

    def __init__(
        self,
        app: ASGIApp | None = None,
        *,
        config: Config,
        transport: httpx.AsyncBaseTransport | None = None,
        paths: Iterable[str] = (),
        file: tuple[Path, Callable[[Path], Config]] | None = None,
        is_alone: bool = True,
    ) -> None:
        self.app = app
        self.config = config
        self.registry = Registry.of(config)
        _check_addresses(self.registry)
        check_sources(config)
        self._selection = Selection.of(config, self.registry)
        self._keys = Keys(config.api_key, config.api_key_file)
        self._file = file
        self._is_alone = is_alone
        self._transport = transport
        self._routes = _own_routes(app, paths)
        self._runtimes: dict[asyncio.AbstractEventLoop, Runtime] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            methods = self._routes.get(local_path(scope), {})
            if scope["method"] not in methods and self.app is not None:
                await self.app(scope, receive, send)
            else:
                await self._serve(methods, Exchange(scope, receive, send))
        elif scope["type"] == "lifespan":
            await self._pass_lifespan(scope, receive, send)
        elif self.app is not None:
            await self.app(scope, receive, send)
        else:
            await WebSocketClose()(scope, receive, send)

    async def _serve(self, methods: Methods, exchange: Exchange) -> None:
        began = time.perf_counter()
        try:
            runtime = self._runtime(exchange.loop)
            handler = runtime.handlers[_name_of(exchange.scope, methods)]
            await handler(exchange)
        except ClientDisconnect:
            return
        except Exception as exc:
            error = _as_proxy_error(exc, exchange)
            # The head is out: only breaking the connection still tells the caller that what came
            # after it is not whole.
            if exchange.is_started:
                raise
            try:
                await exchange.fail(error, expose_topology=self.config.expose_topology)
            except ClientDisconnect:
                return
        finally:
            if self.config.log_requests:
                _log_request(exchange, time.perf_counter() - began)

    async def _pass_lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def close_before_the_end(message: Message) -> None:
            if message["type"].startswith("lifespan.shutdown."):
                await self.aclose()
            await send(message)

        app = self.app or self._own_lifespan
        await app(scope, receive, close_before_the_end)

    async def _own_lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await self._runtime(asyncio.get_running_loop()).keeper.settled()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})

    @asynccontextmanager
    async def lifespan(self, app: object = None) -> AsyncIterator[None]:
        """For hosts that take a lifespan: ``Starlette(..., lifespan=proxy.lifespan)``."""
        async with self:
            yield

    async def __aenter__(self) -> Self:
        await self._runtime(asyncio.get_running_loop()).keeper.settled()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connections of this event loop. A request after that starts anew."""
        runtime = self._runtimes.pop(asyncio.get_running_loop(), None)
        if runtime is not None:
            await runtime.keeper.aclose()
            if self._transport is None:
                await runtime.upstream.aclose()

    def close_the_door(self) -> None:
        """``/health`` answers 503 from now on; requests are served as before."""
        for runtime in self._runtimes.values():
            runtime.door.is_closing = True

    def reload(self) -> None:
        """Reads the ``file`` again now."""
        for runtime in self._runtimes.values():
            runtime.keeper.reload()

    def _runtime(self, loop: asyncio.AbstractEventLoop) -> Runtime:
        runtime = self._runtimes.get(loop)
        if runtime is None:
            # Its connections keep a loop alive, so a map of weak references would not do.
            for gone in [one for one in self._runtimes if one.is_closed()]:
                self._runtimes.pop(gone).keeper.detach()
            runtime = self._runtimes[loop] = self._start()
        return runtime

    def _start(self) -> Runtime:
        upstream = Upstream(self._transport or default_transport(self.config), self.config)
        fleet = Fleet(self.config, self._selection, upstream)
        keeper = Keeper(self.config, self.registry, upstream, self._file)
        door = Door(self.config, self._keys, Pipeline(fleet))
        admin = Admin(self.config, fleet, keeper, door)
        instances = Instances(
            self.config, self.registry, self._keys, keeper, is_alone=self._is_alone
        )
        keeper.start()
        return Runtime(
            upstream,
            keeper,
            door,
            {
                "chat": door,
                "models": self._for_callers(admin.models),
                "health": admin.health,
                "live": admin.live,
                "show": instances.show,
                "register": instances.register,
                "deregister": instances.deregister,
                "drain": instances.drain,
                "undrain": instances.undrain,
                "start_profile": admin.start_profile,
                "stop_profile": admin.stop_profile,
            },
        )

    def _for_callers(self, handler: Handler) -> Handler:
        """Only for those who have a key."""

        async def handle(exchange: Exchange) -> None:
            self._keys.owner(exchange.header(b"authorization"))
            await handler(exchange)

        return handle


def _check_addresses(registry: Registry) -> None:
    for instance in registry.instances():
        check_address(instance)


def _own_routes(app: ASGIApp | None, paths: Iterable[str]) -> Mapping[str, Methods]:
    if app is None:
        return ROUTES
    claimed = {CHAT_PATH, *paths}
    if unknown := claimed - ROUTES.keys():
        raise ConfigError("paths", f"{sorted(unknown)} are none of {', '.join(ROUTES)}")
    return {path: ROUTES[path] for path in claimed}


def _name_of(scope: Scope, methods: Methods) -> str:
    """The handler's name. Raises NotFound (404), MethodNotAllowed (405)."""
    if not methods:
        raise NotFound(f"there is nothing at {scope['path']}")
    if scope["method"] not in methods:
        raise MethodNotAllowed(scope["method"], ", ".join(methods))
    return methods[scope["method"]]


def _as_proxy_error(exc: Exception, exchange: Exchange) -> ProxyError:
    if isinstance(exc, RecursionError):
        # What could just be decoded may be too deep for a second look from further down the stack.
        return RequestError(TOO_DEEP)
    if not isinstance(exc, ProxyError):
        logger.exception("request %s failed inside the proxy", exchange.request_id)
        return ProxyError("the proxy failed to handle the request")
    if exchange.is_started:
        logger.warning(
            "request %s: broken off after %s bytes: %s",
            exchange.request_id,
            exchange.sent,
            exc.log_line(),
        )
    elif exc.status >= 500:
        logger.warning("request %s: %s %s", exchange.request_id, exc.status, exc.log_line())
    return exc


def _log_request(exchange: Exchange, seconds: float) -> None:
    steps = " ".join(
        f"{step.stage}={step.url},{step.status},{step.seconds * 1e3:.1f}ms"
        for step in exchange.trace
    )
    logger.info(
        "request %s: %s %r %s %.1fms %s",
        exchange.request_id,
        exchange.scope["method"],
        exchange.scope["path"],
        exchange.status or "unanswered",
        seconds * 1e3,
        steps,
    )
