from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from epd_proxy.media import MODALITY, Item, Place
from epd_proxy.reports import Feature, Report, Unmatched, match, parse_report

GRID = {"image_grid_thw": [1, 4, 4]}
HANDLE = {"peer_host": "10.0.0.11", "peer_port": 5601, "size_bytes": 16384, "shape": [4, 2048]}


def read(params: Any) -> Report:
    return parse_report(msgspec.Raw(json.dumps(params).encode()))


def item(index: int = 0, key: str = "k", kind: str = "image_url") -> Item:
    return Item(Place(0, index), kind, key, key, {})


def images(*keys: str) -> list[Item]:
    return [item(index, key) for index, key in enumerate(keys)]


def tree(feature: Feature) -> tuple[str, str, Any, str | None]:
    metadata = {name: msgspec.json.decode(value) for name, value in feature.metadata.items()}
    return feature.mm_hash, feature.modality, metadata, feature.transfer_id


def matched(items: list[Item], params: Any, *, with_sound: bool = False) -> list[list[Any]]:
    found = match(items, read(params), with_sound=with_sound)
    return [[tree(feature) for feature in features] for features in found]


def entry(grid: int, *indices: Any, **more: Any) -> dict[str, Any]:
    metadata = {"image_grid_thw": [1, grid, grid]}
    return {"modality": "image", "item_indices": [*indices], "metadata": metadata, **more}


FORMS = {
    "1": {"h": {"modality": "image", "item_indices": [0], "metadata": GRID, **HANDLE}},
    "1 without a handle": {"h": {"modality": "image", "item_indices": [0], "metadata": GRID}},
    "2": {"h": {"metadata": GRID, "peer_host": "x"}},
    "2 with nulls": {"h": {"metadata": GRID, "modality": None, "item_indices": None}},
    "3": {"ec_items": [{"mm_hash": "h", **GRID}]},
    "3 with a handle": {"ec_items": [{"mm_hash": "h", "modality": "image", **GRID, **HANDLE}]},
    "3 with metadata of its own": {"ec_items": [{"mm_hash": "h", "metadata": GRID, "x": [1]}]},
    "4": {"h": {"metadata": GRID}, "ec_items": [{"mm_hash": "h"}]},
}


@pytest.mark.parametrize("params", FORMS.values(), ids=FORMS.keys())
def test_every_form_describes_a_feature_in_the_same_words(params: Any) -> None:
    assert matched([item()], params) == [[("h", "image", GRID, None)]]


def test_an_old_forks_report_is_a_handle_without_metadata() -> None:
    handle = {"peer_host": "a", "peer_port": 1, "size_bytes": 2, "nixl_agent_metadata_b64": "x"}
    report = read({"k": handle})

    assert match([item()], report, with_sound=False) == [(Feature("k", "image", {}, None),)]
    assert msgspec.json.decode(report.handles["k"]) == handle


@pytest.mark.parametrize("params", [None, [], "x", 7, True, {}, {"ec_items": []}])
@pytest.mark.parametrize("with_sound", [False, True])
def test_no_entries_tell_nothing_of_any_item(params: Any, with_sound: bool) -> None:
    assert matched(images("a", "b"), params, with_sound=with_sound) == [[], []]
    assert matched([item(kind="video_url")], params, with_sound=with_sound) == [[]]


def test_values_that_are_no_objects_are_passed_over() -> None:
    report = read({"a": None, "b": 7, "c": [1], "d": "x", "ec_items": "y", "k": entry(4, 0)})

    assert list(report.handles) == ["k"]
    assert [found.mm_hash for found in report.entries] == ["k"]
    assert report.transfer_ids == []


@pytest.mark.parametrize(
    "odd", [None, 7, "x", [], [GRID], {"mm_hash": 7, "transfer_id": 7, "metadata": "x"}]
)
def test_odd_elements_of_the_list_form_are_features_of_which_nothing_is_known(odd: Any) -> None:
    params = {"ec_items": [odd, {"mm_hash": "h", **GRID}]}

    assert matched(images("a", "b"), params) == [
        [("", "image", {}, None)],
        [("h", "image", GRID, None)],
    ]


@pytest.mark.parametrize("metadata", [None, [], "x", 7, {}])
def test_odd_metadata_counts_as_none(metadata: Any) -> None:
    assert matched([item()], {"k": {"metadata": metadata}}) == [[("k", "image", {}, None)]]


