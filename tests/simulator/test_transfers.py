from __future__ import annotations

import json

import pytest

from epd_proxy.simulator import Failure, Simulator
from tests.simulator.bodies import (
    CLIP,
    GRID,
    TENSOR,
    WITH_SOUND,
    Json,
    ask,
    audio,
    b64,
    chat,
    events,
    handles,
    kv_handle,
    reference,
    report,
    sample,
    text,
    url_part,
)

CONSUMERS = ("prefill", "prefill_decode")
ONE_TOKEN = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}


# Embeddings, from encode


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


# KV blocks, from prefill


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
