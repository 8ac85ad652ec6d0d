"""
The encode stage: media items to encoders, their reports back to references.

Each item is assigned to an encoder of its own; images that meet at one encoder share a call, every
audio and video is a call by itself. The calls run at once, and the first that fails ends the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import msgspec

from epd_proxy.calls import Calls
from epd_proxy.chat import Chat
from epd_proxy.errors import UpstreamError
from epd_proxy.media import Item
from epd_proxy.payload import NO_JSON, Buffer, Json, array_of, object_of
from epd_proxy.references import References, parts_for_consumer, transfer_params
from epd_proxy.registry import Instance, Role
from epd_proxy.reports import Feature, Report, Unmatched, match, parse_report

# What has a say in the cache key or in the engine's queue, and so must be the same everywhere.
_SHARED_FIELDS = ("mm_processor_kwargs", "media_io_kwargs", "priority", "session_id")


class Group(NamedTuple):
    """Items that share one encode call."""

    instance: Instance
    first: int
    """The index in the request of the first item."""
    items: list[Item]
    leases: ExitStack
    """The items' share in the instance's load: given back when the call ends, or the stage."""


class Encoded(NamedTuple):
    """One call's report, and the features of each of its items."""

    report: Report
    features: list[tuple[Feature, ...]]


class EncodeStage:
    """
    Encodes the media of a request.

    ``batch_size``: images in one call at most, 0 for no limit. ``rewrites``: whether media becomes
    references; if not, encode and consumer both see the caller's parts untouched.
    """

    def __init__(self, *, batch_size: int, rewrites: bool) -> None:
        self._batch_size = batch_size
        self._rewrites = rewrites

    async def __call__(self, calls: Calls, chat: Chat, items: Sequence[Item]) -> References:
        """Raises EngineRefusal, UpstreamError (a report that cannot be matched too), NoInstance."""
        with ExitStack() as stage:
            groups = self._assign(calls, items, stage)
            encoded = await _gather([self._encode(calls, chat, group) for group in groups])
        features = {
            item.place: found
            for group, result in zip(groups, encoded, strict=True)
            for item, found in zip(group.items, result.features, strict=True)
        }
        described = [(item, features[item.place]) for item in items]
        transfer = transfer_params(
            [result.report.handles for result in encoded],
            [feature for _, found in described for feature in found],
        )
        if not self._rewrites:
            return References({}, transfer, stand_for_media=bool(chat.embedded))
        parts, rewritten = parts_for_consumer(
            described, embedded=chat.embedded, with_sound=chat.with_sound
        )
        return References(parts, transfer, stand_for_media=rewritten or bool(chat.embedded))

    def _assign(self, calls: Calls, items: Sequence[Item], stage: ExitStack) -> list[Group]:
        groups: list[Group] = []
        shared: dict[Instance, Group] = {}
        for index, item in enumerate(items):
            instance = calls.pick(Role.ENCODE, item.key)
            group = shared.get(instance) if item.modality == "image" else None
            if group is None or len(group.items) == self._batch_size:
                group = Group(instance, index, [], stage.enter_context(ExitStack()))
                groups.append(group)
                if item.modality == "image":
                    shared[instance] = group
            group.leases.enter_context(instance.in_use())
            group.items.append(item)
        return groups

    async def _encode(self, calls: Calls, chat: Chat, group: Group) -> Encoded:
        with group.leases:
            content = await calls.ask(group.instance, str(group.first), self._body(chat, group))
        report = _report_of(content, group.instance)
        try:
            return Encoded(report, match(group.items, report, with_sound=chat.with_sound))
        except Unmatched as exc:
            # Without references nobody asks which entry is whose.
            if not self._rewrites:
                return Encoded(report, [()] * len(group.items))
            reason = f"reported what cannot be matched: {exc}"
            raise UpstreamError(Role.ENCODE, group.instance.url, reason) from exc

    def _body(self, chat: Chat, group: Group) -> list[Buffer]:
        parts = [
            object_of(item.for_encode() if self._rewrites else item.canonical())
            for item in group.items
        ]
        message = object_of({"role": b'"user"', "content": array_of(parts)})
        fields: dict[str, Json] = {"messages": array_of([message]), "stream": b"false"}
        given = chat.payload.fields
        fields |= {name: given[name] for name in ("model", *_SHARED_FIELDS) if name in given}
        return chat.payload.expand(object_of(fields))


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


_ANSWER = msgspec.json.Decoder(_EncodeAnswer)


def _report_of(content: bytes, instance: Instance) -> Report:
    try:
        answer = _ANSWER.decode(content)
        report = parse_report(answer.ec_transfer_params)
    except NO_JSON as exc:
        reason = "answered with what is no chat completion"
        raise UpstreamError(Role.ENCODE, instance.url, reason, cause=str(exc)) from exc
    if ended := _finish_reasons(answer.choices) & {"abort", "error"}:
        reason = f"gave up: finish_reason {ended.pop()}"
        raise UpstreamError(Role.ENCODE, instance.url, reason)
    return report


def _finish_reasons(choices: Any) -> set[str]:
    found = choices if isinstance(choices, list) else []
    reasons = [choice.get("finish_reason") for choice in found if isinstance(choice, dict)]
    return {reason for reason in reasons if isinstance(reason, str)}
