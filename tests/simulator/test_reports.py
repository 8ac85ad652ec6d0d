from __future__ import annotations

from epd_proxy.simulator import Simulator
from tests.simulator.bodies import (
    BLUE,
    CLIP,
    ask,
    audio,
    b64,
    chat,
    events,
    report,
    sample,
    text,
    url_part,
)


async def test_a_report_has_every_field_of_the_sample() -> None:
    answer = (await ask(Simulator("encode"), chat(url_part(uuid="u1")))).json()
    expected = sample("report-nested-metadata-nixl.json")

    (entry,) = answer["ec_transfer_params"].values()
    (wanted,) = expected["ec_transfer_params"].values()
    assert answer.keys() == expected.keys()
    assert answer["choices"] == expected["choices"]
    assert answer["usage"].keys() == expected["usage"].keys()
    assert answer["usage"]["completion_tokens"] == 0
    assert entry.keys() == wanted.keys()


async def test_repeats_share_an_entry_and_every_position_is_listed() -> None:
    red, blue = url_part(uuid="red"), url_part(BLUE, uuid="blue")

    entries = await report(Simulator("encode"), red, text("and"), blue, red)

    assert [entries[key]["item_indices"] for key in ("red", "blue")] == [[0, 2], [1]]
    assert entries["red"]["metadata"] == {"image_grid_thw": [1, 2, 4]}
    assert entries["blue"]["metadata"] == {"image_grid_thw": [1, 6, 2]}
    assert entries["red"]["shape"] == [2, 2048]
    assert entries["red"]["size_bytes"] == 8192


async def test_a_report_names_modality_and_metadata() -> None:
    sound = audio(b64(b"RIFF....WAVE"), uuid="a")

    entries = await report(
        Simulator("encode"),
        url_part(CLIP, "video_url", uuid="v"),
        sound,
        url_part("https://a/b.png", uuid="i"),
    )

    assert {key: entry["modality"] for key, entry in entries.items()} == {
        "v": "video",
        "a": "audio",
        "i": "image",
    }
    assert entries["v"]["metadata"].keys() == {"video_grid_thw", "second_per_grid_ts"}
    assert entries["v"]["metadata"]["second_per_grid_ts"] == [1.0]
    assert entries["a"]["metadata"].keys() == {"audio_num_tokens"}
    assert entries["i"]["metadata"].keys() == {"image_grid_thw"}


async def test_no_media_is_a_null_report() -> None:
    assert await report(Simulator("encode"), text()) is None


async def test_a_streaming_encoder_reports_nothing() -> None:
    answer = await ask(Simulator("encode"), chat(url_part(), stream=True))

    assert "ec_transfer_params" not in answer.text
    assert events(answer.content)[-2]["choices"][0]["finish_reason"] == "stop"
    assert events(answer.content)[-1] == "[DONE]"
