from __future__ import annotations

import asyncio
import hashlib
import json
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from epd_proxy import simulator
from epd_proxy.simulator import Failure, Simulator
from tests.simulator_bodies import (
    BLUE,
    CHAT,
    CLIP,
    GRID,
    NUMPY,
    RED,
    SAMPLES,
    TENSOR,
    ask,
    b64,
    chat,
    data_url,
    drive,
    events,
    handles,
    kv_handle,
    reference,
    sample,
    scope,
    text,
    url_part,
)

if TYPE_CHECKING:
    from collections.abc import MutableMapping

Json = dict[str, Any]

CONSUMERS = ("prefill", "prefill_decode")
ONE_TOKEN = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
WITH_SOUND = {"use_audio_in_video": True}
SAMPLE_STREAM = SAMPLES / "decode-stream.sse"


async def stay() -> None:
    await anyio.sleep_forever()


def shape(value: Any) -> Any:
    """The keys of an event and of what stands below, without the values."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    return [shape(each) for each in value] if isinstance(value, list) else None


async def report(engine: Simulator, *parts: Any, **fields: Any) -> Any:
    answer = await ask(engine, chat(*parts, **fields))
    assert answer.status_code == 200, answer.text
    return answer.json()["ec_transfer_params"]


def audio(data: Any, **more: Any) -> Json:
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}, **more}


# What every role refuses


SCHEMA = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff",
    b"\xef\xbb\xbf{}",
    b"[" * 20_000,
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    {},
    {"messages": None},
    {"messages": "hello"},
    {"messages": ["hello"]},
    {"messages": [{"content": "hello"}]},
    {"messages": [{"role": "user", "content": {"type": "text", "text": "hello"}}]},
    chat(7),
    chat({"type": "text", "text": 7}),
    chat(model=7),
    chat(stream="perhaps"),
    chat(stream=True, stream_options=[]),
    chat(max_tokens="many"),
    chat(stop=7),
    chat(cache_salt=7),
    chat(mm_processor_kwargs=[]),
    chat(kv_transfer_params="x"),
    chat(ec_transfer_params=[1]),
    chat({"type": "image_url", "image_url": RED}),
    chat({"type": "image_url", "image_url": 7}),
    chat({"type": "input_image", "image_url": {"url": RED}}),
    chat({"type": "audio_url", "audio_url": "https://a"}),
]


@pytest.mark.parametrize("body", SCHEMA, ids=range(len(SCHEMA)))
@pytest.mark.parametrize("role", simulator.ROLES)
async def test_a_body_that_is_not_a_chat_request_is_a_400(role: str, body: Json | bytes) -> None:
    answer = await ask(Simulator(role), body)

    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "Bad Request"
    assert answer.json()["error"]["code"] == 400
    assert answer.json()["error"]["param"].startswith("body")


@pytest.mark.parametrize("content_type", ["text/plain", "", "application/x-json"])
async def test_another_content_type_is_a_400(content_type: str) -> None:
    answer = await ask(Simulator("decode"), chat(), headers={"content-type": content_type})
    assert answer.status_code == 400


async def test_a_content_type_may_have_parameters_and_capitals() -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert (await ask(Simulator("decode"), chat(), headers=headers)).status_code == 200


REFUSED = [
    (chat(stream_options={}), "stream_options", "Stream options can only"),
    (chat(stream=False, stream_options={"include_usage": True}), "stream_options", "Stream"),
    (chat(max_tokens=0), "max_tokens", "max_tokens must be at least 1, got 0."),
    (chat(max_tokens=5, max_completion_tokens=0), "max_tokens", "got 0."),
    (chat(max_tokens=1, min_tokens=5), None, "min_tokens must be less than or equal to"),
    (chat(max_tokens=9, max_completion_tokens=1, min_tokens=5), None, "max_tokens=1, got 5."),
    (chat(n=0), "n", "n must be between"),
    (chat(n=16385), "n", "n must be between"),
    (chat(n=2, temperature=0), None, "n must be 1 when using greedy sampling, got 2."),
    (chat(cache_salt=""), "cache_salt", ""),
    (chat(cache_salt="s" * 129), "cache_salt", ""),
    (chat(cache_salt="a/b"), "cache_salt", ""),
    (chat(cache_salt="a\0b"), "cache_salt", ""),
    (chat(kv_transfer_params={"a": [{"b": 2**64}]}), "extra_args", "extra_args integers"),
    (chat(ec_transfer_params={"a": -(2**63) - 1}), "extra_args", "extra_args integers"),
    ({"messages": []}, None, "Cannot apply chat template to an empty conversation."),
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
    (chat(url_part("file:///etc/passwd")), None, "Cannot load local files"),
    (chat(url_part("ftp://a/b.png")), None, "The URL must be either"),
    (chat(url_part("b.png")), None, "The URL must be either"),
    (chat(url_part("data:image/png;base64")), None, "Invalid data URL"),
    (chat(url_part("data:image/png;base64,iVBO\nRw0K")), None, "Non-base64 digit found"),
    (chat(url_part("data:image/png;base64,iVBORw0")), None, "Non-base64 digit found"),
    (chat(url_part("data:image/png;base64,é")), None, "Non-base64 digit found"),
    (chat(url_part(data_url(b"a picture"))), None, "Failed to load image"),
    (chat(url_part(data_url(b"\x89PNG\r\n\x1a\n"))), None, "Failed to load image"),
    (chat(url_part("data:video/mp4;base64,", "video_url")), None, "Failed to load video"),
    (chat(audio("not base64!")), None, "Non-base64 digit found"),
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
@pytest.mark.parametrize("role", simulator.ROLES)
async def test_what_no_role_accepts_is_a_400(
    role: str, body: Json, param: str | None, message: str
) -> None:
    answer = await ask(Simulator(role), {**body, "stream": body.get("stream", False)})

    error = answer.json()["error"]
    assert answer.status_code == 400
    assert message in error["message"]
    assert error == {
        "message": error["message"],
        "type": "BadRequestError",
        "param": param,
        "code": 400,
    }


@pytest.mark.parametrize("url", ["data:,x", "data:image/png,x", "data:image/png;BASE64,AA=="])
async def test_a_data_url_without_base64_is_a_501(url: str) -> None:
    answer = await ask(Simulator("encode"), chat(url_part(url)))

    assert answer.status_code == 501
    assert answer.json() == {
        "error": {
            "message": "Only base64 data URLs are supported for now.",
            "type": "NotImplementedError",
            "param": None,
            "code": 501,
        }
    }


async def test_an_unknown_model_is_a_404() -> None:
    answer = await ask(Simulator("decode", model="a"), chat(model="b"))

    assert answer.status_code == 404
    assert answer.json()["error"] == {
        "message": "The model `b` does not exist. Valid aliases: a.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }


@pytest.mark.parametrize(("model", "asked"), [("a", "a"), ("a", ""), ("a", None), ("*", "b")])
async def test_no_model_is_fine_and_a_star_takes_any(model: str, asked: str | None) -> None:
    answer = await ask(Simulator("decode", model=model), chat(model=asked))
    assert answer.json()["model"] == (asked or model)


ACCEPTED = [
    {"messages": [{"role": "user", "content": "hello"}]},
    chat("a bare string", text()),
    chat({"type": "text", "text": None}, {"type": "refusal", "refusal": None}),
    chat({"type": "thinking", "thinking": "hm"}, {"type": "tool_reference", "name": "t"}),
    chat(stream_options=None, max_completion_tokens=None, n=None, min_tokens=None),
    chat(max_tokens=5, max_completion_tokens=50, min_tokens=40),
    chat(cache_salt="s" * 128, unknown_field=[1]),
    chat(kv_transfer_params={}, ec_transfer_params=None),
    chat(kv_transfer_params={"a": 2**64 - 1, "b": -(2**63), "c": 1.5}),
    chat(url_part(detail="low")),
    chat({"image_url": "https://a/b.png"}, {"image_url": {"url": RED}}),
    chat({"type": "input_image", "image_url": RED}),
    chat({"type": "image_url", "image_url": RED, "uuid": "u1"}),
    chat(url_part("DATA:image/png;charset=utf-8;base64," + RED.partition(",")[2])),
    chat(url_part(data_url(b"\xff\xd8\xff a JPEG", "image/jpeg"))),
    chat(url_part(data_url(b"GIF89a", "image/gif"))),
    chat(url_part(data_url(b"RIFF1234WEBP", "image/webp"))),
    chat(url_part(CLIP, "video_url"), url_part("https://a/b.wav", "audio_url")),
    chat({"video_url": CLIP}, {"audio_url": "https://a/b.wav"}),
    chat(audio(b64(b"RIFF....WAVE"))),
    sample("request-tool-turn-content-null.json"),
    sample("request-image-http-url.json"),
    sample("request-audio-input-audio.json"),
    sample("request-two-images-and-repeat.json"),
    sample("request-stream-with-usage.json"),
]


@pytest.mark.parametrize("body", ACCEPTED, ids=range(len(ACCEPTED)))
@pytest.mark.parametrize("role", simulator.ROLES)
async def test_what_vllm_accepts_is_accepted(role: str, body: Json) -> None:
    answer = await ask(Simulator(role, model="*"), body)
    assert answer.status_code == 200, answer.text


# Embeds


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


@pytest.mark.parametrize("modality", ["image", "audio", "video"])
async def test_an_encoder_refuses_embeds(modality: str) -> None:
    answer = await ask(Simulator("encode"), chat(reference(None, modality=modality)))

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"{modality}_embeds"
    assert answer.json()["error"]["message"].startswith("You must set `--enable-mm-embeds`")


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


# Keys and reports


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


async def test_no_media_is_a_null_report() -> None:
    assert await report(Simulator("encode"), text()) is None


async def test_a_streaming_encoder_reports_nothing() -> None:
    answer = await ask(Simulator("encode"), chat(url_part(), stream=True))

    assert "ec_transfer_params" not in answer.text
    assert events(answer.content)[-2]["choices"][0]["finish_reason"] == "stop"
    assert events(answer.content)[-1] == "[DONE]"


@pytest.mark.parametrize("role", simulator.ROLES)
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
    monkeypatch.setattr(simulator, "_REMEMBERED", 1)
    engine = Simulator("encode")
    for uuid in ("u1", "u2"):
        await report(engine, url_part(uuid=uuid))

    assert (await ask(engine, chat(url_part(None, uuid="u1")))).status_code == 400
    assert (await ask(engine, chat(url_part(None, uuid="u2")))).status_code == 200


# Consumers of embeddings


@pytest.mark.parametrize("options", [{}, {"mm_processor_kwargs": WITH_SOUND}])
@pytest.mark.parametrize("role", CONSUMERS)
async def test_the_keys_of_an_encoder_are_those_of_its_consumer(role: str, options: Json) -> None:
    raw = [url_part(uuid="i"), audio(b64(b"a"), uuid="a"), url_part(CLIP, "video_url", uuid="v")]
    entries = await report(Simulator("encode"), *raw, **options)
    found = [entry["metadata"] for entry in entries.values()]
    references = [
        reference(found[0], "i"),
        reference(found[1], "a", "audio"),
        reference(found[2], "v", "video", **({"audio_embeds": found[3]} if options else {})),
    ]

    body = chat(*references, text(), ec_transfer_params=entries, **options)

    assert (await ask(Simulator(role), body)).status_code == 200
    lost = entries.popitem()
    assert (await ask(Simulator(role), body)).status_code == 500, lost


LOST: list[tuple[str, Json]] = [
    ("no handles", chat(reference())),
    ("handle of another item", chat(reference(), ec_transfer_params=handles("u2"))),
    ("handle that is none", chat(reference(), ec_transfer_params={"u1": ["peer_host"]})),
    ("handle without a host", chat(reference(), ec_transfer_params={"u1": {"peer_port": 1}})),
    ("another size", chat(reference(), ec_transfer_params=handles("u1", tokens=5))),
    (
        "flat grid",
        chat(reference({"image_grid_thw": [4, 4]}), ec_transfer_params=handles("u1")),
    ),
    (
        "float grid",
        chat(reference({"image_grid_thw": [1.0, 4.0, 4.0]}), ec_transfer_params=handles("u1")),
    ),
    (
        "negative grid",
        chat(reference({"image_grid_thw": [1, -4, -4]}), ec_transfer_params=handles("u1")),
    ),
]


@pytest.mark.parametrize("body", [body for _, body in LOST], ids=[name for name, _ in LOST])
@pytest.mark.parametrize("role", CONSUMERS)
async def test_a_lost_embedding_is_a_500(role: str, body: Json) -> None:
    whole = await ask(Simulator(role), body)
    stream = await ask(Simulator(role), {**body, "stream": True})

    role_chunk, error, done = events(stream.content)
    assert whole.status_code == 500
    assert whole.content == Failure(500).body
    assert stream.status_code == 200
    assert role_chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert error == json.loads(Failure(500).body)
    assert done == "[DONE]"


EMBEDDED = {**GRID, "image_embeds": TENSOR}
ODD_HANDLE = {"u1": {"peer_host": "h"}}
TENSOR_GRID = {"image_grid_thw": TENSOR}


@pytest.mark.parametrize(
    "body",
    [
        chat(reference(), ec_transfer_params=handles("u1")),
        chat(reference(), ec_transfer_params=ODD_HANDLE),
        chat(reference(TENSOR_GRID), ec_transfer_params=handles("u1", tokens=99)),
        chat(reference(EMBEDDED)),
        chat(reference(TENSOR)),
        chat(url_part()),
        chat(
            reference({"audio_num_tokens": [25]}, modality="audio"),
            ec_transfer_params=handles("u1", tokens=25),
        ),
    ],
)
@pytest.mark.parametrize("role", CONSUMERS)
async def test_an_embedding_that_can_be_had_is_not_lost(role: str, body: Json) -> None:
    assert (await ask(Simulator(role), body)).status_code == 200


async def test_a_reference_without_uuid_has_a_key_of_its_own() -> None:
    body = chat(reference(uuid=None), ec_transfer_params=handles("None", ""))
    assert (await ask(Simulator("prefill_decode"), body)).status_code == 500


async def test_the_bodies_of_the_samples_are_served() -> None:
    encode, decode = Simulator("encode", model="*"), Simulator("prefill_decode", model="*")
    for name in ("image-data-url", "two-images-and-repeat"):
        answer = await ask(encode, sample(f"encode-body-{name}.expected.json"))
        assert answer.status_code == 200

    answer = await ask(decode, sample("decode-body-image-data-url.expected.json"))

    assert "1 image (grid 1x4x4)" in answer.text


# Prefill and decode


async def test_prefill_answers_a_handle_that_decode_can_use_once() -> None:
    prefill, decode = Simulator("prefill"), Simulator("decode")
    body = chat(reference(), text(), ec_transfer_params=handles("u1"), **ONE_TOKEN)
    handle = (await ask(prefill, body, headers={"x-request-id": "r9-p"})).json()[
        "kv_transfer_params"
    ]

    first = await ask(decode, chat(reference(), text(), kv_transfer_params=handle))
    second = await ask(decode, chat(reference(), text(), kv_transfer_params=handle))

    assert (first.status_code, second.status_code) == (200, 500)
    wanted = sample("prefill-answer.json")["kv_transfer_params"]
    assert handle.keys() | {"x_future_key"} == wanted.keys()
    assert handle["remote_request_id"][:-8] == "chatcmpl-r9-p-"
    assert handle["remote_host"] == "127.0.0.1"


async def test_blocks_of_prefill_are_fresh() -> None:
    engine = Simulator("prefill")
    answers = [(await ask(engine, chat(**ONE_TOKEN))).json() for _ in range(2)]
    blocks = [answer["kv_transfer_params"]["remote_block_ids"][0] for answer in answers]
    assert blocks[0]
    assert set(blocks[0]).isdisjoint(blocks[1])


@pytest.mark.parametrize(
    ("role", "fields"),
    [
        ("prefill", {"max_tokens": 1}),
        ("prefill", {**ONE_TOKEN, "max_tokens": 100}),
        ("prefill", {**ONE_TOKEN, "max_tokens": 1, "stop": "I"}),
        ("prefill_decode", ONE_TOKEN),
        ("decode", ONE_TOKEN),
    ],
)
async def test_only_a_prefill_that_ended_by_length_answers_a_handle(
    role: str, fields: Json
) -> None:
    answer = (await ask(Simulator(role), chat(**fields))).json()
    assert answer["kv_transfer_params"] is None


SHORT = [
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
]


@pytest.mark.parametrize("missing", SHORT)
async def test_decode_cannot_use_half_a_handle(missing: str) -> None:
    body = chat(kv_transfer_params={**kv_handle(), missing: None})
    assert (await ask(Simulator("decode"), body)).status_code == 500


@pytest.mark.parametrize("fields", [{}, {"ec_transfer_params": handles("u1")}])
async def test_decode_cannot_serve_references_without_a_handle(fields: Json) -> None:
    assert (await ask(Simulator("decode"), chat(reference(), **fields))).status_code == 500


async def test_decode_may_prefill_text_and_raw_media_itself() -> None:
    assert (await ask(Simulator("decode"), chat(url_part(), text()))).status_code == 200


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"failing": True}])
async def test_a_decode_that_refuses_has_spent_the_handle(fields: Json) -> None:
    engine = Simulator("decode")
    if "failing" in fields:
        engine.failures.append(Failure(503))

    refused = await ask(engine, chat(kv_transfer_params=kv_handle(), **fields))
    again = await ask(engine, chat(kv_transfer_params=kv_handle()))

    assert refused.status_code in (400, 503)
    assert again.status_code == 500


async def test_a_lost_handle_is_an_error_event_in_a_stream() -> None:
    engine = Simulator("decode")
    answer = await ask(engine, chat(reference(), stream=True, n=2))

    assert [chunk["choices"][0]["index"] for chunk in events(answer.content)[:2]] == [0, 1]
    assert events(answer.content)[2]["error"]["code"] == 500


# Answers


async def test_an_answer_has_every_field_of_the_sample() -> None:
    engine = Simulator("prefill_decode", name="a", chunks=5)
    answer = await ask(engine, chat(), headers={"x-request-id": "r1"})
    expected = sample("decode-answer.json")

    body = answer.json()
    choice, message = body["choices"][0], body["choices"][0]["message"]
    assert body.keys() == expected.keys()
    assert body["usage"].keys() == expected["usage"].keys()
    assert choice.keys() == expected["choices"][0].keys()
    assert message.keys() == expected["choices"][0]["message"].keys()
    assert {key for key in message if message[key] is None} == message.keys() - {"role", "content"}
    assert body["id"] == "chatcmpl-r1"
    assert body["system_fingerprint"] == "epd-simulator-a"
    assert body["usage"]["completion_tokens"] == 5
    assert "🟥".encode() in answer.content


async def test_an_answer_says_what_was_understood() -> None:
    answer = await ask(
        Simulator("prefill_decode"),
        chat(url_part(), url_part(BLUE), text("and"), text("Which? " + "x" * 300)),
    )
    content = answer.json()["choices"][0]["message"]["content"]
    assert "given 2 images (grid 1x2x4, grid 1x6x2) and the words: Which? xxx" in content
    assert "x" * 193 + "." in content


async def test_the_words_are_the_users_last() -> None:
    body = chat("first", "second", {"type": "text", "text": ""})
    body["messages"].append({"role": "assistant", "content": "third"})
    answer = await ask(Simulator("prefill_decode"), body)
    assert "given no media and the words: second." in answer.text


async def test_the_id_is_the_header_else_the_body_else_new() -> None:
    engine = Simulator("decode")
    header = await ask(engine, chat(request_id="b"), headers={"x-request-id": "h"})
    body = await ask(engine, chat(request_id="b"))
    new = [(await ask(engine, chat())).json()["id"] for _ in range(2)]

    assert (header.json()["id"], body.json()["id"]) == ("chatcmpl-h", "chatcmpl-b")
    assert new[0] != new[1]


@pytest.mark.parametrize(
    ("fields", "finish_reason", "tokens"),
    [
        ({}, "stop", 8),
        ({"max_tokens": 3}, "length", 3),
        ({"max_tokens": 99, "max_completion_tokens": 2}, "length", 2),
        ({"max_tokens": 8}, "length", 8),
        ({"max_tokens": 9}, "stop", 8),
    ],
)
async def test_the_token_limit_counts_chunks(fields: Json, finish_reason: str, tokens: int) -> None:
    answer = (await ask(Simulator("decode"), chat(**fields))).json()
    assert answer["choices"][0]["finish_reason"] == finish_reason
    assert answer["usage"]["completion_tokens"] == tokens


@pytest.mark.parametrize(
    ("stop", "content", "stop_reason"),
    [
        ("was", "I ", "was"),
        (["words", "given", 7], "I was ", "given"),
        ("I", "", "I"),
    ],
)
async def test_a_stop_word_ends_the_text(stop: Any, content: str, stop_reason: str) -> None:
    answer = (await ask(Simulator("decode"), chat(stop=stop))).json()
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == content
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop_reason)


async def test_a_short_text_is_repeated_for_many_chunks() -> None:
    answer = (await ask(Simulator("decode", chunks=500), chat())).json()
    assert answer["usage"]["completion_tokens"] == 500


async def test_every_choice_is_answered() -> None:
    whole = await ask(Simulator("decode"), chat(n=2))
    stream = await ask(Simulator("decode"), chat(n=2, stream=True))

    assert [choice["index"] for choice in whole.json()["choices"]] == [0, 1]
    ends = [chunk for chunk in events(stream.content)[:-1] if chunk["choices"][0]["finish_reason"]]
    assert [chunk["choices"][0]["index"] for chunk in ends] == [0, 1]
    assert ["system_fingerprint" in chunk for chunk in ends] == [False, True]


async def test_a_stream_looks_like_the_sample() -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = await ask(Simulator("decode", chunks=6), chat(**options))
    wanted = events(SAMPLE_STREAM.read_bytes())

    shapes = [shape(chunk) for chunk in events(answer.content)]
    assert shapes == [shape(chunk) for chunk in wanted]
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"


async def test_a_stream_says_what_the_whole_answer_says() -> None:
    engine = Simulator("decode")
    whole = (await ask(engine, chat())).json()["choices"][0]["message"]["content"]
    stream = await ask(engine, chat(stream=True))

    chunks = events(stream.content)[:-1]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == whole
    assert chunks[-1]["system_fingerprint"] == "epd-simulator-"
    assert whole.encode()[-12:] in stream.content


async def test_every_event_is_a_message_of_its_own() -> None:
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await drive(Simulator("decode", chunks=3), chat(stream=True), send, stay)

    start, *bodies, last = sent
    assert start["status"] == 200
    assert len(bodies) == 6
    assert all(message["body"].count(b"\n\n") == 1 for message in bodies)
    assert (last["body"], last["more_body"]) == (b"", False)


async def test_the_head_of_a_stream_comes_before_its_latency() -> None:
    engine = Simulator("decode", latency=3600)
    heads: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()

    with anyio.move_on_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(drive, engine, chat(stream=True), heads.put, stay)
            head = await heads.get()
            group.cancel_scope.cancel()

    assert head["type"] == "http.response.start"
    assert heads.empty()
    assert engine.active == 0


# Serving


@pytest.mark.parametrize("stream", [True, False])
async def test_a_caller_who_leaves_ends_the_request(stream: bool) -> None:
    engine = Simulator("decode", latency=3600)
    running: list[int] = []

    async def leave() -> None:
        await anyio.wait_all_tasks_blocked()
        running.append(engine.active)

    async def send(message: MutableMapping[str, Any]) -> None:
        assert message["type"] == "http.response.start"

    with anyio.fail_after(5):
        await drive(engine, chat(stream=stream), send, leave)

    assert running == [1]
    assert len(engine.received) == 1
    assert engine.active == 0
    assert repr(engine) == "<Simulator decode '' [0 active]>"


async def test_a_caller_who_leaves_while_sending_was_never_there() -> None:
    engine = Simulator("decode")

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        raise AssertionError(message)

    await engine(scope(), receive, send)

    assert not engine.received


async def test_messages_after_the_body_do_not_end_a_request() -> None:
    messages = [{"type": "http.request"}, {"type": "http.disconnect"}]
    left = simulator._caller_left

    async def receive() -> MutableMapping[str, Any]:
        return messages.pop(0)

    await left(receive)

    assert not messages


async def test_a_send_that_fails_is_told_to_the_host() -> None:
    engine = Simulator("decode")

    async def send(message: MutableMapping[str, Any]) -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        await drive(engine, chat(), send, stay)
    assert engine.active == 0


async def test_requests_are_kept_as_they_arrived() -> None:
    engine = Simulator("decode")
    for index in range(70):
        await ask(engine, b'{ "n":%d}' % index, headers={"X-Request-Id": str(index)})

    assert len(engine.received) == 64
    assert engine.received[-1].body == b'{ "n":69}'
    assert (b"x-request-id", b"69") in engine.received[-1].headers


async def test_scripted_failures_are_answered_first_and_once() -> None:
    engine = Simulator("decode")
    html = Failure(502, b"<h1>Bad Gateway</h1>", "text/html", [("retry-after", "1")])
    engine.failures += [html, Failure(500)]

    answers = [await ask(engine, body) for body in (b"no JSON", chat(), chat())]

    assert [answer.status_code for answer in answers] == [502, 500, 200]
    assert answers[0].text == "<h1>Bad Gateway</h1>"
    assert answers[0].headers["content-type"] == "text/html"
    assert answers[0].headers["retry-after"] == "1"
    assert answers[1].json()["error"]["type"] == "InternalServerError"


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        ("GET", "/health", 200, b""),
        ("GET", "/version", 200, b'{"version":"0.33.0"}'),
        ("POST", "/health", 405, b'{"detail":"Method Not Allowed"}'),
        ("GET", CHAT, 405, b'{"detail":"Method Not Allowed"}'),
        ("GET", "/v1/nothing", 404, b'{"detail":"Not Found"}'),
    ],
)
async def test_other_paths(method: str, path: str, status: int, body: bytes) -> None:
    answer = await ask(Simulator("encode"), b"", path, method)
    assert (answer.status_code, answer.content) == (status, body)


async def test_the_model_is_listed() -> None:
    answer = await ask(Simulator("decode", model="m"), b"", "/v1/models", "GET")
    assert [model["id"] for model in answer.json()["data"]] == ["m"]


async def test_a_mounted_engine_finds_its_paths() -> None:
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("there is no body to wait for")

    mounted = scope(method="GET", path="/e1/health", root_path="/e1")
    await Simulator("encode")(mounted, receive, send)

    assert sent[0]["status"] == 200


async def test_lifespan_is_answered_and_websockets_are_closed() -> None:
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent: list[str] = []

    async def receive() -> MutableMapping[str, Any]:
        return messages.pop(0)

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message["type"])

    await Simulator("encode")({"type": "lifespan"}, receive, send)
    await Simulator("encode")({"type": "websocket"}, receive, send)

    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete", "websocket.close"]


@pytest.mark.parametrize(("role", "chunks"), [("router", 8), ("decode", 0)])
def test_an_engine_that_makes_no_sense_is_not_built(role: str, chunks: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        Simulator(role, chunks=chunks)


def test_the_simulator_stands_on_its_own() -> None:
    source = (SAMPLE_STREAM.parents[2] / "epd_proxy" / "simulator.py").read_text()
    assert "epd_proxy" not in source
    assert "from ." not in source
