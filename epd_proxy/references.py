"""
What the consumer of embeddings (prefill, or decode where there is none) gets in place of media.

A part becomes a reference when its features came with metadata, else it stays raw with the
content key pinned as its uuid. vLLM refuses raw and embedded items of one modality in one request,
so a modality is rewritten as a whole or not at all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, TypeAlias

import msgspec

from epd_proxy.media import EMBEDS, Item, Place
from epd_proxy.payload import Json, elements_of, is_array
from epd_proxy.reports import Feature
from epd_proxy.tensors import tensor_base64

Writer: TypeAlias = Callable[[Sequence[bytes]], Json | None]
"""Makes a JSON value of numbers as they are spelled; None if it cannot hold them."""

Described: TypeAlias = tuple[Item, tuple[Feature, ...]]
"""An item with the features that its encoder reported."""

ALL_MODALITIES = frozenset(EMBEDS.values())

_INTEGER = rb"-?(?:0|[1-9][0-9]{0,17})"
# What encoders send nearly always: a grid.
_INTEGERS = re.compile(rb"\[\[?%b(?:,%b)*\]?\]" % (_INTEGER, _INTEGER))


class References(NamedTuple):
    """What encoding changes in the bodies for prefill and decode."""

    parts: Mapping[Place, Json]
    """Parts that take the place of the caller's."""
    raw_parts: Mapping[Place, Json]
    """The caller's media itself, under its content key, where KV is shared by content."""
    transfer: Json | None
    """``ec_transfer_params`` for the consumer; None where there is nothing to tell."""
    stand_for_media: bool
    """Whether an engine that has no embeddings could not answer the body."""


NO_REFERENCES = References({}, {}, None, stand_for_media=False)


def pinned(items: Iterable[Item]) -> dict[Place, Json]:
    """The caller's media itself, under its content keys."""
    return {item.place: item.pinned() for item in items}


def as_array(numbers: Sequence[bytes]) -> Json:
    """A flat JSON array, which is what vLLM takes as metadata."""
    return msgspec.Raw(b"[%b]" % b",".join(numbers))


def as_tensor(numbers: Sequence[bytes]) -> str | None:
    """A tensor, which is what engines before vLLM 0.33 take."""
    return tensor_base64(numbers)


def parts_for_consumer(
    described: Sequence[Described],
    *,
    embedded: AbstractSet[str],
    with_sound: bool,
    write: Writer = as_array,
) -> tuple[dict[Place, Json], bool]:
    """
    The part that takes each item's place, and whether any of them is a reference.

    ``embedded``: modalities of which the caller's body holds references already; their items stay
    raw. ``with_sound``: the request asks for ``use_audio_in_video``.
    """
    parts: dict[Place, Json] = {}
    raw: set[str] = set()
    shapes: dict[str, AbstractSet[str]] = {}
    for item, features in described:
        modality = item.modality
        parts[item.place] = None if modality in embedded else _reference(item, features, write)
        if parts[item.place] is None:
            raw.add(modality)
        for feature in features:
            # vLLM wants the same keys in all references of a modality.
            keys = feature.metadata.keys()
            if shapes.setdefault(feature.modality, keys) != keys:
                raw.add(modality)
    if not raw:
        return parts, bool(described)
    # Processors of audio also look at the placeholders of the other modalities.
    if any(
        item.modality == "audio" or (with_sound and item.modality == "video")
        for item, _ in described
    ):
        return pinned([item for item, _ in described]), False
    stay = [item for item, _ in described if item.modality in raw]
    return {**parts, **pinned(stay)}, len(stay) < len(described)


def _reference(item: Item, features: Iterable[Feature], write: Writer) -> dict[str, Json] | None:
    """The part built anew: a left-over ``image_url`` beside ``image_embeds`` would win over it."""
    embeds: dict[str, Json] = {}
    for feature in features:
        metadata = {name: _flat(value, write) for name, value in feature.metadata.items()}
        if not metadata or feature.modality not in ALL_MODALITIES or None in metadata.values():
            return None
        embeds[f"{feature.modality}_embeds"] = metadata
    kind = f"{item.modality}_embeds"
    if kind not in embeds:
        return None
    return {"type": kind, **embeds, "uuid": item.uuid, **item.extras()}


def _flat(value: msgspec.Raw, write: Writer) -> Json | None:
    """
    A list of numbers, flattened by one level, every number spelled as it came.

    None if it is none: vLLM would refuse it. An empty one counts as none too, since it names no
    placeholder.
    """
    text = bytes(value)
    if _INTEGERS.fullmatch(text):
        return write(text.strip(b"[]").split(b","))
    numbers: list[msgspec.Raw] = []
    for element in _elements(value):
        numbers += _elements(element)
    if not numbers or not all(map(_is_number, numbers)):
        return None
    return write([bytes(number) for number in numbers])


def _elements(value: msgspec.Raw) -> list[msgspec.Raw]:
    return elements_of(value) if is_array(value) else [value]


def _is_number(value: msgspec.Raw) -> bool:
    text = bytes(value)
    return text[:1] in b"-0123456789" and math.isfinite(float(text))


def transfer_params(
    handles: Iterable[Mapping[str, Json]], described: Iterable[Described]
) -> Json | None:
    """
    ``ec_transfer_params`` for the consumer: all keyed entries verbatim, and the transfer ids.

    None if there is nothing to tell.
    """
    params: dict[str, Json] = {}
    for report in handles:
        params.update(report)
    ids = [
        {"mm_hash": feature.mm_hash, "transfer_id": feature.transfer_id}
        for _, features in described
        for feature in features
        if feature.transfer_id is not None
    ]
    if ids:
        params["ec_items"] = ids
    return params or None
