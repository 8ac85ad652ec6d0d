from __future__ import annotations

import json
from bisect import bisect_left
from typing import Any

import pytest

from epd_proxy import Config
from epd_proxy.chat import Chat
from epd_proxy.errors import RequestError
from epd_proxy.media import Place
from epd_proxy.payload import Payload
from tests.backends import Backends, ask, image, report
from tests.driver import chat

TENSOR = "UEsDBAoAAAAAAA=="
GRID = {"k": {"modality": "image", "item_indices": [0], "metadata": {"image_grid_thw": [1, 4, 4]}}}


CONFIG = Config(decode="http://d")
TRUSTING = Config(decode="http://d", trust_embeds=True, trust_transfer_params=True)


def chat_of(*parts: Any, config: Config = CONFIG, **fields: Any) -> Chat:
    return Chat(json.dumps(ask(*parts, **fields)).encode(), config)


def body_of(found: Chat) -> Any:
    return json.loads(b"".join(found.body({})))


def test_a_body_in_which_nothing_changes_is_the_bytes_that_came() -> None:
    body = b'{ "messages" : [ ] , "kv_transfer_params" : null , "vllm_xargs" : { "x" : 1 } }'

    (sent,) = Chat(body, CONFIG).body({}, frozenset({"ec_transfer_params"}))

    assert sent is body


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
@pytest.mark.parametrize("value", [{"remote_host": "10.6.6.6"}, {}, "x", [1], False])
def test_transfer_params_of_callers_are_dropped(name: str, value: Any) -> None:
    assert body_of(chat_of("hi", **{name: value})) == ask("hi")


def test_transfer_params_are_dropped_however_their_name_is_spelled() -> None:
    body = b'{"messages":[],"\\u006bv_transfer_params":{},"ec\\u005ftransfer_params":{}}'

    assert body_of(Chat(body, CONFIG)) == {"messages": []}


def test_transfer_params_are_dropped_from_vllm_xargs_where_the_rest_keeps_its_bytes() -> None:
    body = (
        b'{"messages":[],"vllm_xargs":{"a": 1.0,"kv_transfer_params":null,'
        b'"ec_transfer_params":{"h":{}},"b":"\\u0061"}}'
    )

    sent = b"".join(Chat(body, CONFIG).body({}))

    assert sent == b'{"messages":[],"vllm_xargs":{"a":1.0,"b":"\\u0061"}}'


@pytest.mark.parametrize("value", [None, [], "kv_transfer_params", ["kv_transfer_params"], 7])
def test_odd_vllm_xargs_are_passed_on(value: Any) -> None:
    assert body_of(chat_of("hi", vllm_xargs=value)) == ask("hi", vllm_xargs=value)


def test_transfer_params_of_trusted_callers_reach_decode() -> None:
    fields = {"kv_transfer_params": {"x": 1}, "vllm_xargs": {"ec_transfer_params": {"h": {}}}}
    body = json.dumps(ask("hi", **fields), indent=1).encode()

    (sent,) = Chat(body, TRUSTING).body({})

    assert sent is body


@pytest.mark.parametrize("config", [CONFIG, TRUSTING])
def test_the_proxys_own_transfer_params_replace_the_callers(config: Config) -> None:
    found = chat_of("hi", config=config, kv_transfer_params={"remote_host": "10.6.6.6"})

    sent = json.loads(b"".join(found.body({"kv_transfer_params": {"ours": 1}})))

    assert sent == ask("hi", kv_transfer_params={"ours": 1})


def test_parts_and_fields_change_together_and_the_rest_keeps_its_bytes() -> None:
    body = b'{"seed":1e5,"messages":[{"role":"user","content":[{"image_url":"x"},"\\u0061"]}]}'

    found = Chat(body, CONFIG)
    sent = b"".join(found.body({**found.with_parts({Place(0, 0): {"type": "y"}}), "n": 1}))

    assert sent == (
        b'{"seed":1e5,"messages":[{"role":"user","content":[{"type":"y"},"\\u0061"]}],"n":1}'
    )


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_embeds", "image_embeds": TENSOR},
        {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, -28, -28]}, "uuid": "k"},
        {"type": "video_embeds", "video_embeds": None},
        {"type": "audio_embeds"},
        {"type": "prompt_embeds", "prompt_embeds": TENSOR},
        {"image_embeds": TENSOR},
        {"image_embeds": TENSOR, "video_url": {"url": "http://v"}},
        {"type": "text", "text": "hi", "audio_embeds": TENSOR, "uuid": "k"},
        {"type": "image_url", "image_embeds": TENSOR, "uuid": "k"},
    ],
)
@pytest.mark.parametrize("encoders", [0, 1])
async def test_embeds_of_callers_are_a_400_that_names_the_part(
    part: dict[str, Any], encoders: int
) -> None:
    backends = Backends(encode=encoders)

    reply = await chat(backends.proxy(), ask("look:", image(), part))

    assert (reply.status, reply.error["param"]) == (400, "messages[0].content[2]")
    assert "not accepted" in reply.error["message"]
    assert backends.decode[0].requests == []


