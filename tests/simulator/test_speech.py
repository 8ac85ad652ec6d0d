from __future__ import annotations

from typing import Any

import pytest

from epd_proxy.simulator import Simulator
from tests.simulator.bodies import BLUE, Json, ask, chat, text, url_part


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
