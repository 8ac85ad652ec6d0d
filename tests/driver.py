"""
Drives an ASGI app by hand, message by message, as a server would.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Scope

CHAT = "/v1/chat/completions"


@dataclass
class Reply:
    """What the app sent."""

    messages: list[Message] = field(default_factory=list)

    @property
    def status(self) -> int:
        status: int = self.messages[0]["status"]
        return status

    @property
    def headers(self) -> list[tuple[str, str]]:
        return [(name.decode(), value.decode()) for name, value in self.messages[0]["headers"]]

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    @property
    def chunks(self) -> list[bytes]:
        return [message["body"] for message in self.messages[1:] if message["body"]]

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def is_whole(self) -> bool:
        return not self.messages[-1].get("more_body", len(self.messages) == 1)

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json()["error"]
        return error


def http_scope(method: str, path: str, headers: Mapping[str, str], **more: Any) -> Scope:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": method, "path": path, "headers": raw, **more}


async def call(
    app: ASGIApp,
    method: str,
    path: str,
    body: bytes | Iterable[bytes] = b"",
    headers: Mapping[str, str] | None = None,
    **more: Any,
) -> Reply:
    """One request, its body in one message or several; what the app raises is raised."""
    chunks = [body] if isinstance(body, bytes) else list(body)
    reply = Reply()

    async def receive() -> Message:
        if not chunks:
            await asyncio.Event().wait()
        chunk = chunks.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(chunks)}

    async def send(message: Message) -> None:
        reply.messages.append(message)

    await app(http_scope(method, path, headers or {}, **more), receive, send)
    return reply


async def chat(
    app: ASGIApp, body: Any, headers: Mapping[str, str] | None = None, **more: Any
) -> Reply:
    """``POST /v1/chat/completions`` with JSON, or with bytes as they are."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await call(app, "POST", CHAT, content, headers, **more)
