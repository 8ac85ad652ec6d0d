"""
One HTTP exchange on top of ASGI: read the body with a cap, answer once, know what has been sent.
"""

from __future__ import annotations

import random
import re
from typing import NamedTuple

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from epd_proxy.errors import BodyTooLarge, ProxyError, RawHeaders

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def local_path(scope: Scope) -> str:
    """
    The path below the place where the app is mounted.

    ``path`` holds ``root_path`` as its beginning, or, from some hosts, does not; the prefix goes
    only where a segment ends.
    """
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    rest = path.removeprefix(root)
    return rest if rest.startswith("/") else path


class Step(NamedTuple):
    """One call to an engine: for logs, and for hosts that look at ``scope["epd_proxy.trace"]``."""

    stage: str
    url: str
    seconds: float
    """From the call's first byte to the answer's last."""
    status: int
    """0 if the engine gave no answer."""


class Exchange:
    """
    A request and its answer.

    ``is_started`` tells whether the answer's head is out. From then on a failure can only be shown
    by breaking the connection.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self.headers: RawHeaders = scope["headers"]
        self._values: dict[bytes, bytes] = dict(self.headers)
        self.request_id = _request_id(self.header(b"x-request-id"))
        self.status = 0
        self.trace: list[Step] = scope.setdefault("epd_proxy.trace", [])

    def header(self, name: bytes) -> str:
        """One of the caller's headers, the last of that name; empty if there is none."""
        return self._values.get(name, b"").decode("latin-1")

    @property
    def is_started(self) -> bool:
        return self.status != 0

    async def read(self, limit: int) -> bytes:
        """
        The whole body.

        Raises BodyTooLarge (413) as soon as more than ``limit`` bytes are known to come, and
        ClientDisconnect if the caller leaves.
        """
        declared = self.header(b"content-length")
        if declared.isdecimal() and int(declared) > limit:
            raise _too_large(limit)
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return chunk if len(chunks) == 1 else b"".join(chunks)

    async def start(self, status: int, headers: RawHeaders) -> None:
        """Sends the head, with the request id in it."""
        self.status = status
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, (b"x-request-id", self.request_id.encode())],
            }
        )

    async def write(self, body: bytes, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def respond(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """Sends a whole answer."""
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, [*headers, length])
        await self.write(body, False)

    async def fail(self, error: ProxyError) -> None:
        headers, body = error.answer(self.request_id)
        await self.respond(error.status, headers, body)


def _request_id(given: str) -> str:
    """The caller's id where it is safe to repeat in headers and logs, else a new one."""
    return given if _REQUEST_ID.fullmatch(given) else f"{random.getrandbits(128):032x}"


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is larger than {limit} bytes")
