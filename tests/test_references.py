from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from epd_proxy.media import Item, Place
from epd_proxy.payload import fields_of, to_json
from epd_proxy.references import Described, parts_for_consumer, transfer_params
from epd_proxy.reports import Feature

GRID = {"image_grid_thw": [1, 4, 4]}
VIDEO = {"video_grid_thw": [1, 2, 2]}
SOUND = {"audio_feature_lengths": [9]}


def item(index: int = 0, kind: str = "image_url", **more: Any) -> Item:
    part = {"type": kind, kind: {"url": f"http://{index}"}, **more}
    fields = fields_of(json.dumps(part).encode())
    return Item(Place(0, index), kind, f"k{index}", f"k{index}", fields)


def feature(metadata: Any, modality: str = "image", transfer_id: str | None = None) -> Feature:
    return Feature("h", modality, fields_of(json.dumps(metadata).encode()), transfer_id)


def raw(metadata: bytes, modality: str = "image") -> Feature:
    return Feature("h", modality, fields_of(metadata), None)


def rewritten(
    *described: Described, embedded: frozenset[str] = frozenset(), with_sound: bool = False
) -> tuple[list[bytes], bool]:
    parts, any_reference = parts_for_consumer(described, embedded=embedded, with_sound=with_sound)
    return [to_json(parts[found.place]) for found, _ in described], any_reference


def types(*described: Described, **options: Any) -> list[str]:
    return [json.loads(part)["type"] for part in rewritten(*described, **options)[0]]


@pytest.mark.parametrize(
    ("kind", "modality"),
    [
        ("image_url", "image"),
        ("video_url", "video"),
        ("audio_url", "audio"),
        ("input_audio", "audio"),
    ],
)
def test_a_described_item_becomes_a_reference_of_its_modality(kind: str, modality: str) -> None:
    (part,), any_reference = rewritten((item(kind=kind), (feature({"n": [25]}, modality),)))

    assert json.loads(part) == {
        "type": f"{modality}_embeds",
        f"{modality}_embeds": {"n": [25]},
        "uuid": "k0",
    }
    assert any_reference


@pytest.mark.parametrize(
    ("metadata", "flat"),
    [
        (b"[1, 4, 4]", b"[1,4,4]"),
        (b"[[1,4,4]]", b"[1,4,4]"),
        (b"[[1,4,4],[1,6,4]]", b"[1,4,4,1,6,4]"),
        (b"[[1],2,[]]", b"[1,2]"),
        (b"25", b"[25]"),
        (b"[1.0]", b"[1.0]"),
        (b"[ [ 1.50 , -2e0 ] ]", b"[1.50,-2e0]"),
        (b"[9223372036854775807]", b"[9223372036854775807]"),
    ],
)
def test_metadata_is_flattened_by_one_level_and_numbers_keep_their_spelling(
    metadata: bytes, flat: bytes
) -> None:
    (part,), _ = rewritten((item(), (raw(b'{"image_grid_thw":%b}' % metadata),)))

    assert b'"image_embeds":{"image_grid_thw":%b}' % flat in part


ODD = [b"[]", b"[[]]", b"[[[1]]]", b"null", b"true", b"[1,true]", b'"AAAA"', b'["1"]', b"{}"]
ODD += [b"[1,null]", b"[{}]", b"[1e400]", b"[-1e400]"]


@pytest.mark.parametrize("value", ODD)
def test_metadata_that_is_no_list_of_numbers_leaves_the_item_raw_with_its_uuid(
    value: bytes,
) -> None:
    odd = raw(b'{"image_grid_thw":[1,4,4],"x":%b}' % value)

    (part,), any_reference = rewritten((item(), (odd,)))

    assert json.loads(part) == {
        "type": "image_url",
        "image_url": {"url": "http://0"},
        "uuid": "k0",
    }
    assert not any_reference


@pytest.mark.parametrize(
    "features",
    [
        (),
        (feature({}),),
        (feature(GRID, "vision_chunk"),),
        (feature(GRID, "video"),),
        (feature(GRID), feature({}, "audio")),
    ],
    ids=["no feature", "no metadata", "a modality of its own", "another modality", "one of two"],
)
def test_an_item_without_usable_metadata_stays_raw(features: tuple[Feature, ...]) -> None:
    assert types((item(), features)) == ["image_url"]


def test_a_raw_part_keeps_its_bytes_but_for_the_uuid() -> None:
    text = b'{"type":"image_url","image_url":{ "url" : "\\u0061" },"uuid":null,"n":1.0}'
    found = Item(Place(0, 0), "image_url", "k", "k", fields_of(text))

    assert rewritten((found, ()))[0] == [text.replace(b"null", b'"k"')]


