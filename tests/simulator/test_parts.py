from __future__ import annotations

import pytest

from epd_proxy.simulator import ROLES, Simulator
from tests.simulator.bodies import (
    CLIP,
    RED,
    TENSOR,
    WITH_SOUND,
    Json,
    ask,
    assert_refused,
    audio,
    b64,
    chat,
    handles,
    reference,
    sample,
    text,
    url_part,
)

REFUSED = [
    (chat({"type": "file"}), "type", "Unsupported chat content part type: 'file'."),
    (chat({"type": "image", "image": RED}), "type", "Unsupported chat content part type"),
    (chat({"type": 7}), "type", "Invalid 'type' field"),
    (chat({"text": "hello"}), "type", "Missing 'type' field"),
    (chat({**text(), "uuid": "u1"}), "type", "Missing 'type' field"),
    (chat({"type": "image_embeds", "uuid": "u1"}), "type", "Missing 'type' field"),
    (
        chat({"type": "video_embeds", "audio_embeds": {}, "uuid": "u1"}),
        "type",
        "Missing 'type' field",
    ),
    (chat({"type": "prompt_embeds", "data": TENSOR}), "prompt_embeds", "You must set"),
]


@pytest.mark.parametrize(("body", "param", "message"), REFUSED, ids=range(len(REFUSED)))
@pytest.mark.parametrize("role", ROLES)
async def test_a_part_that_no_role_accepts_is_a_400(
    role: str, body: Json, param: str | None, message: str
) -> None:
    await assert_refused(Simulator(role), body, param, message)


ACCEPTED = [
    chat("a bare string", text()),
    chat({"type": "text", "text": None}, {"type": "refusal", "refusal": None}),
    chat({"type": "thinking", "thinking": "hm"}, {"type": "tool_reference", "name": "t"}),
    chat(url_part(detail="low")),
    chat({"image_url": "https://a/b.png"}, {"image_url": {"url": RED}}),
    chat({"type": "input_image", "image_url": RED}),
    chat({"type": "image_url", "image_url": RED, "uuid": "u1"}),
    chat({"video_url": CLIP}, {"audio_url": "https://a/b.wav"}),
    chat(audio(b64(b"RIFF....WAVE"))),
    sample("request-image-http-url.json"),
    sample("request-audio-input-audio.json"),
    sample("request-two-images-and-repeat.json"),
]


@pytest.mark.parametrize("body", ACCEPTED, ids=range(len(ACCEPTED)))
@pytest.mark.parametrize("role", ROLES)
async def test_a_part_that_vllm_accepts_is_accepted(role: str, body: Json) -> None:
    answer = await ask(Simulator(role, model="*"), body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("modality", ["image", "audio", "video"])
async def test_an_encoder_refuses_embeds(modality: str) -> None:
    answer = await ask(Simulator("encode"), chat(reference(None, modality=modality)))

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"{modality}_embeds"
    assert answer.json()["error"]["message"].startswith("You must set `--enable-mm-embeds`")


async def test_media_may_stand_in_any_role_but_raw_and_embeds_may_not_meet() -> None:
    body = chat(reference(), text(), ec_transfer_params=handles("u1"))
    body["messages"].insert(0, {"role": "system", "content": [url_part()]})

    answer = await ask(Simulator("prefill_decode"), body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "image_embeds"
    assert "Mixing raw image and embedding inputs is not allowed" in answer.text


async def test_modalities_may_differ_in_form() -> None:
    body = chat(reference(), url_part(CLIP, "video_url"), ec_transfer_params=handles("u1"))
    assert (await ask(Simulator("prefill_decode"), body)).status_code == 200


async def test_a_left_over_image_url_wins_over_embeds() -> None:
    answer = await ask(Simulator("prefill_decode"), chat(reference(image_url={"url": RED})))
    assert "1 image (grid 1x2x4)" in answer.text


async def test_a_sibling_of_a_video_is_its_sound_track() -> None:
    clip = {"video_grid_thw": [2, 4, 4], "second_per_grid_ts": [1.0]}
    part = reference(clip, modality="video", audio_embeds={"audio_feature_lengths": [812]})
    engine = Simulator("prefill_decode")

    silent = await ask(engine, chat(part))
    lost = await ask(engine, chat(part, mm_processor_kwargs=WITH_SOUND))

    assert "Failed to apply prompt replacement for mm_items['audio'][0]" in silent.text
    assert lost.json()["error"]["message"] == "Internal server error"