def test_handles_are_the_keyed_entries_as_bytes() -> None:
    text = b'{ "h" : { "peer_port" : 5601 , "x" : 1.0 } , "ec_items" : [ ] }'

    handles = parse_report(msgspec.Raw(text)).handles

    assert {name: bytes(value) for name, value in handles.items()} == {
        "h": b'{ "peer_port" : 5601 , "x" : 1.0 }'
    }


def test_the_list_form_has_no_handles() -> None:
    assert read({"ec_items": [{"mm_hash": "h", **GRID}]}).handles == {}


def test_a_lone_item_takes_the_entry_under_its_uuid() -> None:
    assert matched([item()], {"a": entry(4, 0), "k": entry(6, 0)})[0][0][0] == "k"


def test_a_lone_item_takes_the_only_entry_whatever_its_key_and_position() -> None:
    assert matched([item()], {"a": entry(4, 7)})[0][0][0] == "a"


@pytest.mark.parametrize("kind", MODALITY)
def test_the_modality_defaults_to_that_of_the_part(kind: str) -> None:
    ((feature,),) = match([item(kind=kind)], read({"h": {"metadata": GRID}}), with_sound=False)

    assert feature.modality == MODALITY[kind]


def test_a_video_cut_into_features_of_the_models_own_stays_unknown() -> None:
    chunks = {name: {"modality": "vision_chunk", "metadata": {}} for name in "abc"}

    assert matched([item(kind="video_url")], chunks) == [[]]


@pytest.mark.parametrize("modality", ["image", None])
def test_two_entries_neither_of_which_is_the_items_cannot_be_matched(modality: str | None) -> None:
    params = {"a": {"modality": "vision_chunk"}, "b": {"modality": modality}}

    with pytest.raises(Unmatched, match=r"messages\[0\]\.content\[3\]"):
        matched([item(3)], params)


VIDEO = {"modality": "video", "item_indices": [0], "metadata": {"video_grid_thw": [1, 2, 2]}}
SOUND = {"modality": "audio", "item_indices": [1], "metadata": {"audio_feature_lengths": [9]}}


@pytest.mark.parametrize("params", [{"v": VIDEO, "s": SOUND}, {"s": SOUND, "v": VIDEO}])
def test_a_video_with_sound_is_two_features_in_either_order(params: Any) -> None:
    assert matched([item(kind="video_url")], params, with_sound=True) == [
        [
            ("v", "video", {"video_grid_thw": [1, 2, 2]}, None),
            ("s", "audio", {"audio_feature_lengths": [9]}, None),
        ]
    ]


def test_the_sound_may_come_before_the_picture() -> None:
    params = {"v": {**VIDEO, "item_indices": [1]}, "s": {**SOUND, "item_indices": [0]}}

    (found,) = matched([item(kind="video_url")], params, with_sound=True)

    assert [name for name, *_ in found] == ["s", "v"]


@pytest.mark.parametrize("more", [{}, {"modality": "video"}])
def test_a_model_without_audio_makes_one_feature_of_a_video_with_sound(more: Any) -> None:
    params = {"v": {"metadata": GRID, **more}}

    assert matched([item(kind="video_url")], params, with_sound=True) == [
        [("v", "video", GRID, None)]
    ]


def test_two_entries_without_modality_leave_a_video_with_sound_unknown() -> None:
    params = {"v": {"metadata": GRID}, "s": {"metadata": GRID}}

    assert matched([item(kind="video_url")], params, with_sound=True) == [[]]


NOT_VIDEO_AND_SOUND = {
    "three": {"v": VIDEO, "s": SOUND, "x": SOUND},
    "two videos": {"v": VIDEO, "s": {**VIDEO, "item_indices": [1]}},
    "one without modality": {"v": VIDEO, "s": {**SOUND, "modality": None}},
    "another modality": {"v": VIDEO, "s": {**SOUND, "modality": "image"}},
    "one position twice": {"v": VIDEO, "s": {**SOUND, "item_indices": [0]}},
    "no positions": {"v": {**VIDEO, "item_indices": None}, "s": {**SOUND, "item_indices": None}},
    "one without position": {"v": VIDEO, "s": {**SOUND, "item_indices": []}},
    "two positions": {"v": {**VIDEO, "item_indices": [0, 1]}, "s": {**SOUND, "item_indices": []}},
    "out of range": {"v": VIDEO, "s": {**SOUND, "item_indices": [2]}},
    "a bool": {"v": {**VIDEO, "item_indices": [False]}, "s": SOUND},
    "a float": {"v": {**VIDEO, "item_indices": [0.0]}, "s": SOUND},
    "no list": {"v": {**VIDEO, "item_indices": 0}, "s": SOUND},
}


