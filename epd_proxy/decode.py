"""
The decode stage: the caller's request to a decode server, its answer to the caller as it comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

from epd_proxy.asgi import Exchange
from epd_proxy.calls import Calls
from epd_proxy.chat import Chat
from epd_proxy.media import Place
from epd_proxy.payload import Json
from epd_proxy.registry import Instance
from epd_proxy.upstream import Answer, relayed_headers


class Prompt(NamedTuple):
    """What of the prompt is not in the caller's words."""

    parts: Mapping[Place, Json]
    """Parts that take the place of the caller's."""
    transfer: Mapping[str, Json]
    """Where the KV cache lies, or the embeddings if this server prefills too."""


def decode(
    calls: Calls, instance: Instance, chat: Chat, prompt: Prompt
) -> AbstractAsyncContextManager[Answer]:
    """The answer, once its head is there. Raises UpstreamError."""
    return calls.open(instance, "d", chat.body(prompt.transfer, prompt.parts))


async def relay(answer: Answer, exchange: Exchange) -> None:
    """
    Status, end-to-end headers and body, byte for byte, each chunk when it arrives.

    Raises UpstreamError if the answer breaks off; what has been sent then stays unfinished.
    """
    await exchange.start(answer.status, relayed_headers(answer.headers))
    async for chunk in answer.chunks():
        await exchange.write(chunk)
    await exchange.write(b"", more=False)
