"""
One chat request from top to bottom: encode, prefill, decode, and again what failed.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from epd_proxy.asgi import Exchange
from epd_proxy.calls import Calls, Fleet
from epd_proxy.chat import Chat
from epd_proxy.decode import DecodeStage
from epd_proxy.encode import EncodeStage, as_it_came
from epd_proxy.errors import ModelNotFound, NoInstance, Unreachable, UpstreamError
from epd_proxy.media import Item, Naming
from epd_proxy.prefill import PrefillStage
from epd_proxy.registry import Lease, Registry, Role


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
        registry = self._fleet.selection.registry
        if not registry.serves(chat.model):
            raise ModelNotFound(chat.model)
        calls = Calls(exchange, self._fleet, chat.model)
        roles = self._roles_for(chat, registry)
        if lacking := calls.lacking(roles):
            await self._wait_for(lacking, calls, roles)
        items: list[Item] = []
        if chat.media and (Role.ENCODE in roles or exchange.is_degraded or self._naming.renames):
            items = await chat.items(self._naming, owner)
        attempt = 0
        while True:
            pushes = registry.pushes
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
                if attempt > self._config.decode_retries:
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
            if items and Role.ENCODE in roles:
                push_to = calls.replica(consumer).ec_address if consumer else None
                references = await self._encode(calls, chat, items, push_to)
            else:
                references = as_it_came(chat, items)
            prompt = chat.with_parts(references.parts)
            if Role.PREFILL in roles:
                handle = await self._prefill(calls, chat, prompt, references)
                if self._shares_kv:
                    prompt = chat.with_parts(references.raw_parts)
                elif handle is not None:
                    prompt = {**prompt, "kv_transfer_params": handle}
            elif references.transfer is not None:
                prompt["ec_transfer_params"] = references.transfer
            if consumer is not None:
                await self._decode(calls, consumer, chat, prompt)
            else:
                await calls.reach(
                    lease.take(calls.pick(Role.DECODE)),
                    lease,
                    lambda one: self._decode(calls, one, chat, prompt),
                )

    def _roles_for(self, chat: Chat, registry: Registry) -> set[Role]:
        """Who takes part."""
        roles = {Role.DECODE}
        # The engine's beam search drops what the stages would hand to each other.
        if not chat.uses_beam_search:
            if registry.is_configured(Role.PREFILL):
                roles.add(Role.PREFILL)
            if chat.media and registry.is_configured(Role.ENCODE):
                roles.add(Role.ENCODE)
        return roles

    async def _wait_for(self, lacking: Iterable[Role], calls: Calls, roles: set[Role]) -> None:
        """
        Raises NoInstance (503), before anybody is troubled in vain.

        A role that can be done without is taken out of ``roles``.
        """
        for role in lacking:
            try:
                await calls.expect(role)
            except NoInstance:
                if role is not Role.ENCODE or not self._falls_back:
                    raise
                roles.discard(role)
                calls.exchange.is_degraded = True