@pytest.mark.parametrize("params", NOT_VIDEO_AND_SOUND.values(), ids=NOT_VIDEO_AND_SOUND.keys())
def test_what_is_not_a_video_and_its_sound_cannot_be_matched(params: Any) -> None:
    with pytest.raises(Unmatched, match=r"messages\[0\]\.content\[0\]"):
        matched([item(kind="video_url")], params, with_sound=True)


def test_sound_is_asked_for_of_videos_alone() -> None:
    assert matched([item(kind="input_audio")], {"k": SOUND, "v": VIDEO}, with_sound=True) == [
        [("k", "audio", SOUND["metadata"], None)]
    ]


def test_several_items_are_matched_by_position_and_may_share_an_entry() -> None:
    params = {"hb": entry(6, 1), "ha": entry(4, 2, 0)}

    found = matched(images("a", "b", "a"), params)

    assert [name for ((name, *_),) in found] == ["ha", "hb", "ha"]


def test_an_item_that_no_position_covers_takes_the_entry_under_its_uuid() -> None:
    params = {"b": {"metadata": GRID}, "ha": entry(6, 0)}

    found = matched(images("a", "b", "b"), params)

    assert [name for ((name, *_),) in found] == ["ha", "b", "b"]


def test_list_elements_belong_to_the_items_in_their_order() -> None:
    params = {"ec_items": [{"mm_hash": name, **GRID} for name in "xyx"]}

    found = matched(images("a", "b", "a"), params)

    assert [name for ((name, *_),) in found] == ["x", "y", "x"]


AMBIGUOUS = {
    "no positions": ({"h": {"metadata": GRID}}, "no entry for {0}, {1}"),
    "one item uncovered": ({"h": entry(4, 0)}, "no entry for {1}$"),
    "out of range": ({"h": entry(4, 0, 1, 2)}, "position 2 among the 2 of {0}, {1}"),
    "negative": ({"h": entry(4, -1)}, "position -1"),
    "a bool": ({"h": entry(4, 0, True)}, "position True"),
    "a float": ({"h": entry(4, 0, 1.0)}, "position 1.0"),
    "text": ({"h": entry(4, "0" * 99)}, "position '000+ among"),
    "twice in one entry": ({"h": entry(4, 0, 0)}, "position 0 twice, which is {0}"),
    "twice in two": ({"g": entry(4, 0, 1), "h": entry(6, 1)}, "position 1 twice, which is {1}"),
    "no list": ({"h": {**entry(4), "item_indices": {"0": 0}}}, "no list, for {0}, {1}"),
    "a list too short": ({"ec_items": [GRID]}, "no entry for {1}$"),
    "a list too long": ({"ec_items": [GRID, GRID, GRID]}, "position 2 among"),
}


@pytest.mark.parametrize(("params", "reason"), AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
def test_a_report_that_leaves_doubt_names_the_items_concerned(params: Any, reason: str) -> None:
    places = (rf"messages\[0\]\.content\[{index}\]" for index in range(2))

    with pytest.raises(Unmatched, match=reason.format(*places)):
        matched(images("a", "b"), params)


def test_transfer_ids_come_from_the_list_by_position_else_from_the_entry() -> None:
    params = {
        "ha": entry(4, 0, 2, transfer_id="last"),
        "hb": entry(6, 1, transfer_id="b"),
        "ec_items": [{"mm_hash": "ha", "transfer_id": "first"}, {"mm_hash": "hb"}],
    }

    found = matched(images("a", "b", "a"), params)

    assert [transfer_id for ((*_, transfer_id),) in found] == ["first", "b", "last"]


@pytest.mark.parametrize(
    "text",
    [
        b'{"h":{"item_indices":[1e400]}}',
        b'{"h":{"modality":"\xff"}}',
        b'{"\xff":{}}',
        b'{"h":{"metadata":{"\xff":[1]}}}',
    ],
)
def test_what_only_looks_like_json_is_an_error_of_decoding(text: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        parse_report(msgspec.json.decode(text, type=msgspec.Raw))
