"""
A model that sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import openai
import pytest

from tests.engine.checks import (
    check,
    check_accepted,
    check_answer,
    check_decode,
    check_keys,
    check_media_itself,
    check_metadata_alone,
    check_prefill,
    check_same_positions,
    check_same_prompt,
    content_keys,
    identifiers,
)
from tests.engine.fleets import MODEL as NAME
from tests.engine.fleets import TOPOLOGIES, Fleet, chat
from tests.engine.media import film, frames, image, image_url, picture, text
from tests.engine.oracles import HANDLE, Oracle
from tests.processes import LIMIT

MODEL = "qwen2_5_vl"

A, B = image(112, 84), image(56, 140)

CALL: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":"é"}'}}
    ],
}


TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}

NO_PICTURE = "data:image/png;base64,QUJD"

WITH_PREFILL = TOPOLOGIES["E+P+D"]


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def result(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c1", "content": content}


PROMPTS: dict[str, list[dict[str, Any]]] = {
    "text": [text()],
    "text alone": [{"role": "user", "content": "Hello 🌍"}],
    "a picture": [A, text()],
    "nothing but a picture": [A],
    "two pictures": [text("Compare"), A, text("with"), B, text(".")],
    "one picture twice": [A, B, text("and the first again:"), A],
    "many pictures": [image(28 * n, 56) for n in range(2, 10)],
    "a picture after a tool was called": [
        user(text()),
        CALL,
        result("seen"),
        user(A, text("And this?")),
    ],
    "a picture from a tool": [user(text()), CALL, result([text("found"), A]), user(text())],
    "a picture in every turn": [
        {"role": "system", "content": [text("Like this:"), A]},
        user(B, text()),
        {"role": "assistant", "content": [text("It looks like"), A]},
        user(text("No."), B),
    ],
    "a picture that has a name": [{**A, "uuid": "holiday pictures/2026/the beach é.png"}, text()],
    "two pictures that have names": [{**A, "uuid": "a/1"}, {**B, "uuid": "https://x/b?c=1#d"}],
    "a name that is a number": [{**A, "uuid": 7}, {**B, "uuid": "8"}, text()],
    "a picture with keys of its own": [{**A, "title": "the beach", "x": [1]}, text()],
    "a url without an object": [{"type": "image_url", "image_url": picture(84, 84), "uuid": "u1"}],
    "a part without a type": [{"image_url": picture(84, 112)}, text()],
    "an input_image": [
        {"type": "input_image", "image_url": picture(112, 112), "detail": "auto"},
        text(),
    ],
}

WISHES: dict[str, dict[str, Any]] = {
    "min_tokens": {"min_tokens": 3, "max_tokens": 9},
    "max_completion_tokens": {"max_completion_tokens": 7, "max_tokens": 5, "min_tokens": 2},
    "max_completion_tokens alone": {"max_completion_tokens": 7},
    "nulls": {"max_completion_tokens": None, "max_tokens": None, "n": None, "seed": None},
    "n": {"n": 3, "temperature": 0.7, "seed": 9223372036854775807},
    "logprobs": {"logprobs": True, "top_logprobs": 2, "stop": ["a", "é"], "ignore_eos": True},
    "queue": {"priority": -3, "cache_salt": "pepper", "session_id": "s", "user": "u"},
    "unknown": {"frobnicate": {"a": 1.0}, "temperature": 0, "top_p": 0.1},
}

STREAMS: list[dict[str, Any]] = [
    {"stream": False},
    {"stream": True},
    {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_every_stage_understands_the_pictures(fleet: Fleet, prompt: str, stream: bool) -> None:
    body = chat(*PROMPTS[prompt], stream=stream, max_tokens=9)
    seen, control = fleet.ask(body), fleet.ask_directly(body)
    check(seen, control, body)
    check_same_positions(seen, control)


@pytest.mark.parametrize("stream", STREAMS, ids=["whole", "stream", "stream with usage"])
@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("parts", [[A, text()], [text()]], ids=["picture", "text"])
def test_decode_hears_the_callers_wishes(
    fleet: Fleet, parts: list[dict[str, Any]], wish: str, stream: dict[str, Any]
) -> None:
    body = chat(*parts, **WISHES[wish], **stream)
    seen, control = fleet.ask(body), fleet.ask_directly(body)
    check(seen, control, body)


@pytest.mark.parametrize(
    ("video", "tempo"),
    [(frames(56, 84, 4), 2.0), (film(84, 56, 2), 1.0)],
    ids=["frames", "film"],
)
@pytest.mark.parametrize("form", ["json", "tensor"])
def test_a_video_is_understood_but_for_its_tempo(
    fleet: Fleet, form: str, video: dict[str, Any], tempo: float
) -> None:
    """
    ``second_per_grid_ts`` is not among what this model's encoder reports, and the consumer takes 1
    for it: positions come out as with the video itself only where that is right.
    """
    body = chat(video, A, text(), stream=True)
    with fleet.behind("--metadata-format", form) as other:
        seen, control = other.ask(body), other.ask_directly(body)
    check(seen, control, body)
    assert control["engine"]["items"][0]["data"]["second_per_grid_ts"]["values"] == tempo
    expected = control["engine"]["worker_positions"]
    for verdict in (*seen.prefill, *seen.decode):
        positions = verdict["engine"]["worker_positions"]
        assert positions["ok"]
        assert (positions == expected) == (tempo == 1)


KWARGS: dict[str, dict[str, Any]] = {
    "of the processor": {"mm_processor_kwargs": {"max_pixels": 100352}},
    "of the loader": {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}}},
    "of both": {
        "mm_processor_kwargs": {"min_pixels": 3136, "max_pixels": 100352},
        "media_io_kwargs": {"image": {"image_mode": "RGB"}},
    },
}


@pytest.mark.parametrize("kwargs", KWARGS)
def test_options_make_other_keys_than_the_uuids(fleet: Fleet, kwargs: str) -> None:
    large = image(448, 392)
    body = chat(large, {**A, "uuid": "a picture/1"}, large, text(), **KWARGS[kwargs])
    seen, control = fleet.ask(body), fleet.ask_directly(body)
    check(seen, control, body)
    check_same_positions(seen, control)
    assert not set(content_keys(body)) & seen.report.keys()
    assert [each["uuids"] for each in seen.consumer["parsed"]] == [content_keys(body)]


def test_what_callers_say_of_transfers_reaches_no_engine(fleet: Fleet) -> None:
    body = chat(A, text(), vllm_xargs={"a": 1})
    evil = {
        "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"},
        "ec_transfer_params": {"k": {"peer_host": "evil"}},
        "vllm_xargs": {"a": 1, "kv_transfer_params": "evil", "ec_transfer_params": "evil"},
    }
    seen, control = fleet.ask(body | evil), fleet.ask_directly(body)
    check(seen, control, body)


@pytest.mark.parametrize("prompt", ["a picture", "two pictures", "a picture from a tool"])
def test_metadata_may_be_tensors(fleet: Fleet, prompt: str) -> None:
    body = chat(*PROMPTS[prompt])
    with fleet.behind("--metadata-format", "tensor") as other:
        seen, control = other.ask(body), other.ask_directly(body)
    check(seen, control, body)
    check_same_positions(seen, control)


def test_pictures_may_be_encoded_one_by_one(fleet: Fleet) -> None:
    body = chat(A, B, A, text())
    with fleet.behind("--encoder-batch-size", "1") as other:
        seen, control = other.ask(body, encode=3), other.ask_directly(body)
    check(seen, control, body)
    check_same_positions(seen, control)


def test_encoders_may_be_given_a_token(fleet: Fleet) -> None:
    body = chat(A, B, text())
    with fleet.behind("--encode-max-tokens", "1") as other:
        seen, control = other.ask(body), other.ask_directly(body)
    check_accepted(seen, control)
    check_keys(seen, body)
    check_prefill(seen, control)
    check_decode(seen, control)
    (encoder,) = seen.encode
    assert encoder["request"]["set"] == {"model": NAME, "stream": False, "max_tokens": 1}
    assert encoder["answer"]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_media_may_stay_as_the_caller_sent_it(fleet: Fleet, stream: bool) -> None:
    body = chat(A, text("and"), B, A, text(), stream=stream)
    with fleet.behind("--no-rewrite") as other:
        seen, control = other.ask(body), other.ask_directly(body)
    check_accepted(seen, control)
    check_answer(seen, body)
    check_prefill(seen, control)
    check_decode(seen, control)
    for verdict in (*seen.encode, *seen.prefill, *seen.decode):
        # Everybody has hashed the content.
        assert set(identifiers(verdict)) == seen.report.keys() == set(identifiers(control))
    for verdict in (*seen.prefill, *seen.decode):
        check_media_itself(verdict, control)


# Pictures of their own: a front-end that has seen one raw, then as a reference, takes it for known
# the next time it comes raw, and hands its engine no pixels.
C, D, NAMED = image(84, 224), image(84, 280), {**image(84, 308), "uuid": "a shared/picture"}


@pytest.mark.parametrize("parts", [[text()], [C, D, text("and the first again:"), C], [NAMED]])
def test_a_shared_store_finds_the_kv_cache_by_content(
    engines: Mapping[str, Oracle], parts: list[dict[str, Any]]
) -> None:
    body = chat(*parts, max_tokens=9)
    with Fleet(engines, WITH_PREFILL).behind("--kv-connector", "shared") as fleet:
        seen, control = fleet.ask(body), fleet.ask_directly(body)
    check_accepted(seen, control)
    check_keys(seen, body)
    check_same_prompt(seen.consumer, control)
    check_metadata_alone(seen.consumer, seen.report)
    assert seen.consumer["engine"]["kv_transfer_params"] is None
    assert seen.consumer["engine"]["ec_transfer_params"] == (seen.report or None)
    assert seen.decoder["request"]["set"] == control["request"]["set"]
    check_media_itself(seen.decoder, control)


def test_the_host_of_the_handle_may_be_prefills(engines: Mapping[str, Oracle]) -> None:
    with Fleet(engines, WITH_PREFILL).behind("--kv-remote-host-from-url") as fleet:
        seen = fleet.ask(chat(A, text()))
    given = seen.decoder["engine"]["kv_transfer_params"]
    assert given == {**HANDLE, "remote_host": "127.0.0.1"}


REFUSALS: dict[str, tuple[str, dict[str, Any]]] = {
    "an unknown model": ("prompt", chat(text(), stream=True) | {"model": "other"}),
    "an unknown model for a picture": ("encode", chat(A, text()) | {"model": "other"}),
    "a picture that is none": ("encode", chat(image_url(NO_PICTURE), text(), stream=True)),
    "a part of no known type": ("prompt", chat({"type": "hologram"}, text())),
    "tools, but no parser for them": ("prompt", chat(A, text(), tools=[TOOL], stream=True)),
    "at least more than at most": ("decode", chat(A, min_tokens=5, max_tokens=2, stream=True)),
    "choices, but no chance": ("decode", chat(A, text(), n=2, temperature=0)),
    "usage, but no stream": ("decode", chat(A, text(), stream_options={"include_usage": True})),
}
"""Who is the first to refuse it: ``prompt`` is prefill, or decode where there is none."""


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refusal_is_the_engines_own(fleet: Fleet, refusal: str) -> None:
    stage, body = REFUSALS[refusal]
    if stage == "prompt":
        stage = "prefill" if fleet.has_prefill else "decode"
    stages = ("encode", "prefill", "decode")
    not_asked = dict.fromkeys(stages[stages.index(stage) + 1 :], 0)
    seen, control = fleet.ask(body, **not_asked), fleet.ask_directly(body)
    (verdict,) = getattr(seen, stage)
    assert seen.answer.status_code == verdict["status"] == control["status"]
    assert seen.answer.json()["error"] == verdict["error"] == control["error"]
    assert verdict["status"] in (400, 404)


@pytest.mark.parametrize("stream", [False, True])
def test_the_official_client_gets_its_answer(fleet: Fleet, stream: bool) -> None:
    messages: Any = PROMPTS["a picture from a tool"]
    fleet.forget()
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as client:
        wish: Any = {"model": NAME, "messages": messages, "max_tokens": 1}
        if stream:
            wish |= {"stream": True, "stream_options": {"include_usage": True}}
            chunks = list(client.chat.completions.create(**wish))
            said = "".join(each.delta.content or "" for chunk in chunks for each in chunk.choices)
            usage = chunks[-1].usage
        else:
            answer = client.chat.completions.create(**wish)
            said, usage = answer.choices[0].message.content, answer.usage
    (verdict,) = fleet.verdicts(messages)["decode"]
    assert said == "I"
    assert usage is not None
    assert usage.prompt_tokens == verdict["engine"]["prompt_tokens"]


def test_health_and_models_are_the_engines(fleet: Fleet) -> None:
    with httpx.Client(base_url=fleet.url, trust_env=False, timeout=LIMIT) as client:
        assert client.get("/health").status_code == 200
        models = client.get("/v1/models").json()["data"]
        assert [model["id"] for model in models] == [NAME]


EC_HANDLE = {
    "peer_host": "10.0.0.11",
    "peer_port": 5601,
    "size_bytes": 9223372036854775807,
    "shape": [48, 2048],
    "a_key_of_the_future": {"é": [18446744073709551615, 0.1, None, ""]},
}


def test_references_of_trusted_callers_are_passed_on(fleet: Fleet) -> None:
    metadata = {"image_grid_thw": [1, 6, 8]}
    part = {"type": "image_embeds", "image_embeds": metadata, "uuid": "mine/1"}
    body = chat(part, text(), max_tokens=9)
    with fleet.behind("--trust-embeds") as other:
        seen, control = other.ask(body), other.ask_directly(body)
    check_accepted(seen, control)
    check_prefill(seen, control)
    check_decode(seen, control)
    for verdict in (*seen.prefill, *seen.decode):
        check_same_prompt(verdict, control)
        check_metadata_alone(verdict, {"mine/1": {"metadata": metadata}})


async def test_handles_of_embeddings_reach_the_consumer_as_they_came(fleet: Fleet) -> None:
    entry = {"modality": "image", "metadata": {"image_grid_thw": [1, 6, 8]}, **EC_HANDLE}
    body = chat({**A, "uuid": "a picture/1"}, text())
    seen = await fleet.ask_with_encoder(lambda _: entry, body)
    control = fleet.ask_directly(body)
    report = {"a picture/1": {"item_indices": [0], **entry}}
    check_accepted(seen, control)
    assert seen.consumer["engine"]["ec_transfer_params"] == report
    assert "ec_transfer_params" in seen.decoder["request"]["set"] or fleet.has_prefill
    for verdict in (*seen.prefill, *seen.decode):
        check_same_prompt(verdict, control)
        check_metadata_alone(verdict, report)


async def test_pictures_stay_raw_when_one_cannot_be_replaced(fleet: Fleet) -> None:
    def entry_of(part: dict[str, Any]) -> dict[str, Any]:
        return {"metadata": {"image_grid_thw": [1, 6, 8]} if part["uuid"] == "known" else {}}

    body = chat({**A, "uuid": "known"}, B, text())
    seen = await fleet.ask_with_encoder(entry_of, body)
    control = fleet.ask_directly(body)
    check_accepted(seen, control)
    for verdict in (*seen.prefill, *seen.decode):
        assert identifiers(verdict) == content_keys(body)
        check_media_itself(verdict, control)


async def test_a_picture_after_its_reference_has_lost_its_pixels(fleet: Fleet) -> None:
    """
    In vLLM 0.33.0 the engine's half of the cache forgets the picture for the reference, but the
    front-end's half does not: it leaves out what it believes the engine to have. Harmless while
    the embedding lives.
    """
    body = chat({**A, "uuid": f"to and fro, {fleet.has_prefill}"}, text())
    entry: dict[str, Any] = {}

    async def ask(metadata: dict[str, Any]) -> set[str]:
        entry["metadata"] = metadata
        seen = await fleet.ask_with_encoder(lambda _: entry, body)
        (item,) = seen.consumer["engine"]["items"]
        return {*item["data"]}

    assert await ask({}) == {"image_grid_thw", "pixel_values"}
    assert await ask({"image_grid_thw": [1, 6, 8]}) == {"image_grid_thw"}
    assert await ask({}) == {"image_grid_thw"}