def test_a_reference_is_built_anew_and_keeps_only_keys_that_engines_do_not_read() -> None:
    old: dict[str, Any] = {
        "image_embeds": None,
        "audio_url": "x",
        "prompt_embeds": "y",
        "image_pil": "z",
    }
    kept: dict[str, Any] = {"lang": "é", "cache_control": {"ttl": 1.0}}

    (part,), _ = rewritten((item(uuid=7, **old, **kept), (feature(GRID),)))

    assert json.loads(part) == {"type": "image_embeds", "image_embeds": GRID, "uuid": "k0", **kept}
    assert b'{"ttl": 1.0}' in part


def test_a_video_with_its_sound_is_one_part_with_two_embeds() -> None:
    features = (feature(SOUND, "audio"), feature(VIDEO, "video"))

    (part,), _ = rewritten((item(kind="video_url"), features), with_sound=True)

    assert json.loads(part) == {
        "type": "video_embeds",
        "video_embeds": VIDEO,
        "audio_embeds": SOUND,
        "uuid": "k0",
    }


def test_one_item_that_stays_raw_keeps_its_whole_modality_raw() -> None:
    described = [
        (item(0), (feature(GRID),)),
        (item(1), ()),
        (item(2, "video_url"), (feature(VIDEO, "video"),)),
    ]

    parts, any_reference = rewritten(*described)

    assert [json.loads(part)["type"] for part in parts] == ["image_url"] * 2 + ["video_embeds"]
    assert [json.loads(part)["uuid"] for part in parts] == ["k0", "k1", "k2"]
    assert any_reference


@pytest.mark.parametrize(
    "described",
    [
        [(item(0), ()), (item(1, "input_audio"), (feature(SOUND, "audio"),))],
        [(item(0), (feature(GRID),)), (item(1, "audio_url"), ())],
    ],
)
def test_beside_audio_one_item_that_stays_raw_keeps_all_raw(described: list[Described]) -> None:
    parts, any_reference = rewritten(*described)

    assert not any(b"_embeds" in part for part in parts)
    assert not any_reference


def test_beside_a_video_with_sound_one_item_that_stays_raw_keeps_all_raw() -> None:
    described: list[Described] = [
        (item(0), ()),
        (item(1, "video_url"), (feature(VIDEO, "video"), feature(SOUND, "audio"))),
    ]

    assert types(*described, with_sound=True) == ["image_url", "video_url"]
    assert types(*described) == ["image_url", "video_embeds"]


def test_references_of_one_modality_with_unlike_keys_stay_raw() -> None:
    described = [
        (item(0), (feature(GRID),)),
        (item(1), (feature({**GRID, "x": [1]}),)),
        (item(2, "video_url"), (feature(VIDEO, "video"),)),
    ]

    assert types(*described) == ["image_url", "image_url", "video_embeds"]


def test_the_sound_of_a_video_must_look_like_the_other_audio() -> None:
    described = [
        (item(0, "video_url"), (feature(VIDEO, "video"), feature(SOUND, "audio"))),
        (item(1, "audio_url"), (feature({"audio_num_tokens": [1]}, "audio"),)),
    ]

    assert types(*described, with_sound=True) == ["video_url", "audio_url"]


def test_items_beside_the_callers_own_references_of_their_modality_stay_raw() -> None:
    described = [(item(0), (feature(GRID),)), (item(1, "video_url"), (feature(VIDEO, "video"),))]

    found = types(*described, embedded=frozenset({"image"}))

    assert found == ["image_url", "video_embeds"]


def test_the_callers_own_references_do_not_keep_other_modalities_raw() -> None:
    described = (item(0, "audio_url"), (feature(SOUND, "audio"),))

    assert types(described, embedded=frozenset({"image"})) == ["audio_embeds"]


def transfer(handles: Sequence[Mapping[str, bytes]], *ids: str | None) -> bytes | None:
    raws = [{name: msgspec.Raw(value) for name, value in each.items()} for each in handles]
    features = [feature(GRID, transfer_id=transfer_id) for transfer_id in ids]
    params = transfer_params(raws, [(item(), (each,)) for each in features])
    return None if params is None else to_json(params)


def test_transfer_params_are_all_keyed_entries_verbatim() -> None:
    handles = [{"a": b'{ "x" : 1.0 }', "b": b"{}"}, {"c": b'{"metadata":[[1]]}'}]

    assert transfer(handles, None) == b'{"a":{ "x" : 1.0 },"b":{},"c":{"metadata":[[1]]}}'


def test_transfer_ids_are_listed_in_the_order_of_the_features() -> None:
    assert json.loads(transfer([{"a": b"{}"}], "t1", None, "t1", "t2") or b"") == {
        "a": {},
        "ec_items": [{"mm_hash": "h", "transfer_id": name} for name in ("t1", "t1", "t2")],
    }


@pytest.mark.parametrize("handles", [[], [{}, {}]])
def test_there_are_no_transfer_params_where_there_is_nothing_to_tell(
    handles: list[dict[str, bytes]],
) -> None:
    assert transfer(handles, None) is None
