"""
The decode stage: the caller's request to a decode server, its answer to the caller as it comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping

from epd_proxy.asgi import Exchange
from epd_proxy.calls import Calls
from epd_proxy.chat import Chat
from epd_proxy.config import Config
from epd_proxy.errors import EngineError, Redo, UpstreamError
from epd_proxy.guard import Guard, Stillborn
from epd_proxy.payload import Json
from epd_proxy.registry import Instance
from epd_proxy.upstream import Answer, error_of, redo_after, relayed_headers

_MOST_HELD = 64 << 10


class DecodeStage:
    """Gets the answer. Nothing of it reaches the caller before it is known to be one."""

    def __init__(self, config: Config) -> None:
        self._guarded_for = config.stream_guard

    def __call__(
        self, calls: Calls, instance: Instance, chat: Chat, prompt: Mapping[str, Json]
    ) -> Awaitable[None]:
        """
        ``prompt``: the fields that differ from the caller's: messages with references, and where
        the KV cache lies, or the embeddings if this server prefills too.

        To await. Raises UpstreamError; once the answer's head is out, what the caller has is
        unfinished.
        """
        return calls.decode(
            instance, chat.body(prompt), lambda answer: self._pass_on(answer, calls.exchange)
        )

    async def _pass_on(self, answer: Answer, exchange: Exchange) -> None:
        if answer.status >= 300:
            raise await error_of(answer)
        held = b""
        if self._guarded_for and _can_be_read(answer):
            held = await self._until_value(answer)
        await relay(answer, exchange, held)

    async def _until_value(self, answer: Answer) -> bytes:
        """What comes before the first thing of value, and with it. Raises UpstreamError."""
        guard, held = Guard(), b""
        try:
            async with asyncio.timeout(self._guarded_for):
                while piece := await answer.pull():
                    held += piece
                    if guard.feed(piece) or len(held) > _MOST_HELD:
                        return held
                guard.end()
        except TimeoutError:
            # It is slow, not dead.
            return held
        except Stillborn as exc:
            raise _failure(answer.instance, exc) from exc


def _failure(instance: Instance, stillborn: Stillborn) -> UpstreamError:
    status = stillborn.status
    # A gateway's status in the stream says no more than that the stream is dead.
    redo = Redo.ANYWHERE if status in (502, 504) else redo_after(instance.role, status)
    if stillborn.content:
        return EngineError(instance, status, stillborn.content, redo=redo)
    return UpstreamError(instance, str(stillborn), redo=redo)


async def relay(answer: Answer, exchange: Exchange, held: bytes = b"") -> None:
    """
    Status, end-to-end headers and body, byte for byte, each piece when it arrives.

    ``held``: the beginning of the body, if it has been read. Raises UpstreamError if the answer
    breaks off; what has been sent then stays unfinished.
    """
    headers = relayed_headers(answer.headers, answer.known)
    has_length = b"content-length" in dict(headers)
    if has_length and answer.is_whole:
        await exchange.answer(answer.status, headers, held + await answer.raw())
        return
    if exchange.needs_length and not has_length and not _is_event_stream(answer):
        await exchange.respond(answer.status, headers, await answer.raw())
        return
    await exchange.start(answer.status, headers)
    if held:
        await exchange.write(held, True)
    await answer.pass_to(exchange.write)


def _can_be_read(answer: Answer) -> bool:
    return answer.status == 200 and _is_event_stream(answer) and not answer.is_encoded


def _is_event_stream(answer: Answer) -> bool:
    return answer.known.get(b"content-type", b"")[:17].lower() == b"text/event-stream"
