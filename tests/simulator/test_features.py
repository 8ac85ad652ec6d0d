from __future__ import annotations

import hashlib
from typing import Any

import pytest

from epd_proxy.simulator import ROLES, Simulator, memory
from tests.simulator.bodies import (
    BLUE,
    CLIP,
    RED,
    WITH_SOUND,
    Json,
    ask,
    assert_refused,
    audio,
    chat,
    reference,
    report,
    text,
    url_part,
)

REFUSED = [
    (chat(url_part("")), "multi_modal_uuids", "multi_modal_data['image'][0] is empty"),
    (chat({"type": "image_url", "image_url": None}), "multi_modal_uuids", "is empty"),
    (chat(url_part(7)), "multi_modal_uuids", "is empty"),
    (chat({"type": "input_audio", "input_audio": None}), "multi_modal_uuids", "['audio'][0]"),
    (chat(audio("")), "multi_modal_uuids", "multi_modal_data['audio'][0] is empty"),
    (
        chat({"type": "image_url", "image_url": None, "uuid": "u1"}),
        None,
        "Cache miss for image at index 0 but data is not provided.",
    ),
    (chat(url_part("", uuid="u1")), None, "Cache miss for image at index 0"),
    (chat(url_part(), text(), url_part(None, uuid="u1")), None, "Cache miss for image at index 1"),
    (chat(audio("", uuid="u1")), None, "Cache miss for audio at index 0"),
    (chat(url_part(None, "video_url", uuid=7)), None, "Cache miss for video at index 0"),
]


@pytest.mark.parametrize(("body", "param", "message"), REFUSED, ids=range(len(REFUSED)))
@pytest.mark.parametrize("role", ROLES)
async def test_media_that_are_not_there_are_a_400(
    role: str, body: Json, param: str | None, message: str
) -> None:
    await assert_refused(Simulator(role), body, param, message)


@pytest.mark.parametrize("uuid", ["u1", "", 7, 7.5, {"a": 1}])
async def test_a_uuid_is_the_key_as_a_string(uuid: Any) -> None:
    assert [*await report(Simulator("encode"), url_part(uuid=uuid))] == [str(uuid)]


async def test_without_a_uuid_the_content_makes_a_key_that_no_url_gives() -> None:
    engine = Simulator("encode")
    first, other = list(await report(engine, url_part(), url_part(BLUE)))
    again = next(iter(await report(engine, url_part())))

    assert first == again != other
    assert first != hashlib.sha256(RED.encode()).hexdigest()


async def test_options_of_the_modality_change_the_key_and_nothing_else_does() -> None:
    part = url_part(uuid="u1")
    asked: list[tuple[str, Json]] = [
        ("m", {"media_io_kwargs": {"video": {"fps": 1}}, "mm_processor_kwargs": {}}),
        ("m", {"mm_processor_kwargs": {"max_pixels": 9}}),
        ("m", {"mm_processor_kwargs": {"max_pixels": 8}}),
        ("m", {"media_io_kwargs": {"image": {"max_pixels": 9}}}),
        ("other", {"mm_processor_kwargs": {"max_pixels": 9}}),
    ]
    keys = [
        next(iter(await report(Simulator("encode", model=model), part, model="", **options)))
        for model, options in asked
    ]
    assert keys[0] == "u1"
    assert len(set(keys)) == len(asked)


async def test_a_video_with_sound_is_two_features() -> None:
    part = url_part(CLIP, "video_url", uuid="v")

    entries = await report(Simulator("encode"), part, mm_processor_kwargs=WITH_SOUND)

    assert [entry["modality"] for entry in entries.values()] == ["video", "audio"]
    assert [entry["item_indices"] for entry in entries.values()] == [[0], [1]]
    assert "v" not in entries


@pytest.mark.parametrize("role", ROLES)
async def test_media_seen_under_a_uuid_need_not_be_sent_again(role: str) -> None:
    engine = Simulator(role)
    known = [url_part(None, uuid="u1"), {"type": "image_url", "image_url": None, "uuid": "u1"}]
    known += [url_part(BLUE, uuid="u1")]

    for part in [url_part(uuid="u1"), *known]:
        answer = await ask(engine, chat(part))
        assert answer.status_code == 200
        if role == "encode":
            entry = answer.json()["ec_transfer_params"]["u1"]
            assert entry["metadata"] == {"image_grid_thw": [1, 2, 4]}


async def test_null_embeds_are_served_from_raw_content_seen_before() -> None:
    engine = Simulator("prefill_decode")
    await ask(engine, chat(url_part(uuid="u1")))

    assert "1 image (grid 1x2x4)" in (await ask(engine, chat(reference(None)))).text


async def test_what_was_seen_is_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_REMEMBERED", 1)
    engine = Simulator("encode")
    for uuid in ("u1", "u2"):
        await report(engine, url_part(uuid=uuid))

    assert (await ask(engine, chat(url_part(None, uuid="u1")))).status_code == 400
    assert (await ask(engine, chat(url_part(None, uuid="u2")))).status_code == 200
