"""
A proxy under uvicorn in front of scripted engines, and callers who see every byte of it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self
from urllib.parse import urlsplit

import uvicorn
from starlette.types import ASGIApp

from epd_proxy import Config, EPDProxy, Instance
from epd_proxy.intake import IntakeProtocol
from epd_proxy.servers import listen
from tests.backends import ask, image
from tests.faults.callers import Answer, Caller
from tests.faults.engines import DEFAULTS, Engine, listening
from tests.processes import unused_address

LIMIT = 10
"""Seconds after which a test has hung."""

SOON = 1
"""Seconds within which the engines of a caller who left must be free."""

PROTOCOL: Any = IntakeProtocol
"""As ``epd-proxy serve`` has it."""

STAGES = ("encode", "prefill", "decode")


class First:
    """The selector of these tests: the first that is ready, so that a test knows who is called."""

    def pick(self, ready: tuple[Instance, ...], key: str | None) -> Instance:
        return ready[0]


def config(**fields: Any) -> Config:
    return Config(**fields)


def request(stream: bool = False, *, images: int = 1, **fields: Any) -> bytes:
    """The body of a chat request."""
    parts = [image(f"data:image/png;base64,AAA{number}") for number in range(images)]
    text = {"type": "text", "text": "What is this?"}
    return json.dumps(ask(*parts, text, stream=stream, **fields)).encode()


class Log(logging.Handler):
    """What the proxy, its server and the event loop complain about."""

    _SOURCES = ("epd_proxy", "uvicorn", "asyncio")

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def lines(self) -> list[str]:
        """Of everybody."""
        return [record.getMessage() for record in self.records]

    @property
    def own(self) -> list[str]:
        """Of the proxy alone."""
        return [record.getMessage() for record in self.records if record.name == "epd_proxy"]

    def __enter__(self) -> Self:
        for name in self._SOURCES:
            logging.getLogger(name).addHandler(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for name in self._SOURCES:
            logging.getLogger(name).removeHandler(self)


class Fleet:
    """Engines by role, the proxy in front of them, and what it logs."""

    def __init__(self, engines: dict[str, list[Engine]], proxy: EPDProxy, log: Log) -> None:
        self.engines = engines
        self.encode, self.prefill, self.decode = (engines[stage] for stage in STAGES)
        self.proxy = proxy
        self.log = log
        self.url = ""
        self._callers: list[Caller] = []

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many calls encode, prefill and decode engines have got."""
        encode, prefill, decode = (
            sum(len(engine.calls) for engine in self.engines[stage]) for stage in STAGES
        )
        return encode, prefill, decode

    def each(self, stage: str) -> list[int]:
        """How many calls each engine of a role has got."""
        return [len(engine.calls) for engine in self.engines[stage]]

    @property
    def addresses(self) -> list[str]:
        """``host:port`` of every engine, refusing ones included."""
        return [urlsplit(instance.url).netloc for instance in self.proxy.registry.instances()]

    @property
    def loads(self) -> list[int]:
        return [instance.load for instance in self.proxy.registry.instances()]

    async def caller(self, *, receive_buffer: int | None = None) -> Caller:
        caller = await Caller.connect(self.url, receive_buffer=receive_buffer)
        self._callers.append(caller)
        return caller

    async def asked(self, body: bytes, headers: Mapping[str, str] | None = None) -> Caller:
        """A caller who has sent a chat request."""
        caller = await self.caller()
        await caller.ask(body, headers)
        return caller

    async def ask(self, body: bytes, headers: Mapping[str, str] | None = None) -> Answer:
        caller = await self.asked(body, headers)
        answer = await caller.answer()
        await caller.close()
        return answer

    async def get(self, path: str) -> Answer:
        caller = await self.caller()
        await caller.ask(line=f"GET {path} HTTP/1.1")
        return await caller.answer()

    async def idle(self) -> None:
        """Until no instance has a call in progress, which must be soon."""
        async with asyncio.timeout(SOON):
            while any(self.loads):  # noqa: ASYNC110 - a load is a number, and sets no event
                await asyncio.sleep(0.005)

    async def hang_up(self) -> None:
        for caller in self._callers:
            await caller.close()


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[str]:
    """uvicorn without its ticks of a tenth of a second, which a test would wait for twice."""
    settings = uvicorn.Config(
        app, http=PROTOCOL, log_level="warning", server_header=False, date_header=False
    )
    settings.load()
    server = uvicorn.Server(settings)
    server.lifespan = settings.lifespan_class(settings)
    listener = listen("127.0.0.1", 0)
    await server.startup(sockets=[listener])
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for each in server.servers:
            each.close()
        for connection in list(server.server_state.connections):
            connection.shutdown()
        if tasks := set(server.server_state.tasks):
            _, hung = await asyncio.wait(tasks, timeout=SOON)
            for task in hung:
                task.cancel()
            await asyncio.gather(*hung, return_exceptions=True)
            assert not hung
        await server.lifespan.shutdown()


@asynccontextmanager
async def fleet(
    *,
    encode: int = 1,
    prefill: int = 1,
    decode: int = 1,
    first: Mapping[str, str] | None = None,
    refused: Collection[str] = (),
    **fields: Any,
) -> AsyncIterator[Fleet]:
    """
    So many engines of each role behind a proxy. A test is over within LIMIT.

    Before them come, once for each time that ``refused`` names their role, instances that refuse
    connections, and the instance at the address that ``first`` gives. Further fields are the
    proxy's configuration.
    """
    numbers = dict(zip(STAGES, (encode, prefill, decode), strict=True))
    selectors = {f"{stage}_selector": f"{__name__}:First" for stage in STAGES}
    async with asyncio.timeout(LIMIT), AsyncExitStack() as stack:
        before = [(stage, stack.enter_context(unused_address())) for stage in refused]
        before += (first or {}).items()
        engines = {
            stage: [
                await stack.enter_async_context(listening(Engine(DEFAULTS[stage])))
                for _ in range(number)
            ]
            for stage, number in numbers.items()
        }
        urls: dict[str, list[str]] = {
            stage: [url for role, url in before if role == stage]
            + [engine.url for engine in engines[stage]]
            for stage in STAGES
        }
        one = Fleet(engines, EPDProxy(config=config(**{**urls, **selectors, **fields})), Log())
        one.url = await stack.enter_async_context(serving(one.proxy))
        # From here on in the reverse order: what a test left open must not hold up the server.
        for engine in itertools.chain(*engines.values()):
            stack.push_async_callback(engine.stop)
        stack.push_async_callback(one.hang_up)
        stack.enter_context(one.log)
        yield one
