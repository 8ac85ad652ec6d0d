"""
The official client against the demo's fleet.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import openai
import pytest

from epd_proxy.demo import data_url, picture_png

PICTURE = {"type": "image_url", "image_url": {"url": data_url(picture_png(56, 56))}}
QUESTION = {"type": "text", "text": "What do you see?"}
ANSWER = "I was given 1 image (grid 1x4x4) and the words: What do you see?"


def messages(*parts: Any) -> Any:
    return [{"role": "user", "content": list(parts)}]


@pytest.fixture
def client(demo_url: str) -> Iterable[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_it_lists_the_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["epd-demo"]


def test_it_gets_an_answer_about_a_picture(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="epd-demo", messages=messages(PICTURE, QUESTION))
    assert (answer.choices[0].message.content or "").startswith(ANSWER)
    assert answer.choices[0].finish_reason == "stop"


def test_it_gets_an_answer_to_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="epd-demo", messages=messages(QUESTION))
    assert "What do you see?" in (answer.choices[0].message.content or "")


def test_it_streams_an_answer_about_a_picture(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="epd-demo",
        messages=messages(PICTURE, QUESTION),
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text.startswith(ANSWER)
    assert chunks[-1].usage is not None
    assert sum(bool(chunk.choices) for chunk in chunks) > 3


async def test_the_async_client_streams_and_waits(demo_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{demo_url}/v1", api_key="none") as client:
        whole = await client.chat.completions.create(
            model="epd-demo", messages=messages(PICTURE, QUESTION)
        )
        stream = await client.chat.completions.create(
            model="epd-demo", messages=messages(PICTURE, QUESTION), stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content
    assert text.startswith(ANSWER)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engines_refusal_is_the_clients_exception(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(
            model="no-such-model", messages=messages(PICTURE, QUESTION), stream=stream
        )


@pytest.mark.parametrize("stream", [False, True])
def test_our_own_refusal_is_the_clients_exception(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="epd-demo",
            messages=messages({"type": "image_url", "image_url": {"url": ""}}),
            stream=stream,
        )
    assert caught.value.param == "messages[0].content[0]"
    assert caught.value.type == "invalid_request_error"
