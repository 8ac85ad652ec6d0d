"""
What an encoder reports of the items it was sent, and which entry belongs to which item.

The report is ``ec_transfer_params`` of the encoder's answer. Forms seen in the field, all read
here (``h`` is the encoder's own key of a feature, the mm_hash, which need not equal the uuid):

1. ``{h: {"modality": "image", "item_indices": [0, 2], "metadata": {...}, handle...}}``
2. the same without ``modality`` or ``item_indices`` (older)
3. ``{"ec_items": [{"mm_hash": h, metadata inline...}, ...]}``, in order of the features (older)
4. 1 or 2 with a list ``ec_items`` beside it, which names a transfer id for each position
5. ``{h: {handle...}}`` without ``metadata`` (old forks)

Form 1 is vLLM 0.33.0's (``vllm/distributed/ec_transfer/ec_connector/utils.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from epd_proxy.media import EMBEDS, Item
from epd_proxy.payload import elements_of, fields_of, is_array, is_object

# What stands in an entry beside metadata: names, positions and the connectors' handles.
_NOT_METADATA = frozenset(
    {
        "mm_hash",
        "transfer_id",
        "modality",
        "item_indices",
        "peer_host",
        "peer_port",
        "size_bytes",
        "shape",
        "nixl_agent_metadata_b64",
    }
)


class Unmatched(Exception):
    """A report that cannot be told apart; says which items are concerned."""


class Entry(NamedTuple):
    mm_hash: str
    modality: str | None
    indices: Any
    """As reported: a list of positions among the features of the call, null, or nonsense."""
    metadata: dict[str, msgspec.Raw]
    transfer_id: str | None


class Report(NamedTuple):
    """One encode call's report, in one form whatever form it came in."""

    entries: list[Entry]
    handles: dict[str, msgspec.Raw]
    """The keyed entries, verbatim: the consumer finds embeddings by them."""
    transfer_ids: list[str | None]
    """For each position, where the report lists them."""


NO_REPORT = Report([], {}, [])


class Feature(NamedTuple):
    """What an item became in the engine; a video with its sound becomes two."""

    mm_hash: str
    modality: str
    metadata: dict[str, msgspec.Raw]
    transfer_id: str | None


_ABSENT = msgspec.Raw(b"")


class _EntryFields(msgspec.Struct):
    mm_hash: Any = None
    modality: Any = None
    item_indices: Any = None
    metadata: msgspec.Raw = _ABSENT
    transfer_id: Any = None


_ENTRY = msgspec.json.Decoder(_EntryFields)
_NOTHING = _EntryFields()


def parse_report(params: msgspec.Raw) -> Report:
    """
    Anything but an object counts as no report; members that are no objects are passed over.

    Raises msgspec.DecodeError for what ``Raw`` let through although it is no JSON.
    """
    if not is_object(params):
        return NO_REPORT
    members = fields_of(params)
    handles = {name: value for name, value in members.items() if is_object(value)}
    keyed = [_entry(name, _ENTRY.decode(value)) for name, value in handles.items()]
    items = members.get("ec_items")
    if items is None or not is_array(items):
        return Report(keyed, handles, [])
    listed = [_listed_entry(k, value) for k, value in enumerate(elements_of(items))]
    return Report(keyed or listed, handles, [entry.transfer_id for entry in listed])


def _listed_entry(position: int, value: msgspec.Raw) -> Entry:
    fields = _ENTRY.decode(value) if is_object(value) else _NOTHING
    entry = _entry(_text(fields.mm_hash) or "", fields)._replace(indices=[position])
    if fields is _NOTHING or fields.metadata is not _ABSENT:
        return entry
    inline = {name: v for name, v in fields_of(value).items() if name not in _NOT_METADATA}
    return entry._replace(metadata=inline)


def _entry(mm_hash: str, fields: _EntryFields) -> Entry:
    return Entry(
        mm_hash,
        _text(fields.modality),
        fields.item_indices,
        # Form 5 holds a handle alone: nothing in it is metadata.
        fields_of(fields.metadata) if is_object(fields.metadata) else {},
        _text(fields.transfer_id),
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def match(items: Sequence[Item], report: Report, *, with_sound: bool) -> list[tuple[Feature, ...]]:
    """
    The features of each item of a call. An item without features is one nothing is known of.

    ``with_sound``: the request asks for ``use_audio_in_video``. Raises Unmatched.
    """
    if not report.entries:
        return [()] * len(items)
    if len(items) > 1:
        return _by_position(items, report)
    if with_sound and items[0].kind == "video_url":
        return [_video_with_sound(items[0], report)]
    return [_only(items[0], report)]


def _only(item: Item, report: Report) -> tuple[Feature, ...]:
    entries = report.entries
    entry = entries[0] if len(entries) == 1 else _named(item, report)
    if entry:
        return (_feature(item, entry, report, 0),)
    # Some models cut one video into several features of a modality of their own.
    if all(other.modality and other.modality not in EMBEDS.values() for other in entries):
        return ()
    raise Unmatched(f"{len(entries)} entries for {item.place}, none under its uuid")


def _video_with_sound(item: Item, report: Report) -> tuple[Feature, ...]:
    entries = report.entries
    # A model without audio ignores the option.
    if len(entries) == 1:
        return (_feature(item, entries[0], report, 0),)
    if len(entries) == 2:
        if not any(entry.modality for entry in entries):
            return ()
        owners = _owners([item] * 2, entries)
        if len(owners) == 2 and {entry.modality for entry in owners.values()} == {"video", "audio"}:
            return tuple(_feature(item, owners[k], report, k) for k in range(2))
    raise Unmatched(
        f"{len(entries)} entries for {item.place}, which are not one video and its sound"
    )


def _by_position(items: Sequence[Item], report: Report) -> list[tuple[Feature, ...]]:
    owners = _owners(items, report.entries)
    found = [owners.get(k) or _named(item, report) for k, item in enumerate(items)]
    if missing := [item for item, entry in zip(items, found, strict=True) if not entry]:
        raise Unmatched(f"no entry for {_places(missing)}")
    return [
        (_feature(item, entry, report, k),)
        for k, (item, entry) in enumerate(zip(items, found, strict=True))
        if entry
    ]


def _owners(items: Sequence[Item], entries: Sequence[Entry]) -> dict[int, Entry]:
    """Which entry claims each of the positions, ``items`` being what should stand there."""
    owners: dict[int, Entry] = {}
    for entry in entries:
        for index in _indices_of(entry, items):
            # A bool is an int too, but no position.
            if type(index) is not int or not 0 <= index < len(items):
                raise Unmatched(
                    f"position {index!r:.40} among the {len(items)} of {_places(items)}"
                )
            if index in owners:
                raise Unmatched(f"position {index} twice, which is {items[index].place}")
            owners[index] = entry
    return owners


def _indices_of(entry: Entry, items: Sequence[Item]) -> list[Any]:
    if entry.indices is None:
        return []
    if not isinstance(entry.indices, list):
        raise Unmatched(f"item_indices that are no list, for {_places(items)}")
    return entry.indices


def _places(items: Iterable[Item]) -> str:
    return ", ".join(dict.fromkeys(str(item.place) for item in items))


def _named(item: Item, report: Report) -> Entry | None:
    return next((entry for entry in report.entries if entry.mm_hash == item.key), None)


def _feature(item: Item, entry: Entry, report: Report, position: int) -> Feature:
    listed = report.transfer_ids[position : position + 1]
    transfer_id = (listed[0] if listed else None) or entry.transfer_id
    return Feature(entry.mm_hash, entry.modality or item.modality, entry.metadata, transfer_id)
