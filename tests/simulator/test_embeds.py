from __future__ import annotations

from typing import Any

import pytest

from epd_proxy.simulator import Simulator
from tests.simulator.bodies import GRID, NUMPY, TENSOR, ask, b64, chat, handles, reference

EMBEDS = [
    ({"image_grid_thw": [[1, 4, 4]]}, 400, "must be a finite numeric array"),
    ({"image_grid_thw": [1, 4, True]}, 400, "must be a finite numeric array"),
    ({"image_grid_thw": [1, 4, float("nan")]}, 400, "must be a finite numeric array"),
    ({"image_grid_thw": [1, 4, "4"]}, 400, "must be a finite numeric array"),
    ({"image_grid_thw": [1, 4, 2**64]}, 400, "Invalid metadata array: image_grid_thw"),
    ({"image_grid_thw": []}, 500, "Expected there to be 1 prompt placeholders"),
    ({"image_grid_thw": 4}, 500, "'int' object has no attribute 'ndim'"),
    ({"image_grid_thw": None}, 500, "'NoneType' object has no attribute 'ndim'"),
    ({**GRID, "foo": [1]}, 400, "JSON arrays are only supported for metadata: foo"),
    ({"video_grid_thw": [1, 4, 4]}, 400, "only supported for metadata: video_grid_thw"),
    ({}, 400, "The data should contain the fields"),
    ({"image_grid_thw": "not base64!"}, 400, "Non-base64 digit found"),
    ({"image_grid_thw": b64(b"junk")}, 500, "unpack requires a buffer"),
    ("", 500, "unpack requires a buffer"),
    (None, 400, "Cache miss for image at index 0"),
    (7, 400, "Cache miss for image at index 0"),
    ([1, 4, 4], 400, "Cache miss for image at index 0"),
]


@pytest.mark.parametrize(("payload", "status", "message"), EMBEDS, ids=range(len(EMBEDS)))
@pytest.mark.parametrize("role", ["prefill", "decode", "prefill_decode"])
async def test_embeds_are_checked_as_by_vllm(
    role: str, payload: Any, status: int, message: str
) -> None:
    answer = await ask(Simulator(role), chat(reference(payload)))

    assert answer.status_code == answer.json()["error"]["code"] == status
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("count", [[0], [25.0], [25, 25], []])
async def test_an_audio_count_is_one_positive_integer(count: list[Any]) -> None:
    part = reference({"audio_num_tokens": count}, modality="audio")
    answer = await ask(Simulator("prefill_decode"), chat(part))
    assert answer.status_code == 400
    assert "one positive integer per audio" in answer.text


@pytest.mark.parametrize(
    ("payloads", "status"),
    [
        ([GRID, {**GRID, "more": TENSOR}], 400),
        ([GRID, None], 500),
        ([None, GRID], 501),
        ([GRID, TENSOR], 501),
        ([GRID, GRID], 200),
        ([TENSOR, TENSOR], 200),
    ],
)
async def test_embeds_of_one_modality_must_look_alike(payloads: list[Any], status: int) -> None:
    parts = [reference(payload, f"u{index}") for index, payload in enumerate(payloads)]
    body = chat(*parts, ec_transfer_params=handles("u0", "u1"))
    assert (await ask(Simulator("prefill_decode"), body)).status_code == status


async def test_audio_tensors_may_not_be_numpy_files() -> None:
    engine = Simulator("prefill_decode")
    pictures = reference({"image_grid_thw": NUMPY})
    sounds = reference({"audio_num_tokens": NUMPY}, modality="audio")

    picture = await ask(engine, chat(pictures, ec_transfer_params=handles("u1")))
    sound = await ask(engine, chat(sounds, ec_transfer_params=handles("u1")))

    assert "1 image (tensor)" in picture.text
    assert sound.status_code == 500
