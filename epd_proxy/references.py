"""
What the consumer of embeddings (prefill, or decode where there is none) gets in place of media.

A part becomes a reference when its features came with metadata, else it stays raw with the
content key pinned as its uuid. vLLM refuses raw and embedded items of one modality in one request,
so a modality is rewritten as a whole or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, TypeAlias

import msgspec

from epd_proxy.media import EMBEDS, Item, Place
from epd_proxy.payload import Json, array_of, elements_of, is_array, object_of, to_json
from epd_proxy.reports import Feature
from epd_proxy.tensors import tensor_base64

Writer: TypeAlias = Callable[[Sequence[bytes]], bytes | None]
"""Makes a JSON value of numbers that are JSON; None if it cannot hold them."""

Described: TypeAlias = tuple[Item, tuple[Feature, ...]]
"""An item with the features that its encoder reported."""

ALL_MODALITIES = frozenset(EMBEDS.values())


class References(NamedTuple):
    """What encoding changes in the bodies for prefill and decode."""

    parts: Mapping[Place, bytes]
    """Parts that take the place of the caller's."""
    raw_parts: Mapping[Place, bytes]
    """The caller's media itself, under its content key, where KV is shared by content."""
    transfer: bytes | None
    """``ec_transfer_params`` for the consumer; None where there is nothing to tell."""
    stand_for_media: bool
    """Whether an engine that has no embeddings could not answer the body."""


def as_array(numbers: Sequence[bytes]) -> bytes:
    """A flat JSON array, which is what vLLM takes as metadata."""
    return array_of(numbers)


def as_tensor(numbers: Sequence[bytes]) -> bytes | None:
    """A tensor, which is what engines before vLLM 0.33 take."""
    tensor = tensor_base64(numbers)
    return None if tensor is None else b'"%b"' % tensor


def parts_for_consumer(
    described: Sequence[Described],
    *,
    embedded: AbstractSet[str],
    with_sound: bool,
    write: Writer = as_array,
) -> tuple[dict[Place, bytes], bool]:
    """
    The part that takes each item's place, and whether any of them is a reference.

    ``embedded``: modalities of which the caller's body holds references already; their items stay
    raw. ``with_sound``: the request asks for ``use_audio_in_video``.
    """
    references = {
        item.place: None if item.modality in embedded else _reference(item, features, write)
        for item, features in described
    }
    raw: AbstractSet[str] = _raw_modalities(described, references)
    # Processors of audio also look at the placeholders of the other modalities.
    if raw and any(
        item.modality == "audio" or (with_sound and item.modality == "video")
        for item, _ in described
    ):
        raw = ALL_MODALITIES
    parts: dict[Place, bytes] = {}
    for item, _ in described:
        reference = None if item.modality in raw else references[item.place]
        parts[item.place] = object_of(reference or item.pinned())
    return parts, any(item.modality not in raw for item, _ in described)


def _raw_modalities(
    described: Sequence[Described], references: Mapping[Place, dict[str, Json] | None]
) -> set[str]:
    """Modalities with an item that cannot be a reference, or with references unlike each other."""
    raw = {item.modality for item, _ in described if references[item.place] is None}
    shapes: dict[str, AbstractSet[str]] = {}
    for item, features in described:
        for feature in features:
            # vLLM wants the same keys in all references of a modality.
            keys = feature.metadata.keys()
            if shapes.setdefault(feature.modality, keys) != keys:
                raw.add(item.modality)
    return raw


def _reference(item: Item, features: Iterable[Feature], write: Writer) -> dict[str, Json] | None:
    """The part built anew: a left-over ``image_url`` beside ``image_embeds`` would win over it."""
    embeds: dict[str, Json] = {}
    for feature in features:
        metadata = {name: _flat(value, write) for name, value in feature.metadata.items()}
        if not metadata or feature.modality not in ALL_MODALITIES or None in metadata.values():
            return None
        embeds[f"{feature.modality}_embeds"] = object_of(
            {name: value for name, value in metadata.items() if value is not None}
        )
    kind = f"{item.modality}_embeds"
    if kind not in embeds:
        return None
    return {"type": to_json(kind), **embeds, "uuid": item.uuid, **item.extras()}


def _flat(value: msgspec.Raw, write: Writer) -> bytes | None:
    """
    A list of numbers, flattened by one level, every number spelled as it came.

    None if it is none: vLLM would refuse it. An empty one counts as none too, since it names no
    placeholder.
    """
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
    handles: Iterable[Mapping[str, Json]], features: Iterable[Feature]
) -> bytes | None:
    """
    ``ec_transfer_params`` for the consumer: all keyed entries verbatim, and the transfer ids.

    None if there is nothing to tell.
    """
    params: dict[str, Json] = {}
    for report in handles:
        params.update(report)
    ids = [
        to_json({"mm_hash": feature.mm_hash, "transfer_id": feature.transfer_id})
        for feature in features
        if feature.transfer_id is not None
    ]
    if ids:
        params["ec_items"] = array_of(ids)
    return object_of(params) if params else None