async def test_trusted_embeds_reach_decode_untouched_and_keep_their_modality_raw() -> None:
    embeds = {"type": "image_embeds", "image_embeds": TENSOR, "uuid": "mine"}
    backends = Backends()
    backends.encode[0].answers(report(GRID))

    reply = await chat(backends.proxy(trust_embeds=True), ask(embeds, image(uuid="k")))

    assert reply.status == 200
    (encoded,) = backends.encode[0].bodies
    assert encoded["messages"][0]["content"] == [image(uuid="k")]
    (body,) = backends.decode[0].bodies
    assert body["messages"][0]["content"] == [embeds, image(uuid="k")]


@pytest.mark.parametrize(
    ("part", "modalities"),
    [
        ({"type": "image_embeds", "image_embeds": TENSOR}, {"image"}),
        ({"type": "audio_embeds", "audio_embeds": None}, {"audio"}),
        ({"type": "video_embeds", "video_embeds": TENSOR}, {"video"}),
        (
            {"type": "video_embeds", "video_embeds": TENSOR, "audio_embeds": TENSOR},
            {"video", "audio"},
        ),
        ({"type": "prompt_embeds", "prompt_embeds": TENSOR}, set()),
    ],
)
def test_trusted_embeds_are_known_by_their_modalities(
    part: dict[str, Any], modalities: set[str]
) -> None:
    found = chat_of(part, image(), config=TRUSTING)

    assert found.embedded == modalities
    assert [part.kind for part in found.media] == ["image_url"]


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"use_audio_in_video": True}, True),
        ({"use_audio_in_video": False}, False),
        ({"use_audio_in_video": None}, False),
        ({}, False),
        (None, False),
        ("use_audio_in_video", False),
    ],
)
def test_sound_is_a_feature_of_its_own_where_the_options_say_so(options: Any, asked: bool) -> None:
    assert chat_of("hi", mm_processor_kwargs=options).with_sound is asked
    assert not chat_of("hi").with_sound


def test_beam_search_is_known() -> None:
    assert chat_of("hi", use_beam_search=True).uses_beam_search
    assert not chat_of("hi", use_beam_search=False).uses_beam_search
    assert not chat_of("hi").uses_beam_search


@pytest.mark.parametrize(
    "part",
    [{"type": "image_url", "image_url": None}, {"type": "image_url", "uuid": "/x", "image_url": 1}],
)
@pytest.mark.parametrize("encoders", [0, 1])
async def test_a_part_that_no_engine_may_see_is_refused_with_encoders_and_without(
    part: dict[str, Any], encoders: int
) -> None:
    backends = Backends(encode=encoders)

    reply = await chat(backends.proxy(), ask(part))

    assert reply.status == 400
    assert reply.error["param"].startswith("messages[0].content[0]")
    assert backends.decode[0].requests == []


DEEP = {
    "an unknown field": b'{"messages":[],"n":1,"x":%b}',
    "beside media": b'{"messages":[{"content":[{"image_url":"x"}]}],"x":%b}',
    "input_audio": b'{"messages":[{"content":[{"input_audio":{"data":"A","x":%b}}]}]}',
    "a uuid": b'{"messages":[{"content":[{"image_url":"x","uuid":%b}]}]}',
    "a part": b'{"messages":[{"content":[{"image_url":"x","y":%b}]}]}',
    "vllm_xargs": b'{"messages":[],"vllm_xargs":{"kv_transfer_params":1,"x":%b}}',
}


def is_refused(depth: int) -> bool:
    try:
        Payload(b'{"x":%b}' % (b"[" * depth + b"]" * depth))
    except RequestError:
        return True
    return False


@pytest.mark.parametrize("body", DEEP.values(), ids=DEEP.keys())
async def test_nesting_near_the_interpreters_limit_is_served_or_a_400(body: bytes) -> None:
    limit = bisect_left(range(20_000), True, key=is_refused)
    statuses = []
    for depth in range(limit - 40, limit + 2):
        backends = Backends(prefill=1)
        reply = await chat(backends.proxy(), body % (b"[" * depth + b"]" * depth))
        statuses.append(reply.status)

    assert set(statuses) == {200, 400}
    assert statuses == sorted(statuses)


async def test_nesting_that_a_later_look_finds_too_deep_is_a_400(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_deep(*_: Any, **__: Any) -> str:
        raise RecursionError

    body = json.dumps(ask({"type": "input_audio", "input_audio": {"data": "A"}})).encode()
    proxy = Backends().proxy()
    monkeypatch.setattr(json, "dumps", too_deep)

    reply = await chat(proxy, body)

    assert reply.status == 400
    assert b"nested too deeply" in reply.body
