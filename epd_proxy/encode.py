"""
The encode stage: media items to encoders, their reports back to references.

Each item is assigned to an encoder of its own; images that meet at one encoder share a call, every
audio and video is a call by itself. The calls run at once, and the first that fails ends the rest.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from epd_proxy.calls import Calls
from epd_proxy.chat import Chat
from epd_proxy.config import Config
from epd_proxy.errors import NoInstance, UpstreamError
from epd_proxy.media import Item, Place
from epd_proxy.payload import NO_JSON, Buffer, Json, to_json
from epd_proxy.references import (
    NO_REFERENCES,
    Described,
    References,
    as_array,
    as_tensor,
    parts_for_consumer,
    pinned,
    transfer_params,
)
from epd_proxy.registry import Instance, Lease, Role
from epd_proxy.reports import NO_REPORT, Feature, Report, Unmatched, match, parse_report

# What has a say in the cache key or in the engine's queue, and so must be the same everywhere.
_SHARED_FIELDS = frozenset(
    {"model", "mm_processor_kwargs", "media_io_kwargs", "priority", "session_id"}
)


class Group(NamedTuple):
    """Items that share one encode call."""

    instance: Instance
    first: int
    """The index in the request of the first item."""
    items: list[Item]
    lease: Lease
    """The items' share in the instance's load: given back when the call ends, or the stage."""


class Encoded(NamedTuple):
    """One call's report, and its items with what they became."""

    report: Report
    described: list[Described]


def as_it_came(chat: Chat, items: Sequence[Item]) -> References:
    """Media that nobody encodes before the consumer, under its content keys."""
    if not items and not chat.embedded:
        return NO_REFERENCES
    raw = pinned(items)
    return References(raw, raw, None, stand_for_media=bool(chat.embedded))


class EncodeStage:
    """Encodes the media of a request."""

    def __init__(self, config: Config) -> None:
        self._batch_size = config.encoder_batch_size
        self._retries = config.encode_retries
        self._falls_back = config.encode_fallback == "raw"
        self._rewrites = not config.no_rewrite
        self._renames = config.media_ids != "caller"
        self._pins = config.kv_connector == "shared"
        self._write = as_tensor if config.metadata_format == "tensor" else as_array
        self._own_fields: dict[str, Json] = {"stream": False}
        if config.encode_max_tokens:
            self._own_fields["max_tokens"] = config.encode_max_tokens

    async def __call__(
        self, calls: Calls, chat: Chat, items: Sequence[Item], push_to: str | None = None
    ) -> References:
        """
        ``push_to``: where the encoders push the embeddings; without, the consumer pulls them.

        Raises EngineError, NoInstance, and UpstreamError, for a report too that cannot be matched
        to the items.
        """
        groups: list[Group] = []
        try:
            if not self._assign(calls, items, groups):
                calls.exchange.is_degraded = True
                return as_it_came(chat, items)
            encoded = await _gather([self._encode(calls, chat, each, push_to) for each in groups])
        finally:
            for group in groups:
                group.lease.give_back()
        described = [pair for result in encoded for pair in result.described]
        if len(encoded) > 1:
            described.sort(key=_place_of)
        transfer = transfer_params([result.report.handles for result in encoded], described)
        stand_for_media = bool(chat.embedded)
        if not self._rewrites:
            parts = pinned(items) if self._renames else {}
            return References(parts, {}, transfer, stand_for_media)
        parts, rewritten = parts_for_consumer(
            described, embedded=chat.embedded, with_sound=chat.with_sound, write=self._write
        )
        raw = pinned(items) if self._pins else {}
        return References(parts, raw, transfer, stand_for_media or rewritten)

    def _assign(self, calls: Calls, items: Sequence[Item], groups: list[Group]) -> bool:
        """Fills ``groups``; False if there is no encoder, and the media may go on as it is."""
        shared: dict[Instance, Group] = {}
        try:
            for index, item in enumerate(items):
                instance = calls.pick(Role.ENCODE, item.key)
                is_image = item.kind == "image_url"
                group = shared.get(instance) if is_image else None
                if group is None or len(group.items) == self._batch_size:
                    group = Group(instance, index, [], Lease())
                    groups.append(group)
                    if is_image:
                        shared[instance] = group
                group.lease.take(instance, item.size)
                group.items.append(item)
        except NoInstance:
            if not self._falls_back:
                raise
            return False
        return True

    async def _encode(self, calls: Calls, chat: Chat, group: Group, push_to: str | None) -> Encoded:
        try:
            with group.lease:
                return await self._persist(calls, chat, group, push_to)
        except (UpstreamError, NoInstance) as failure:
            if not self._falls_back or failure.status < 500 or failure.status == 501:
                raise
            calls.exchange.is_degraded = True
            return Encoded(NO_REPORT, [(item, ()) for item in group.items])

    async def _persist(
        self, calls: Calls, chat: Chat, group: Group, push_to: str | None
    ) -> Encoded:
        """Another encoder gets what one has failed, up to ``--encode-retries`` times."""
        instance, attempt = group.instance, 0
        while True:
            try:
                return await self._attempt(calls, chat, group, instance, push_to)
            except UpstreamError as failure:
                attempt += 1
                if attempt > self._retries:
                    raise
                await calls.redo(failure, attempt)
            instance = calls.pick(Role.ENCODE, group.items[0].key)
            group.lease.move(instance)

    async def _attempt(
        self, calls: Calls, chat: Chat, group: Group, instance: Instance, push_to: str | None
    ) -> Encoded:
        push = Push(push_to, group.items, chat) if push_to else None
        body = self._body(chat, group, push)
        instance, content = await calls.reach(
            instance,
            group.lease,
            lambda one: calls.ask(one, str(group.first), body),
            group.items[0].key,
        )
        report = _report_of(content, instance)
        try:
            features = match(group.items, report, with_sound=chat.with_sound)
        except Unmatched as exc:
            # Without references, and without ids to hand on, nobody asks which entry is whose.
            if self._rewrites or push:
                reason = f"reported what cannot be matched: {exc}"
                raise UpstreamError(instance, reason) from exc
            features = [()] * len(group.items)
        if push:
            if not report.entries:
                reason = "reported nothing of what it was to push"
                raise UpstreamError(instance, reason)
            features = push.named(features)
        return Encoded(report, list(zip(group.items, features, strict=True)))

    def _body(self, chat: Chat, group: Group, push: Push | None) -> list[Buffer]:
        parts = [item.for_encode() if self._rewrites else item.canonical() for item in group.items]
        fields: dict[str, Json] = {
            "messages": [{"role": "user", "content": parts}],
            **self._own_fields,
        }
        given = chat.payload.fields
        for name in _SHARED_FIELDS & given.keys():
            fields[name] = given[name]
        if push:
            fields["ec_transfer_params"] = push.params()
        return chat.payload.expand(to_json(fields))


