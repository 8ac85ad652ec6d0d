from __future__ import annotations

from typing import Any

from epd_proxy.simulator import Simulator
from tests.simulator.bodies import SAMPLES, ask, chat, events, sample

SAMPLE_STREAM = SAMPLES / "decode-stream.sse"


def shape(value: Any) -> Any:
    """The keys of an event and of what stands below, without the values."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    return [shape(each) for each in value] if isinstance(value, list) else None


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
