"""
One chat request from top to bottom: encode, prefill, decode, and all of it again on a 500.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from epd_proxy.asgi import Exchange
from epd_proxy.calls import Calls
from epd_proxy.chat import Chat
from epd_proxy.config import Config
from epd_proxy.decode import decode, relay
from epd_proxy.encode import EncodeStage
from epd_proxy.media import Item
from epd_proxy.payload import Json
from epd_proxy.prefill import PrefillStage
from epd_proxy.references import References
from epd_proxy.registry import Instance, Lease, Role
from epd_proxy.selectors import Selection
from epd_proxy.upstream import Answer, Upstream

logger = logging.getLogger("epd_proxy")


class Pipeline:
    """
    Answers ``POST /v1/chat/completions``.

    Encode takes part if the fleet has encoders and the request has media, prefill if the fleet has
    prefill servers. Nothing reaches the caller before decode's head has arrived.
    """

    def __init__(self, config: Config, selection: Selection, upstream: Upstream) -> None:
        self._config = config
        self._selection = selection
        self._upstream = upstream
        self._encode = EncodeStage(config)
        self._prefill = PrefillStage(config)
        self._pushes = bool(config.ec_consumer_zmq_addrs)
        self._shares_kv = config.kv_connector == "shared"

    async def __call__(self, exchange: Exchange) -> None:
        """Raises ProxyError; once decode's head is out, UpstreamError alone."""
        body = await exchange.read(self._config.max_body_size)
        chat = Chat(body, trust_embeds=self._config.trust_embeds)
        calls = Calls(exchange, self._selection, self._upstream)
        roles = _roles_for(chat, calls)
        items = await chat.items() if Role.ENCODE in roles else []
        retries_left = max(0, self._config.decode_retries)
        failed: Instance | None = None
        while True:
            with Lease() as lease:
                # Encoders that push must know the consumer; else it is chosen when its turn comes.
                decoder = None
                if self._pushes:
                    decoder = lease.take(calls.pick(Role.DECODE, avoid=failed))
                references = await self._references(calls, chat, items, decoder)
                prompt = await self._prompt(calls, chat, references, roles)
                decoder = decoder or lease.take(calls.pick(Role.DECODE, avoid=failed))
                async with decode(calls, decoder, chat, prompt) as answer:
                    redo = answer.status == 500 and retries_left > 0
                    if answer.status >= 500:
                        _log_failure(exchange, answer, redo=redo)
                    if not redo:
                        await relay(answer, exchange)
                        return
            # Decode may have spent the handle and the embeddings: nothing of this attempt serves
            # the next.
            failed = decoder
            retries_left -= 1

    async def _references(
        self, calls: Calls, chat: Chat, items: list[Item], consumer: Instance | None
    ) -> References:
        if not items:
            return References({}, {}, None, stand_for_media=bool(chat.embedded))
        push_to = calls.replica(consumer).ec_address if consumer else None
        return await self._encode(calls, chat, items, push_to)

    async def _prompt(
        self, calls: Calls, chat: Chat, references: References, roles: AbstractSet[Role]
    ) -> Mapping[str, Json]:
        """
        Decode's fields that differ from the caller's.

        They stand for the media, and tell of the caches that hold it.
        """
        messages = chat.with_parts(references.parts)
        if Role.PREFILL not in roles:
            if references.transfer is not None:
                messages["ec_transfer_params"] = references.transfer
            return messages
        handle = await self._prefill(calls, chat, messages, references)
        if self._shares_kv:
            return chat.with_parts(references.raw_parts)
        return messages if handle is None else {**messages, "kv_transfer_params": handle}


def _log_failure(exchange: Exchange, answer: Answer, *, redo: bool) -> None:
    logger.warning(
        "request %s: %s the decode server answered so, %s (%s)",
        exchange.request_id,
        answer.status,
        "everything is done again" if redo else "which is passed on",
        answer.instance.url,
    )


def _roles_for(chat: Chat, calls: Calls) -> AbstractSet[Role]:
    """Who takes part. Raises NoInstance (503) before anybody is troubled in vain."""
    wanted = {Role.DECODE}
    # The engine's beam search drops what the stages would hand to each other.
    if not chat.uses_beam_search:
        wanted |= {Role.PREFILL, Role.ENCODE} if chat.media else {Role.PREFILL}
    return {role for role in wanted if calls.has(role)}
