"""
The wire samples, each sent through a whole proxy: what did every engine receive?

``tests/samples`` holds callers' requests, engines' answers, and the right bodies for the engines.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from tests.backends import Backends, Engine, json_sample, sample, streamed
from tests.driver import Reply, chat

DATA_URL = "request-image-data-url"
HTTP_URL = "request-image-http-url"
THREE = "request-two-images-and-repeat"
AUDIO = "request-audio-input-audio"
VIDEO = "request-video-with-audio-track"
STREAM = "request-stream-with-usage"
TOOL_TURN = "request-tool-turn-content-null"

RED = "e2a81c7fa3e36bc803930a141f13f7f0962ed42d5389fa0faf7fb0dd95a068a2"
BLUE = "66d88b737724110bd4830214b3ce83091c74fee143bb7ed9934d9a70a9b609bc"
CAT = "001b8776e568de93ae739d3152e69999b0003867157c1a01980794eb43625b90"
STREET = "a2f5b3b98d782af114dbc94109694ac07937aa16f5d79114ae525b5262440149"
WAV = "58f174aa93e974f3f19bd0bb71a3d1c632be270b4b7cbf63e3dbb8abdfc62b95"


def answer(name: str) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return httpx.Response(200, content=sample(f"{name}.json"), headers=headers)


def fleet(report: str | None = None, *, prefill: int = 0) -> Backends:
    backends = Backends(prefill=prefill)
    if report:
        backends.encode[0].answers(answer(report))
    return backends


async def send(backends: Backends, request: str) -> Reply:
    reply = await chat(backends.proxy(), sample(f"{request}.json"))
    assert reply.status == 200
    return reply


def expected(name: str) -> Any:
    return json_sample(f"{name}.expected.json")


def content_of(body: Any) -> Any:
    """The parts of the message that holds the media: in the samples always the last one."""
    return body["messages"][-1]["content"]


def reported(name: str) -> Any:
    return json_sample(f"{name}.json")["ec_transfer_params"]


def slice_of(text: bytes, field: str) -> bytes:
    return bytes(msgspec.json.decode(text, type=dict[str, msgspec.Raw])[field])


@pytest.mark.parametrize(
    ("request_name", "report", "encode_body", "decode_body"),
    [
        (
            DATA_URL,
            "report-nested-metadata-nixl",
            "encode-body-image-data-url",
            "decode-body-image-data-url",
        ),
        (
            THREE,
            "report-hash-differs-from-uuid",
            "encode-body-two-images-and-repeat",
            "decode-body-two-images-and-repeat",
        ),
        (VIDEO, "report-video-two-features", None, "decode-body-video-with-audio-track"),
        (AUDIO, "report-audio-num-tokens", None, "decode-body-audio"),
        (HTTP_URL, "report-empty-metadata", None, "decode-body-empty-metadata"),
    ],
)
async def test_encode_and_decode_receive_the_expected_bodies(
    request_name: str, report: str, encode_body: str | None, decode_body: str
) -> None:
    backends = fleet(report)

    await send(backends, request_name)

    (encoded,) = backends.encode[0].bodies
    assert encode_body is None or encoded == expected(encode_body)
    assert backends.decode[0].bodies == [expected(decode_body)]


async def test_prefill_and_decode_receive_the_expected_bodies() -> None:
    backends = fleet("report-flat-metadata", prefill=1)
    backends.prefill[0].answers(answer("prefill-answer"))

    await send(backends, STREAM)

    assert backends.prefill[0].bodies == [expected("prefill-body-epd")]
    assert backends.decode[0].bodies == [expected("decode-body-epd")]
    (encoded,) = backends.encode[0].bodies
    assert encoded["stream"] is False
    assert "stream_options" not in encoded


async def test_the_handle_on_the_kv_cache_reaches_decode_as_the_bytes_that_came() -> None:
    backends = fleet("report-flat-metadata", prefill=1)
    backends.prefill[0].answers(answer("prefill-answer"))

    await send(backends, STREAM)

    (body,) = backends.decode[0].raw
    assert slice_of(body, "kv_transfer_params") == slice_of(
        sample("prefill-answer.json"), "kv_transfer_params"
    )


@pytest.mark.parametrize(
    ("request_name", "report", "field"),
    [
        (DATA_URL, "report-nested-metadata-nixl", "seed"),
        (DATA_URL, "report-nested-metadata-nixl", "temperature"),
        (THREE, "report-hash-differs-from-uuid", "mm_processor_kwargs"),
        (THREE, "report-hash-differs-from-uuid", "priority"),
        (VIDEO, "report-video-two-features", "mm_processor_kwargs"),
        (TOOL_TURN, "report-null-params", "tools"),
    ],
)
async def test_untouched_values_keep_their_bytes(
    request_name: str, report: str, field: str
) -> None:
    backends = fleet(report)

    await send(backends, request_name)

    (body,) = backends.decode[0].raw
    assert slice_of(body, field) == slice_of(sample(f"{request_name}.json"), field)


async def test_numbers_of_a_reference_keep_their_spelling() -> None:
    backends = fleet("report-video-two-features")

    await send(backends, VIDEO)

    (body,) = backends.decode[0].raw
    assert b'"second_per_grid_ts":[1.0]' in body
    assert b'"video_grid_thw":[4,16,26]' in body


async def test_the_report_reaches_the_consumer_as_the_bytes_that_came() -> None:
    backends = fleet("report-nested-metadata-nixl")

    await send(backends, DATA_URL)

    (body,) = backends.decode[0].raw
    sent = slice_of(body, "ec_transfer_params")
    came = slice_of(sample("report-nested-metadata-nixl.json"), "ec_transfer_params")
    assert slice_of(sent, RED) == slice_of(came, RED)


@pytest.mark.parametrize(
    ("request_name", "keys"),
    [
        (DATA_URL, [RED]),
        (THREE, [RED, BLUE, RED]),
        (HTTP_URL, [CAT]),
        (VIDEO, [STREET]),
        (AUDIO, [WAV]),
        ("request-image-uuid-only", ["catalogue-4711"]),
        (TOOL_TURN, ["door-photo-1"]),
    ],
)
async def test_the_same_content_key_reaches_encode_and_decode(
    request_name: str, keys: list[str]
) -> None:
    backends = fleet("report-null-params")

    await send(backends, request_name)

    for engine in (*backends.encode, *backends.decode):
        (body,) = engine.bodies
        assert [part["uuid"] for part in content_of(body) if part["type"] != "text"] == keys


async def test_a_part_with_a_uuid_alone_is_sent_as_it_is_and_a_miss_reaches_the_caller() -> None:
    (miss,) = (error for error in ERRORS if error["name"] == "uuid without data, not cached")
    backends = Backends()
    refuse(backends.encode[0], miss)

    reply = await chat(backends.proxy(), sample("request-image-uuid-only.json"))

    assert (reply.status, reply.body.decode()) == (400, miss["body"])
    part = {"type": "image_url", "image_url": None, "uuid": "catalogue-4711"}
    (encoded,) = backends.encode[0].bodies
    assert content_of(encoded) == [part]
    assert backends.decode[0].requests == []


async def test_an_agents_turn_keeps_its_messages_and_nulls_and_changes_in_the_picture_alone() -> (
    None
):
    backends = fleet("report-keyed-without-positions", prefill=1)

    await send(backends, TOOL_TURN)

    request = json_sample(f"{TOOL_TURN}.json")
    reference = {
        "type": "image_embeds",
        "image_embeds": {"image_grid_thw": [1, 4, 4]},
        "uuid": "door-photo-1",
    }
    content_of(request)[0] = reference
    for engine in (*backends.prefill, *backends.decode):
        (body,) = engine.bodies
        assert body["messages"] == request["messages"]
        assert body["messages"][1]["content"] is None


async def test_text_alone_reaches_decode_as_the_bytes_that_came_and_no_encoder() -> None:
    backends = Backends()

    await send(backends, "request-text-only")

    assert backends.decode[0].raw == [sample("request-text-only.json")]
    assert backends.encode[0].requests == []


async def sent_for(report: str, request_name: str) -> tuple[Any, Any]:
    """The media parts and ``ec_transfer_params`` that decode received."""
    backends = fleet(report)
    await send(backends, request_name)
    (body,) = backends.decode[0].bodies
    parts = [part for part in content_of(body) if part["type"] != "text"]
    return parts, body.get("ec_transfer_params")


RED_REFERENCE = {
    "type": "image_embeds",
    "image_embeds": {"image_grid_thw": [1, 4, 4]},
    "uuid": RED,
}


@pytest.mark.parametrize(
    "report",
    [
        "report-flat-metadata",
        "report-nested-metadata-nixl",
        "report-keyed-without-positions",
    ],
)
async def test_a_report_under_the_uuid_makes_a_reference_and_is_forwarded(report: str) -> None:
    assert await sent_for(report, DATA_URL) == ([RED_REFERENCE], reported(report))


async def test_without_metadata_the_part_stays_raw_and_the_entry_is_forwarded() -> None:
    parts, transfer = await sent_for("report-empty-metadata", HTTP_URL)

    (caller,) = (p for p in content_of(json_sample(f"{HTTP_URL}.json")) if p["type"] != "text")
    assert parts == [{**caller, "uuid": CAT}]
    assert transfer == reported("report-empty-metadata")


async def test_without_a_report_the_part_stays_raw_and_nothing_is_forwarded() -> None:
    parts, transfer = await sent_for("report-null-params", HTTP_URL)

    (caller,) = (p for p in content_of(json_sample(f"{HTTP_URL}.json")) if p["type"] != "text")
    assert parts == [{**caller, "uuid": CAT}]
    assert transfer is None


THREE_REFERENCES = [
    part
    for part in content_of(expected("decode-body-two-images-and-repeat"))
    if part["type"] != "text"
]


@pytest.mark.parametrize(
    "report", ["report-hash-differs-from-uuid", "report-list-form", "report-mixed-form"]
)
async def test_repeated_pictures_are_matched_by_position_in_every_form(report: str) -> None:
    parts, _ = await sent_for(report, THREE)

    assert parts == THREE_REFERENCES


@pytest.mark.parametrize("report", ["report-list-form", "report-mixed-form"])
async def test_transfer_ids_of_a_list_are_forwarded_in_the_order_of_the_items(report: str) -> None:
    _, transfer = await sent_for(report, THREE)

    found = reported(report)
    ids = [{name: e[name] for name in ("mm_hash", "transfer_id")} for e in found["ec_items"]]
    assert transfer == {**found, "ec_items": ids}


async def test_a_video_with_its_sound_becomes_one_part_with_two_embeds() -> None:
    (part,), transfer = await sent_for("report-video-two-features", VIDEO)

    assert list(part) == ["type", "video_embeds", "audio_embeds", "uuid"]
    assert transfer == reported("report-video-two-features")


async def test_a_model_that_ignores_sound_gives_a_plain_video_reference() -> None:
    (part,), transfer = await sent_for("report-video-one-feature", VIDEO)

    assert part == {
        "type": "video_embeds",
        "video_embeds": {"video_grid_thw": [4, 16, 26], "second_per_grid_ts": [1.0]},
        "uuid": STREET,
    }
    assert transfer == reported("report-video-one-feature")


async def test_audio_becomes_an_audio_reference() -> None:
    (part,), _ = await sent_for("report-audio-num-tokens", AUDIO)

    assert part["audio_embeds"] == {"audio_num_tokens": [25]}


async def test_an_ambiguous_report_of_three_pictures_is_a_502_that_names_them() -> None:
    backends = fleet("report-ambiguous")

    reply = await chat(backends.proxy(), sample(f"{THREE}.json"))

    assert (reply.status, reply.error["stage"]) == (502, "encode")
    places = [
        f"messages[0].content[{index}]"
        for index, part in enumerate(content_of(json_sample(f"{THREE}.json")))
        if part["type"] != "text"
    ]
    assert [place in reply.error["message"] for place in places] == [True] * 3
    assert backends.decode[0].requests == []


async def test_the_same_report_of_one_picture_is_its_only_entry() -> None:
    parts, transfer = await sent_for("report-ambiguous", DATA_URL)

    assert parts == [{**RED_REFERENCE, "image_embeds": {"image_grid_thw": [1, 8, 8]}}]
    assert transfer == reported("report-ambiguous")


async def test_without_a_handle_references_never_reach_decode() -> None:
    backends = fleet("report-flat-metadata", prefill=1)
    backends.prefill[0].answers(answer("prefill-answer-null-params"))

    reply = await chat(backends.proxy(), sample(f"{STREAM}.json"))

    assert (reply.status, reply.error["stage"]) == (502, "prefill")
    assert backends.decode[0].requests == []


async def test_without_a_handle_text_is_prefilled_by_decode() -> None:
    backends = fleet(prefill=1)
    backends.prefill[0].answers(answer("prefill-answer-null-params"))

    await send(backends, "request-text-only")

    assert backends.decode[0].raw == [sample("request-text-only.json")]


ERRORS: list[dict[str, Any]] = json_sample("engine-errors.json")
REFUSALS = [error for error in ERRORS if 400 <= error["status"] < 500]


def refuse(engine: Engine, error: dict[str, Any]) -> None:
    headers = {"content-type": error["content_type"], **error["headers"]}
    engine.answers(httpx.Response(error["status"], content=error["body"], headers=headers))


@pytest.mark.parametrize("error", REFUSALS, ids=[error["name"] for error in REFUSALS])
@pytest.mark.parametrize("role", ["encode", "prefill", "decode"])
async def test_a_refusal_of_any_stage_reaches_the_caller_in_its_words(
    role: str, error: dict[str, Any]
) -> None:
    backends = fleet("report-flat-metadata", prefill=1)
    refuse(getattr(backends, role)[0], error)

    reply = await chat(backends.proxy(), sample(f"{DATA_URL}.json"))

    assert reply.status == error["status"]
    assert reply.header("content-type") == "application/json"
    said = json.loads(error["body"])
    if "error" in said:
        assert reply.body.decode() == error["body"]
    else:
        assert reply.error["message"] == said.get("message", said.get("detail"))
        assert (reply.error["code"], reply.error["stage"]) == (error["status"], role)
    assert len(getattr(backends, role)[0].requests) == 1


@pytest.mark.parametrize("error", ERRORS, ids=[error["name"] for error in ERRORS])
@pytest.mark.parametrize("role", ["encode", "prefill", "decode"])
async def test_no_error_of_an_engine_is_taken_for_success_or_for_our_own(
    role: str, error: dict[str, Any]
) -> None:
    backends = fleet("report-flat-metadata", prefill=1)
    refuse(getattr(backends, role)[0], error)

    reply = await chat(backends.proxy(), sample(f"{DATA_URL}.json"))

    assert reply.status >= 400
    assert b"internal_error" not in reply.body
    assert reply.is_whole


async def test_an_answer_is_passed_on_as_the_bytes_that_came() -> None:
    backends = Backends()
    backends.decode[0].answers(answer("decode-answer"))

    reply = await send(backends, "request-text-only")

    assert reply.body == sample("decode-answer.json")
    assert reply.header("content-type") == "application/json"


@pytest.mark.parametrize("name", ["decode-stream.sse", "decode-stream-keep-alive.sse"])
async def test_a_stream_is_passed_on_as_the_bytes_that_came(name: str) -> None:
    backends = fleet("report-flat-metadata", prefill=1)
    backends.decode[0].answers(streamed(name))

    reply = await send(backends, STREAM)

    assert reply.body == sample(name)
    assert reply.header("content-type") == "text/event-stream; charset=utf-8"
    assert reply.is_whole
