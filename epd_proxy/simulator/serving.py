"""
HTTP around an engine: its pages, its lifespan, and callers who do not wait for their answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Send

from epd_proxy.simulator.body import Json

CHAT = "/v1/chat/completions"


def page(method: str, path: str, model: str) -> Response:
    """The answer to anything but a chat request."""
    pages = {
        "/health": Response(),
        "/version": JSONResponse({"version": "0.33.0"}),
        "/v1/models": JSONResponse({"object": "list", "data": [_card(model)]}),
    }
    if path != CHAT and path not in pages:
        return JSONResponse({"detail": "Not Found"}, 404)
    allowed = "POST" if path == CHAT else "GET"
    if method != allowed:
        return JSONResponse({"detail": "Method Not Allowed"}, 405, {"allow": allowed})
    return pages[path]


async def run_until_left(answering: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Runs to the end, or until the caller has left; the request body must have been read."""
    answer = asyncio.create_task(answering)
    leaving = asyncio.create_task(_caller_left(receive))
    try:
        await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            answer.result()
    finally:
        answer.cancel()
        leaving.cancel()
        await asyncio.gather(answer, leaving, return_exceptions=True)


async def lifespan(receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "lifespan.shutdown":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})


def _card(model: str) -> Json:
    return {
        "id": model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "vllm",
        "root": model,
        "parent": None,
        "max_model_len": 16384,
    }


async def _caller_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
