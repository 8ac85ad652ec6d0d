"""
The decode stage: the caller's request to a decode server, its answer to the caller as it comes.
"""

from __future__ import annotations

from collections.abc import Mapping

from epd_proxy.asgi import Exchange
from epd_proxy.calls import Call, Calls
from epd_proxy.chat import Chat
from epd_proxy.payload import Json
from epd_proxy.registry import Instance
from epd_proxy.upstream import Answer, relayed_headers


def decode(calls: Calls, instance: Instance, chat: Chat, prompt: Mapping[str, Json]) -> Call:
    """
    The answer, once its head is there. Raises UpstreamError.

    ``prompt``: the fields that differ from the caller's: messages with references, and where the
    KV cache lies, or the embeddings if this server prefills too.
    """
    return calls.open(instance, "d", chat.body(prompt))


async def relay(answer: Answer, exchange: Exchange) -> None:
    """
    Status, end-to-end headers and body, byte for byte, each chunk when it arrives.

    Raises UpstreamError if the answer breaks off; what has been sent then stays unfinished.
    """
    await exchange.start(answer.status, relayed_headers(answer.headers))
    await answer.pass_to(exchange.write)
