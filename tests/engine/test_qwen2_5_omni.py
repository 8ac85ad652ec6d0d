"""
A model that sees and hears.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.checks import (
    check,
    check_accepted,
    check_decode,
    check_media_itself,
    check_prefill,
    check_same_positions,
    content_keys,
    identifiers,
)
from tests.engine.fleets import WISHES, Fleet, chat
from tests.engine.media import audio_url, film, frames, image, input_audio, text

MODEL = "qwen2_5_omni"

PROMPTS: dict[str, list[dict[str, Any]]] = {
    "text": [text()],
    "a sound": [input_audio(16000), text()],
    "two sounds": [audio_url(24000), text("then"), input_audio(40000), text()],
    "a video of pictures": [frames(56, 84, 4), text()],
    "a video file": [film(84, 56, 2), text()],
    "a picture and a sound": [image(112, 84), text("and"), input_audio(16000), text()],
    "a sound and a picture": [audio_url(16000), image(84, 112), text()],
    "everything": [
        image(112, 84),
        audio_url(16000),
        text("and"),
        frames(56, 56, 6),
        input_audio(24000),
        image(56, 56),
        text(),
    ],
}

METADATA: dict[str, dict[str, Any]] = {
    "image": {"image_grid_thw": [1, 6, 8]},
    "audio": {"audio_feature_lengths": [100]},
    "video": {"video_grid_thw": [2, 6, 4], "second_per_grid_ts": [2.0]},
}

WITH_SOUND = {"use_audio_in_video": True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_every_stage_understands_what_is_seen_and_heard(
    fleet: Fleet, prompt: str, stream: bool
) -> None:
    body = chat(*PROMPTS[prompt], stream=stream, max_tokens=9)
    seen, control = fleet.ask(body), fleet.ask_directly(body)
    check(seen, control, body)
    check_same_positions(seen, control)


def test_decode_alone_hears_the_callers_wishes(fleet: Fleet) -> None:
    body = chat(*PROMPTS["everything"], **WISHES)
    seen, control = fleet.ask(body), fleet.ask_directly(body)
    check(seen, control, body)
    check_same_positions(seen, control)


SOUNDING: dict[str, list[dict[str, Any]]] = {
    "alone": [film(56, 84, 3), text()],
    "with a name": [{**film(56, 84, 2), "uuid": "clips/one two"}, text()],
    "beside a picture": [image(112, 84), film(56, 84, 3), text()],
    "two": [film(56, 84, 3), text("and"), film(84, 56, 2), text()],
    "none at all": [image(112, 84), input_audio(16000), text()],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", SOUNDING)
def test_a_video_and_its_sound_are_two_references(fleet: Fleet, prompt: str, stream: bool) -> None:
    body = chat(*SOUNDING[prompt], stream=stream, mm_processor_kwargs=WITH_SOUND)
    seen, control = fleet.ask(body), fleet.ask_directly(body)
    check(seen, control, body)
    check_same_positions(seen, control)


@pytest.mark.parametrize("prompt", SOUNDING)
def test_both_may_be_described_by_tensors(fleet: Fleet, prompt: str) -> None:
    body = chat(*SOUNDING[prompt], mm_processor_kwargs=WITH_SOUND, stream=True)
    with fleet.behind("--metadata-format", "tensor") as other:
        seen, control = other.ask(body), other.ask_directly(body)
    check(seen, control, body)
    check_same_positions(seen, control)


@pytest.mark.parametrize("prompt", ["before", "after"])
def test_vllm_takes_no_sound_beside_a_video_with_its_sound(fleet: Fleet, prompt: str) -> None:
    """Encoders see them one by one and agree; who sees them together refuses."""
    parts = [input_audio(16000), film(56, 84, 3)]
    body = chat(*parts[:: 1 if prompt == "before" else -1], mm_processor_kwargs=WITH_SOUND)
    seen = fleet.ask(body, **({"decode": 0} if fleet.has_prefill else {}))
    control = fleet.ask_directly(body)
    assert seen.answer.status_code == seen.consumer["status"] == control["status"] == 400
    assert seen.answer.json()["error"] == seen.consumer["error"] == control["error"]
    assert "requires equal number of audio and video items" in control["error"]["message"]


def test_two_videos_with_one_sound_track_have_a_sound_each(fleet: Fleet) -> None:
    """
    Where names come from content, vLLM finds the sound in its cache, the video not, and takes it
    for a video without sound. The proxy gives both the name of the video.
    """
    side, pitch = (112, 3) if fleet.has_prefill else (140, 4)
    for video in (film(side, 56, 2, pitch), film(56, side, 2, pitch)):
        body = chat(video, text(), mm_processor_kwargs=WITH_SOUND)
        seen, control = fleet.ask(body), fleet.ask_directly(body)
        check_accepted(seen, seen.decoder)
        assert len(seen.report) == 2
    assert control["status"] == 400
    assert "Video doesn't have audio track" in control["error"]["message"]


def test_everything_may_be_described_by_tensors(fleet: Fleet) -> None:
    body = chat(*PROMPTS["everything"])
    with fleet.behind("--metadata-format", "tensor") as other:
        seen, control = other.ask(body), other.ask_directly(body)
    check(seen, control, body)
    check_same_positions(seen, control)


@pytest.mark.parametrize("prompt", ["everything", "a video file"])
def test_media_may_stay_as_the_caller_sent_it(fleet: Fleet, prompt: str) -> None:
    body = chat(*PROMPTS[prompt])
    with fleet.behind("--no-rewrite") as other:
        seen, control = other.ask(body), other.ask_directly(body)
    check_accepted(seen, control)
    check_prefill(seen, control)
    check_decode(seen, control)
    for verdict in (*seen.prefill, *seen.decode):
        assert set(identifiers(verdict)) == seen.report.keys()
        check_media_itself(verdict, control)


def test_a_video_without_a_track_is_refused_when_its_sound_is_wanted(fleet: Fleet) -> None:
    body = chat(frames(56, 84, 4), text(), stream=True, mm_processor_kwargs=WITH_SOUND)
    seen = fleet.ask(body, prefill=0, decode=0)
    control = fleet.ask_directly(body)
    (encoder,) = seen.encode
    assert seen.answer.status_code == encoder["status"] == control["status"]
    assert seen.answer.json()["error"] == encoder["error"] == control["error"]


UNKNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "the sound": ("audio", chat(image(112, 84), input_audio(16000), text())),
    "the picture": ("image", chat(image(112, 84), audio_url(16000), frames(56, 84, 4))),
    "the video": (
        "video",
        chat(image(112, 84), film(56, 84, 2), text(), mm_processor_kwargs=WITH_SOUND),
    ),
}


@pytest.mark.parametrize("unknown", UNKNOWN)
async def test_beside_sound_all_stays_raw_when_one_cannot_be_replaced(
    fleet: Fleet, unknown: str
) -> None:
    modality, body = UNKNOWN[unknown]

    def entry_of(part: dict[str, Any]) -> dict[str, Any]:
        own = "audio" if "audio" in part["type"] else part["type"].removesuffix("_url")
        return {"modality": own, "metadata": {} if own == modality else METADATA[own]}

    seen = await fleet.ask_with_encoder(entry_of, body)
    control = fleet.ask_directly(body)
    check_accepted(seen, control)
    for verdict in (*seen.prefill, *seen.decode):
        check_media_itself(verdict, control)
        uuids = [uuid for each in verdict["parsed"] for uuid in each["uuids"]]
        assert {*uuids} == {*content_keys(body)}
