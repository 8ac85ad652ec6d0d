from __future__ import annotations

import pytest

from epd_proxy.simulator import ROLES, Simulator
from tests.simulator.bodies import RED, Json, ask, assert_refused, chat, sample

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
@pytest.mark.parametrize("role", ROLES)
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
]


@pytest.mark.parametrize(("body", "param", "message"), REFUSED, ids=range(len(REFUSED)))
@pytest.mark.parametrize("role", ROLES)
async def test_what_no_role_accepts_is_a_400(
    role: str, body: Json, param: str | None, message: str
) -> None:
    await assert_refused(Simulator(role), body, param, message)


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
    chat(stream_options=None, max_completion_tokens=None, n=None, min_tokens=None),
    chat(max_tokens=5, max_completion_tokens=50, min_tokens=40),
    chat(cache_salt="s" * 128, unknown_field=[1]),
    chat(kv_transfer_params={}, ec_transfer_params=None),
    chat(kv_transfer_params={"a": 2**64 - 1, "b": -(2**63), "c": 1.5}),
    sample("request-tool-turn-content-null.json"),
    sample("request-stream-with-usage.json"),
]


@pytest.mark.parametrize("body", ACCEPTED, ids=range(len(ACCEPTED)))
@pytest.mark.parametrize("role", ROLES)
async def test_what_vllm_accepts_is_accepted(role: str, body: Json) -> None:
    answer = await ask(Simulator(role, model="*"), body)
    assert answer.status_code == 200, answer.text
