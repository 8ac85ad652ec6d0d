"""
uvicorn in our hands: refuse what it could not serve before it starts, or run it beside others.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from epd_proxy.config import flag_name
from epd_proxy.errors import ConfigError

_FILES = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs")


def check(app: ASGIApp, options: Mapping[str, Any]) -> None:
    """
    Raises ConfigError, naming the flag, if uvicorn could not listen with these options.

    uvicorn itself would say so with a traceback, or after the app has started.
    """
    uds = options.get("uds")
    if uds is None:
        listen(options["host"], options["port"]).close()
    elif not Path(uds).parent.is_dir():
        raise ConfigError("--uds", f"{uds}: there is no such directory")
    if any(name.startswith("ssl_") for name in options):
        _check_tls(app, options)


def _check_tls(app: ASGIApp, options: Mapping[str, Any]) -> None:
    for name in _FILES:
        if (path := options.get(name)) and not Path(path).is_file():
            raise ConfigError(flag_name(name), f"{path}: there is no such file")
    if not options.get("ssl_certfile"):
        raise ConfigError("--ssl-certfile", "the other --ssl flags need it")
    try:
        uvicorn.Config(app, **options).load()
    except (OSError, ValueError) as exc:
        raise ConfigError("--ssl-certfile", str(exc)) from None


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ConfigError."""
    if not host:
        raise ConfigError("--host", "is empty, which would be every address of this machine")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as exc:
        taken = exc.errno in (errno.EADDRINUSE, errno.EACCES)
        reason = f"cannot listen on {host}:{port}: {exc.strerror}"
        raise ConfigError("--port" if taken else "--host", reason) from None


@asynccontextmanager
async def serving(app: ASGIApp, host: str, port: int) -> AsyncIterator[str]:
    """uvicorn in this event loop, one of several, while the context lasts: its address."""
    listener = listen(host, port)
    config = uvicorn.Config(
        app,
        log_level="warning",
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=2,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await server.is_ready.wait()
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


class _Server(uvicorn.Server):
    """Leaves signals alone, tells when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_ready.set()
