"""
When a stream has said something of value, and what becomes of one that dies before it has.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_proxy.guard import Guard, Stillborn
from tests.backends import Backends, ask, decoded, sample, streamed
from tests.driver import Reply, chat

Verdict = str | tuple[int, bytes]
"""``value``, or the status and the error event that a stillborn stream is judged by."""

TEXT = {"type": "text", "text": "hello"}


def data(value: Any) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value)
    return b"data: " + text.encode() + b"\n\n"


def says(finish_reason: Any = None, **delta: Any) -> bytes:
    return data({"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})


def fails(**error: Any) -> bytes:
    return data({"error": {"message": "Internal server error", **error}})


ROLE = says(role="assistant", content="")
CONTENT = says(content="hi")
DONE = data("[DONE]")
USAGE = data({"choices": [], "usage": {"prompt_tokens": 5}})


def verdict(pieces: Iterable[bytes]) -> Verdict:
    guard = Guard()
    try:
        for piece in pieces:
            if guard.feed(piece):
                return "value"
        guard.end()
    except Stillborn as exc:
        return exc.status, exc.content
    return "nothing"


def cut(text: bytes, *places: int) -> list[bytes]:
    ends = [0, *sorted(places), len(text)]
    return [text[start:end] for start, end in pairwise(ends)]


VALUE = {
    "content": says(content="hi"),
    "a blank": says(content=" "),
    "content beside a role": says(role="assistant", content="hi"),
    "reasoning": says(reasoning="hm"),
    "reasoning as older engines name it": says(reasoning_content="hm"),
    "a refusal": says(refusal="no"),
    "a tool call": says(tool_calls=[{"index": 0, "function": {"name": "f"}}]),
    "a proper end": says("stop", content=""),
    "an end by length": says("length"),
    "an end by tool calls": says("tool_calls"),
    "an end by repetition": says("repetition"),
    "the second choice": data(
        {"choices": [{"delta": {}}, {"index": 1, "delta": {"content": "x"}}]}
    ),
    "a choice that says something beside one that is aborted": data(
        {"choices": [{"finish_reason": "abort"}, {"delta": {"content": "x"}}]}
    ),
    "content beside an error that is none": data(
        {"error": None, "choices": [{"delta": {"content": "x"}}]}
    ),
    "no JSON": data("hello"),
    "broken JSON": data('{"choices":'),
    "invalid UTF-8": b'data: {"choices":"\xff"}\n\n',
    "what is nested too deeply": data("[" * 5000),
    "JSON that is no object": data("[1]"),
    "no choices": data({"object": "chat.completion.chunk"}),
    "choices that are no list": data({"choices": {"delta": {}}}),
    "a choice that is no object": data({"choices": [5]}),
    "a delta that is no object": data({"choices": [{"delta": "hi"}]}),
}


@pytest.mark.parametrize("event", VALUE.values(), ids=VALUE.keys())
def test_content_reasoning_a_tool_call_an_end_or_what_cannot_be_read_is_value(event: bytes) -> None:
    assert verdict([event]) == "value"
    assert verdict([ROLE + event]) == "value"
    assert verdict([event + fails(code=500)]) == "value"


NOTHING = {
    "a role": ROLE,
    "a role alone": says(role="assistant"),
    "empty content": says(content=""),
    "nulls": says(content=None, reasoning=None, tool_calls=None),
    "no tool calls": says(tool_calls=[]),
    "no delta": data({"choices": [{"index": 0, "delta": None, "finish_reason": None}]}),
    "usage": USAGE,
    "transfer parameters": data({"choices": [], "kv_transfer_params": None}),
    "a comment": b": keep-alive\n\n",
    "many comments": b":\n\n: data: x\n\n:data: {}\n\n" * 9,
    "fields that are not data": b"event: message\nid: 7\nretry: 5\nfoo\n\n",
    "blank lines": b"\n\n\n",
}


@pytest.mark.parametrize("event", NOTHING.values(), ids=NOTHING.keys())
def test_a_role_usage_comments_and_other_fields_are_waited_through(event: bytes) -> None:
    guard = Guard()
    assert not guard.feed(event)
    assert not guard.feed(event)
    assert guard.feed(CONTENT)


DEATHS: dict[str, tuple[bytes, int]] = {
    "an error of the engine": (fails(code=500), 500),
    "an overload": (fails(code=503), 503),
    "a refusal": (fails(code=400), 400),
    "a code in letters": (fails(code="429"), 429),
    "no code": (fails(), 502),
    "a code that is null": (fails(code=None), 502),
    "a code that is a word": (fails(code="BadRequestError"), 502),
    "a code that is no failure": (fails(code=200), 502),
    "a code that is no status": (fails(code=1234), 502),
    "a code that is true": (fails(code=True), 502),
    "a code that is a fraction": (fails(code=500.5), 502),
    "a code of many digits": (fails(code="9" * 5000), 502),
    "an error that is a string": (data({"error": "down"}), 502),
    "an error beside choices": (
        data({"error": {"code": 500}, "choices": [{"delta": {"content": "x"}}]}),
        500,
    ),
}


@pytest.mark.parametrize(("event", "status"), DEATHS.values(), ids=DEATHS.keys())
@pytest.mark.parametrize("before", [b"", ROLE, b": keep-alive\n\n", ROLE + USAGE])
@pytest.mark.parametrize("after", [b"", DONE, CONTENT])
def test_an_error_before_anything_of_value_is_the_failure_under_its_code(
    event: bytes, status: int, before: bytes, after: bytes
) -> None:
    content = event.removeprefix(b"data: ").strip()
    assert verdict([before + event + after]) == (status, content)


ENDS = {
    "an abort": says("abort"),
    "an abort with empty content": ROLE + says("abort", content=""),
    "the end of the stream": b"",
    "the end after a role": ROLE,
    "the end after usage": ROLE + USAGE,
    "the word that ends it": DONE,
    "the word after a role": ROLE + DONE,
    "the word among blanks": b"data:  [DONE] \n\n",
    "the word without a blank": b"data:[DONE]\n\n",
    "the word and then content": DONE + CONTENT,
    "the end after comments": b": keep-alive\n\n" * 3,
    "an event that is never ended": CONTENT[:-1],
    "a line that is never ended": CONTENT[:-2],
}


@pytest.mark.parametrize("text", ENDS.values(), ids=ENDS.keys())
def test_an_abort_or_the_end_before_anything_of_value_is_a_failure_of_nobodys_words(
    text: bytes,
) -> None:
    assert verdict([text]) == (502, b"")


def test_one_choice_that_is_aborted_fails_all_while_none_has_said_anything() -> None:
    assert verdict([data({"choices": [{"delta": {}}, {"finish_reason": "abort"}]})]) == (502, b"")


ENDINGS = {"LF": b"\n", "CR": b"\r", "CRLF": b"\r\n"}
FRAMED: dict[str, tuple[bytes, Verdict]] = {
    "content": (ROLE + CONTENT, "value"),
    "content with a four-byte character": (says(content="🌍\u2028"), "value"),
    "content between comments": (b": a\n\n" + CONTENT + b": b\n\n", "value"),
    "an error": (ROLE + fails(code=503), (503, fails(code=503)[6:-2])),
    "the word": (ROLE + DONE, (502, b"")),
    "nothing": (ROLE, (502, b"")),
    "content, then an error": (CONTENT + fails(code=500), "value"),
    "an error, then content": (fails(code=500) + CONTENT, (500, fails(code=500)[6:-2])),
    "one event on many lines": (
        b'data: {"choices":\ndata: [{"delta":\ndata:  {"content": "x"}}]}\n\n',
        "value",
    ),
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
@pytest.mark.parametrize(("text", "expected"), FRAMED.values(), ids=FRAMED.keys())
def test_a_stream_is_read_alike_wherever_it_is_cut_and_however_its_lines_end(
    text: bytes, expected: Verdict, ending: bytes
) -> None:
    framed = text.replace(b"\n", ending)
    assert verdict([framed]) == expected
    assert verdict(cut(framed, *range(1, len(framed)))) == expected
    for place in range(1, len(framed)):
        assert verdict(cut(framed, place)) == expected


def test_the_lines_of_one_event_are_put_together_with_line_breaks() -> None:
    text = b'data: {"error":\ndata: {"code": 503}}\n\n'
    assert verdict([text]) == (503, b'{"error":\n{"code": 503}}')


def test_line_breaks_of_other_kinds_do_not_end_a_line() -> None:
    assert verdict([b"data: a\x0b\x0c\x1c\xc2\x85\xe2\x80\xa8\n"]) == (502, b"")
    assert verdict([b": x\x0bdata: y\n\n", DONE]) == (502, b"")


def test_a_byte_order_mark_before_the_first_event_is_no_part_of_it() -> None:
    assert verdict([b"\xef\xbb\xbf" + CONTENT]) == "value"
    assert verdict([b"\xef\xbb\xbf" + fails(code=503)]) == (503, fails(code=503)[6:-2])


PIECES = st.sampled_from(
    [
        *(VALUE[name] for name in ("content", "no JSON", "a proper end", "invalid UTF-8")),
        *(NOTHING[name] for name in ("a role", "usage", "a comment", "blank lines")),
        *(DEATHS[name][0] for name in ("an overload", "no code", "an error that is a string")),
        *(
            ENDS[name]
            for name in ("an abort", "the word that ends it", "a line that is never ended")
        ),
        b"event: x\n",
        b"\n",
        b"dat",
        b"data\n\n",
        b"\xff\xfe",
    ]
)
ENDED = st.sampled_from(list(ENDINGS.values()))


@given(st.lists(st.tuples(PIECES, ENDED), max_size=6), st.lists(st.integers(0, 400), max_size=12))
def test_the_verdict_does_not_depend_on_how_the_bytes_are_cut(
    events: Sequence[tuple[bytes, bytes]], places: Sequence[int]
) -> None:
    text = b"".join(event.replace(b"\n", ending) for event, ending in events)
    places = [min(place, len(text)) for place in places]
    assert verdict(cut(text, *places)) == verdict([text])


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=12))
def test_no_bytes_at_all_are_more_than_a_verdict(noise: bytes, places: Sequence[int]) -> None:
    places = [min(place, len(noise)) for place in places]
    assert verdict(cut(noise, *places)) == verdict([noise])


# In the decode stage


def trickled(*pieces: bytes, **headers: str) -> httpx.Response:
    """A stream in pieces."""

    async def body() -> Any:
        for piece in pieces:
            yield piece

    fields = {"content-type": "text/event-stream; charset=utf-8"}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(200, headers=fields, content=body())


async def answered(*answers: httpx.Response, **options: Any) -> tuple[Backends, Reply]:
    backends = Backends(encode=0)
    backends.decode[0].answers(*answers)
    proxy = backends.proxy(**{"decode_retries": 0, **options})
    return backends, await chat(proxy, ask(TEXT), {"x-request-id": "r1"})


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("decode-stream-error-first.sse", 400),
        ("decode-stream-error-after-role.sse", 500),
        ("decode-stream-aborted.sse", 502),
        ("decode-stream-role-only.sse", 502),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stream_that_dies_before_it_says_anything_is_an_error_of_its_status(
    name: str, status: int, stream: bool
) -> None:
    backends = Backends()
    backends.decode[0].answers(streamed(name))
    reply = await chat(backends.proxy(decode_retries=0), ask(TEXT, stream=stream))
    assert reply.status == status
    assert reply.header("content-type") == "application/json"
    assert reply.json()["error"]["code"] == status
    assert reply.is_whole


async def test_an_error_event_reaches_the_caller_as_its_own_bytes() -> None:
    _, reply = await answered(trickled(ROLE, fails(code=400, type="BadRequestError")))
    assert (reply.status, reply.body) == (400, fails(code=400, type="BadRequestError")[6:-2])


async def test_a_stream_that_is_given_up_says_so_in_our_words() -> None:
    _, reply = await answered(trickled(ROLE, says("abort")))
    assert reply.error["message"] == (
        "the decode server gave up before it said anything: finish_reason abort"
    )
    for pieces in ([ROLE, DONE], [ROLE], []):
        _, reply = await answered(trickled(*pieces))
        assert reply.status == 502
    assert reply.error["message"] == ("the decode server ended its stream before it said anything")
    assert (reply.error["stage"], reply.error["request_id"]) == ("decode", "r1")


@pytest.mark.parametrize("name", ["decode-stream.sse", "decode-stream-keep-alive.sse"])
@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_bytes_that_were_held_are_exactly_decodes(name: str, size: int) -> None:
    text = sample(name)
    pieces = [text[n : n + size] for n in range(0, len(text), size)]
    _, reply = await answered(trickled(*pieces))
    assert reply.body == text
    assert reply.is_whole
    assert reply.chunks[-1] == pieces[-1]


async def test_what_comes_after_the_first_word_is_passed_on_as_it_comes() -> None:
    rest = [says(content=letter) for letter in "abc"]
    _, reply = await answered(trickled(ROLE, USAGE, CONTENT, *rest, fails(code=500), DONE))
    assert reply.status == 200
    assert reply.chunks == [ROLE + USAGE + CONTENT, *rest, fails(code=500), DONE]


@pytest.mark.parametrize(
    ("code", "calls"), [(500, 2), (502, 2), (504, 2), (None, 2), (400, 1), (429, 1), (503, 1)]
)
async def test_a_stillborn_stream_is_redone_where_its_code_allows(
    code: int | None, calls: int
) -> None:
    dead = streamed()
    dead = httpx.Response(200, headers=dead.headers, content=fails(code=code))
    backends, reply = await answered(dead, streamed(), decode_retries=1)
    assert len(backends.decode[0].requests) == calls
    assert reply.status == (200 if calls == 2 else code)


@pytest.mark.parametrize("code", [400, 503])
async def test_an_overloaded_stream_is_redone_elsewhere_and_a_refused_one_nowhere(
    code: int,
) -> None:
    backends = Backends(encode=0, decode=2)
    for engine in backends.decode:
        engine.answers(trickled(fails(code=code)), streamed())
    reply = await chat(backends.proxy(decode_selector=f"{__name__}:First"), ask(TEXT))
    calls = [len(engine.requests) for engine in backends.decode]
    assert calls == ([1, 1] if code == 503 else [1, 0])
    assert reply.status == code


class First:
    def pick(self, ready: Any, key: Any) -> Any:
        return ready[0]


@pytest.mark.parametrize(
    "headers",
    [
        {"content_type": "application/json"},
        {"content_type": "text/plain; x=text/event-stream"},
        {"content_encoding": "gzip"},
    ],
)
async def test_only_an_uncompressed_event_stream_is_held(headers: dict[str, str]) -> None:
    text = ROLE + fails(code=500)
    _, reply = await answered(trickled(text, **headers))
    assert (reply.status, reply.body) == (200, text)


async def test_an_answer_without_a_type_is_not_held() -> None:
    backends = Backends(encode=0)
    backends.decode[0].answers(httpx.Response(200, content=fails(code=500)))
    reply = await chat(backends.proxy(), ask(TEXT))
    assert (reply.status, reply.body) == (200, fails(code=500))


@pytest.mark.parametrize("status", [201, 206])
async def test_only_a_200_is_held(status: int) -> None:
    headers = {"content-type": "text/event-stream"}
    answer = httpx.Response(status, headers=headers, content=fails(code=500))
    _, reply = await answered(answer)
    assert (reply.status, reply.body) == (status, fails(code=500))


async def test_a_type_is_known_in_any_letter_case() -> None:
    _, reply = await answered(trickled(fails(code=500), content_type="Text/Event-Stream"))
    assert reply.status == 500


async def test_the_guard_can_be_switched_off() -> None:
    text = sample("decode-stream-error-first.sse")
    _, reply = await answered(streamed("decode-stream-error-first.sse"), stream_guard=0)
    assert (reply.status, reply.body) == (200, text)


async def test_a_stream_that_says_nothing_for_long_is_slow_and_not_dead() -> None:
    async def slow() -> Any:
        yield ROLE
        await asyncio.sleep(0.05)
        yield fails(code=500)

    headers = {"content-type": "text/event-stream"}
    answer = httpx.Response(200, headers=headers, content=slow())
    _, reply = await answered(answer, stream_guard=0.01)
    assert (reply.status, reply.chunks) == (200, [ROLE, fails(code=500)])
    assert reply.is_whole


async def test_no_more_than_64_kib_are_held() -> None:
    comment = b": " + b"x" * 1021 + b"\n"
    assert len(comment) == 1024
    _, reply = await answered(trickled(*[comment] * 64, fails(code=500)))
    assert reply.status == 500
    _, reply = await answered(trickled(*[comment] * 65, fails(code=500)))
    assert reply.chunks == [comment * 65, fails(code=500)]


async def test_a_connection_that_is_lost_before_anything_of_value_is_an_error_too() -> None:
    async def broken() -> Any:
        yield ROLE
        raise httpx.ReadError("reset")

    headers = {"content-type": "text/event-stream"}
    answer = httpx.Response(200, headers=headers, content=broken())
    backends, reply = await answered(answer, decoded(), decode_retries=1)
    assert (reply.status, len(backends.decode[0].requests)) == (200, 2)
    assert reply.body == decoded().content