def _place_of(described: Described) -> Place:
    return described[0].place


class Push:
    """
    The transfers of one encode call that pushes (``ECMooncakeConnector``).

    One id for each feature that an item is expected to become, new for each call: an id that was
    used before would fail the request.
    """

    def __init__(self, address: str, items: Sequence[Item], chat: Chat) -> None:
        self._address = address
        self._ids = [
            [uuid.uuid4().hex for _ in range(2 if _has_sound(item, chat) else 1)] for item in items
        ]

    def params(self) -> Json:
        """``ec_transfer_params`` of the call; features are told apart by their order."""
        transfers = [{"transfer_id": each} for ids in self._ids for each in ids]
        return {"consumer_zmq": self._address, "ec_items": transfers}

    def named(self, features: Sequence[tuple[Feature, ...]]) -> list[tuple[Feature, ...]]:
        """The features of each item under the ids that were sent for them."""
        return [
            tuple(
                feature._replace(transfer_id=each)
                for feature, each in zip(found, ids, strict=False)  # a video may have no sound
            )
            for found, ids in zip(features, self._ids, strict=True)
        ]


def _has_sound(item: Item, chat: Chat) -> bool:
    return item.kind == "video_url" and chat.with_sound


async def _gather(calls: list[Any]) -> list[Encoded]:
    if len(calls) == 1:
        return [await calls[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


class _EncodeAnswer(msgspec.Struct):
    choices: Any = None
    ec_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_GIVEN_UP = ("abort", "error")
_ANSWER = msgspec.json.Decoder(_EncodeAnswer)


def _report_of(content: bytes, instance: Instance) -> Report:
    try:
        answer = _ANSWER.decode(content)
        report = parse_report(answer.ec_transfer_params)
    except NO_JSON as exc:
        reason = "answered with what is no chat completion"
        raise UpstreamError(instance, reason, cause=str(exc)) from exc
    choices = answer.choices if isinstance(answer.choices, list) else ()
    for choice in choices:
        ended = choice.get("finish_reason") if isinstance(choice, dict) else None
        if ended in _GIVEN_UP:
            raise UpstreamError(instance, f"gave up: finish_reason {ended}")
    return report
