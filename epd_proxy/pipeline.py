"""
One chat request from top to bottom: encode, prefill, decode, and again what failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from epd_proxy.asgi import Exchange
from epd_proxy.calls import Calls, Fleet
from epd_proxy.chat import Chat
from epd_proxy.decode import DecodeStage
from epd_proxy.encode import EncodeStage, as_it_came
from epd_proxy.errors import ModelNotFound, NoInstance, Unreachable, UpstreamError
from epd_proxy.media import Item, Naming
from epd_proxy.payload import Json
from epd_proxy.prefill import PrefillStage
from epd_proxy.references import References
from epd_proxy.registry import Instance, Lease, Role


class Pipeline:
    """
    Answers ``POST /v1/chat/completions``.

    Encode takes part if the fleet has encoders and the request has media, prefill if the fleet has
    prefill servers. Nothing reaches the caller before decode has said something of value.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._config = config = fleet.config
        self._encode = EncodeStage(config)
        self._prefill = PrefillStage(config)
        self._decode = DecodeStage(config)
        self._naming = Naming.of(config)
        self._shares_kv = config.kv_connector == "shared"
        self._falls_back = config.encode_fallback == "raw"

    async def __call__(self, exchange: Exchange, body: bytes, owner: str | None = None) -> None:
        """
        ``owner``: the key that the caller came with.

        Raises ProxyError; once the answer's head is out, UpstreamError alone.
        """
        chat = Chat(body, self._config)
        if not self._fleet.selection.registry.serves(chat.model):
            raise ModelNotFound(chat.model)
        calls = Calls(exchange, self._fleet, chat.model)
        roles = await self._roles_for(chat, calls)
        items: list[Item] = []
        if chat.media and (Role.ENCODE in roles or exchange.is_degraded or self._naming.renames):
            items = await chat.items(self._naming, owner)
        retries = max(0, self._config.decode_retries)
        attempt = 0
        while True:
            pushes = calls.pushes
            try:
                await self._attempt(calls, chat, items, roles, pushes=pushes)
                return
            except UpstreamError as failure:
                # An encoder's failure has been dealt with where it is known what it concerns.
                if exchange.is_started or failure.stage == Role.ENCODE:
                    raise
                if isinstance(failure, Unreachable):
                    # Encoders have pushed to a consumer that cannot be reached.
                    if not pushes:
                        raise
                    calls.require_another(failure)
                    continue
                attempt += 1
                if attempt > retries:
                    raise
                await calls.redo(failure, attempt)

    async def _attempt(
        self,
        calls: Calls,
        chat: Chat,
        items: list[Item],
        roles: AbstractSet[Role],
        *,
        pushes: bool,
    ) -> None:
        """
        Everything from the caller's body on.

        Decode may have spent the handle and the embeddings: nothing of one attempt serves the next.
        """
        if Role.ENCODE in roles:
            calls.exchange.is_degraded = False
        with Lease() as lease:
            # Encoders that push must know the consumer; else it is chosen when its turn comes.
            consumer = lease.take(calls.pick(Role.DECODE)) if pushes else None
            references = await self._references(calls, chat, items, roles, consumer)
            prompt = await self._prompt(calls, chat, references, roles)
            if consumer is not None:
                await self._decode(calls, consumer, chat, prompt)
            else:
                await calls.reach(
                    lease.take(calls.pick(Role.DECODE)),
                    lease,
                    lambda one: self._decode(calls, one, chat, prompt),
                )

    async def _references(
        self,
        calls: Calls,
        chat: Chat,
        items: list[Item],
        roles: AbstractSet[Role],
        consumer: Instance | None,
    ) -> References:
        if items and Role.ENCODE in roles:
            push_to = calls.replica(consumer).ec_address if consumer else None
            return await self._encode(calls, chat, items, push_to)
        return as_it_came(chat, items)

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

    async def _roles_for(self, chat: Chat, calls: Calls) -> AbstractSet[Role]:
        """Who takes part. Raises NoInstance (503) before anybody is troubled in vain."""
        roles = {Role.DECODE}
        # The engine's beam search drops what the stages would hand to each other.
        if not chat.uses_beam_search:
            if calls.has(Role.PREFILL):
                roles.add(Role.PREFILL)
            if chat.media and calls.has(Role.ENCODE):
                roles.add(Role.ENCODE)
        for role in sorted(roles):
            try:
                await calls.expect(role)
            except NoInstance:
                if role is not Role.ENCODE or not self._falls_back:
                    raise
                roles.discard(role)
                calls.exchange.is_degraded = True
        return roles
