"""
Prefill, decode, and what they are told of each other.
"""

from __future__ import annotations

import gzip
import json
import re
from typing import Any

import httpx
import pytest

from epd_proxy import Role
from tests.backends import Backends, ask, decoded, image, report, sample, streamed
from tests.driver import CHAT, call, chat

TEXT = {"type": "text", "text": "hello"}


def reported(**handle: Any) -> httpx.Response:
    entry = {"modality": "image", "item_indices": [0], "metadata": {"image_grid_thw": [1, 4, 4]}}
    return report({"any-hash": {**entry, **handle}})


def epd(**counts: int) -> Backends:
    backends = Backends(**{"prefill": 1, **counts})
    for engine in backends.encode:
        engine.answers(reported())
    return backends


def handle(number: int) -> httpx.Response:
    params = {"do_remote_prefill": True, "remote_request_id": f"p-{number}"}
    return httpx.Response(200, json={"kv_transfer_params": params})


async def test_prefill_gets_one_coherent_token_and_decode_the_callers_wishes() -> None:
    backends = epd()
    wishes = {
        "max_tokens": 500,
        "min_tokens": 100,
        "max_completion_tokens": 500,
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 4,
        "temperature": 0.5,
        "request_id": "mine",
    }
    backends.decode[0].answers(streamed())
    await chat(backends.proxy(), ask(image(), TEXT, **wishes))
    (prefill,), (decode,) = backends.prefill[0].bodies, backends.decode[0].bodies
    assert {name: prefill.get(name) for name in wishes} == {
        "max_tokens": 1,
        "min_tokens": None,
        "max_completion_tokens": 1,
        "stream": False,
        "stream_options": None,
        "n": 1,
        "temperature": 0.5,
        "request_id": None,
    }
    assert "request_id" not in prefill
    assert "min_tokens" not in prefill
    assert "stream_options" not in prefill
    assert {name: decode[name] for name in wishes} == wishes
    assert decode["messages"] == prefill["messages"]


async def test_prefill_is_not_given_limits_that_the_caller_did_not_set() -> None:
    backends = epd(encode=0)
    await chat(backends.proxy(), ask(TEXT))
    (prefill,) = backends.prefill[0].bodies
    assert prefill["max_tokens"] == 1
    assert "max_completion_tokens" not in prefill
    assert "n" not in prefill


async def test_embeddings_are_named_to_their_consumer_and_to_nobody_else() -> None:
    backends = epd()
    await chat(backends.proxy(), ask(image()))
    assert backends.prefill[0].bodies[0]["ec_transfer_params"].keys() == {"any-hash"}
    assert "ec_transfer_params" not in backends.decode[0].bodies[0]


async def test_prefills_handle_reaches_decode_verbatim() -> None:
    backends = epd()
    raw = b'{"do_remote_prefill" : true, "x": [1.0, 1e5, 123456789012345678901234567890], "x":null}'
    answer = httpx.Response(200, content=b'{"kv_transfer_params": %b, "z": 0}' % raw)
    backends.prefill[0].answers(answer)
    await chat(backends.proxy(), ask(image()))
    assert b'"kv_transfer_params":' + raw in backends.decode[0].raw[0]


@pytest.mark.parametrize("answer", [{"kv_transfer_params": None}, {"kv_transfer_params": {}}, {}])
async def test_no_handle_and_references_is_a_502_and_decode_is_not_called(answer: Any) -> None:
    backends = epd()
    backends.prefill[0].answers(httpx.Response(200, json=answer))
    reply = await chat(backends.proxy(), ask(image()))
    assert (reply.status, reply.error["stage"]) == (502, "prefill")
    assert "no handle" in reply.error["message"]
    assert backends.decode[0].requests == []


async def test_no_handle_and_nothing_but_what_decode_can_read_itself_is_served() -> None:
    backends = epd()
    backends.encode[0].answers(report(None))
    backends.prefill[0].answers(httpx.Response(200, json={"kv_transfer_params": None}))
    assert (await chat(backends.proxy(), ask(image(), TEXT))).status == 200
    assert (await chat(backends.proxy(), ask(TEXT))).status == 200
    assert all("kv_transfer_params" not in body for body in backends.decode[0].bodies)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>",
        b"[]",
        b'{"kv_transfer_params":',
        b'{"kv_transfer_params":{"x":1e400}}',
        b'{"kv_transfer_params":{"x":"\xff"}}',
        b'{"kv_transfer_params":%b}' % (b'{"x":' * 100_000 + b"1" + b"}" * 100_000),
    ],
)
async def test_a_prefill_answer_that_cannot_be_read_is_a_502(content: bytes) -> None:
    backends = epd(encode=0)
    backends.prefill[0].answers(httpx.Response(200, content=content))
    reply = await chat(backends.proxy(), ask(TEXT))
    assert (reply.status, reply.error["stage"]) == (502, "prefill")


async def test_a_prefill_refusal_reaches_the_caller_and_its_500_is_a_502() -> None:
    backends = epd(encode=0)
    refusal = {"error": {"message": "too long", "code": 400}}
    backends.prefill[0].answers(httpx.Response(400, json=refusal), decoded(500))
    proxy = backends.proxy()
    reply = await chat(proxy, ask(TEXT))
    assert (reply.status, reply.json()) == (400, refusal)
    reply = await chat(proxy, ask(TEXT))
    assert (reply.status, reply.error["stage"]) == (502, "prefill")
    assert backends.decode[0].requests == []


@pytest.mark.parametrize("prefill", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_decodes_answer_is_passed_on_as_it_is(prefill: int, stream: bool) -> None:
    backends = epd(prefill=prefill)
    answer = streamed() if stream else decoded()
    answer.headers["x-engine"] = "d0"
    backends.decode[0].answers(answer)
    reply = await chat(backends.proxy(), ask(image(), TEXT, stream=stream))
    assert reply.status == 200
    assert reply.body == answer.content
    assert reply.header("content-type") == answer.headers["content-type"]
    assert reply.header("x-engine") == "d0"
    assert reply.is_whole


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 501, 502, 503, 504, 529])
async def test_decodes_other_failures_are_passed_on_and_not_repeated(
    status: int, stream: bool
) -> None:
    backends = epd()
    content = b'{"error" : {"message":"no"} }'
    headers = {"retry-after": "3", "x-secret": "1", "content-type": "text/plain"}
    backends.decode[0].answers(httpx.Response(status, content=content, headers=headers))
    reply = await chat(backends.proxy(decode_retries=5), ask(image(), stream=stream))
    assert (reply.status, reply.body) == (status, content)
    assert reply.header("retry-after") == "3"
    assert reply.header("content-type") == "application/json"
    assert reply.header("x-secret") is None
    assert len(backends.decode[0].requests) == 1


@pytest.mark.parametrize("role", ["encode", "prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<h1>no</h1>", "<h1>no</h1>"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b"", "the {} server answered with status 429"),
        (b'{"error":"%b"}' % (b"x" * (64 << 10)), '{{"error":"' + "x" * 2038),
    ],
    ids=["html", "detail", "empty", "over 64 KiB"],
)
async def test_an_error_in_another_shape_is_brought_into_ours(
    role: str, stream: bool, content: bytes, message: str
) -> None:
    backends = epd()
    (engine,) = getattr(backends, role)
    headers = {"retry-after": "3", "content-type": "text/html", "content-length": str(len(content))}
    engine.answers(httpx.Response(429, content=content, headers=headers))
    reply = await chat(backends.proxy(), ask(image(), stream=stream), {"x-request-id": "r1"})
    assert reply.status == 429
    assert reply.error["message"] == message.format(role)
    assert (reply.error["code"], reply.error["stage"]) == (429, role)
    assert reply.error["request_id"] == "r1"
    assert reply.header("content-type") == "application/json"
    assert reply.header("retry-after") == "3"
    assert reply.header("content-length") == str(len(reply.body))
    assert len(engine.requests) == 1


async def test_an_error_that_breaks_off_is_told_as_far_as_it_came() -> None:
    backends = epd()

    async def broken() -> Any:
        yield b'{"error":{"message":"no"'
        raise httpx.ReadError("reset")

    backends.decode[0].answers(httpx.Response(400, content=broken()))
    reply = await chat(backends.proxy(), ask(TEXT))
    assert (reply.status, reply.error["message"]) == (400, '{"error":{"message":"no"')


async def test_a_compressed_error_is_read() -> None:
    async def body() -> Any:
        yield gzip.compress(b'{"error":{"message":"no"}}')

    backends = epd()
    headers = {"content-encoding": "gzip"}
    backends.decode[0].answers(httpx.Response(400, headers=headers, content=body()))
    reply = await chat(backends.proxy(), ask(TEXT))
    assert (reply.status, reply.body) == (400, b'{"error":{"message":"no"}}')
    assert reply.header("content-encoding") is None


@pytest.mark.parametrize("stream", [False, True])
async def test_decodes_500_is_redone_from_the_start_and_nothing_of_it_is_used_again(
    stream: bool,
) -> None:
    backends = epd()
    backends.encode[0].answers(reported(peer_port=1), reported(peer_port=2))
    backends.prefill[0].answers(handle(1), handle(2))
    backends.decode[0].answers(decoded(500), streamed() if stream else decoded())
    reply = await chat(backends.proxy(), ask(image(), stream=stream), {"x-request-id": "r1"})
    assert reply.status == 200
    first, second = backends.decode[0].raw
    assert b"p-1" in first
    assert b"p-1" not in second
    assert b"p-2" in second
    ports = [
        body["ec_transfer_params"]["any-hash"]["peer_port"] for body in backends.prefill[0].bodies
    ]
    assert ports == [1, 2]
    engines = (backends.encode[0], backends.prefill[0], backends.decode[0])
    ids = [request.headers["x-request-id"] for engine in engines for request in engine.requests]
    assert len(set(ids)) == 6
    assert all(re.fullmatch(r"r1:[0pd]:[0-9a-f]{6}", found) for found in ids)


async def test_decodes_failures_are_told_in_the_log(caplog: Any) -> None:
    backends = epd()
    backends.decode[0].answers(decoded(500), decoded(503))
    await chat(backends.proxy(), ask(TEXT), {"x-request-id": "r1"})
    assert [record.getMessage() for record in caplog.records] == [
        "request r1: the decode server answered with status 500 (http://d0:8000),"
        " which is done again",
        "request r1: 503 the decode server answered with status 503 (http://d0:8000)",
    ]


@pytest.mark.parametrize(("retries", "calls"), [(-3, 1), (0, 1), (1, 2), (3, 4)])
async def test_a_500_is_redone_so_often_and_then_passed_on(retries: int, calls: int) -> None:
    backends = epd()
    backends.decode[0].answers(decoded(500))
    reply = await chat(backends.proxy(decode_retries=retries), ask(image()))
    assert (reply.status, reply.body) == (500, decoded(500).content)
    assert [len(engine.requests) for engine in (backends.encode[0], backends.decode[0])] == [
        calls
    ] * 2


async def test_a_retry_goes_to_another_decode_server_where_there_is_one() -> None:
    backends = epd(decode=2)
    for engine in backends.decode:
        engine.answers(decoded(500))
    await chat(backends.proxy(), ask(TEXT))
    assert [len(engine.requests) for engine in backends.decode] == [1, 1]


async def test_text_for_a_fused_decode_server_is_the_bytes_that_came() -> None:
    backends = Backends()
    body = b' {"messages" : [ {"role":"user","content":"\\u4f60"} ],\n "seed":0.10, "x": [] } '
    await chat(backends.proxy(), body)
    assert backends.decode[0].raw == [body]
    assert backends.encode[0].requests == []


async def test_beam_search_goes_to_decode_alone_and_unchanged() -> None:
    backends = epd()
    body = json.dumps(ask(image(), use_beam_search=True), indent=1).encode()
    await chat(backends.proxy(), body)
    assert backends.decode[0].raw == [body]
    assert backends.encode[0].requests == backends.prefill[0].requests == []


async def test_a_callers_own_references_are_not_sent_on_without_a_handle() -> None:
    backends = epd()
    backends.prefill[0].answers(httpx.Response(200, json={}))
    embeds = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 4, 4]}, "uuid": "u"}
    reply = await chat(backends.proxy(trust_embeds=True), ask(embeds))
    assert (reply.status, reply.error["stage"]) == (502, "prefill")


@pytest.mark.parametrize("role", ["encode", "prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "words"),
    [
        (httpx.ConnectError("refused"), 502, "could not be reached"),
        (httpx.ConnectTimeout("5 s"), 502, "could not be reached"),
        (httpx.ReadError("reset"), 502, "broke the connection"),
        (httpx.RemoteProtocolError("closed"), 502, "broke the connection"),
        (httpx.ReadTimeout("late"), 504, "did not answer in time"),
        (httpx.PoolTimeout("full"), 503, "has no connection free"),
    ],
)
async def test_an_engine_that_cannot_be_had_is_an_honest_error_of_its_stage(
    role: str, stream: bool, failure: Exception, status: int, words: str
) -> None:
    backends = epd()
    (engine,) = getattr(backends, role)
    engine.answers(failure)
    proxy = backends.proxy()
    reply = await chat(proxy, ask(image(), stream=stream), {"x-request-id": "r1"})
    assert reply.status == status
    assert reply.header("content-type") == "application/json"
    assert reply.error["message"] == f"the {role} server {words}"
    assert reply.header("retry-after") == ("1" if status == 503 else None)
    assert (reply.error["stage"], reply.error["request_id"]) == (role, "r1")
    assert all(one.load == 0 for each in Role for one in proxy.registry.ready(each))


async def test_a_text_request_needs_no_encoder() -> None:
    backends = epd()
    await chat(backends.proxy(), ask(TEXT))
    assert backends.encode[0].requests == []
    assert len(backends.prefill[0].requests) == len(backends.decode[0].requests) == 1


class Broken(httpx.AsyncByteStream):
    """Two chunks, then a reset."""

    async def __aiter__(self) -> Any:
        yield b"data: one\n\n"
        yield b"data: two\n\n"
        raise httpx.ReadError("reset by peer")


async def test_a_stream_that_breaks_is_broken_for_the_caller_too() -> None:
    backends = epd()
    backends.decode[0].answers(httpx.Response(200, stream=Broken()))
    proxy = backends.proxy()
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(ask(TEXT)).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    with pytest.raises(Exception, match="broke the connection"):
        await proxy(scope, receive, send)
    assert [message.get("body") for message in sent[1:]] == [b"data: one\n\n", b"data: two\n\n"]
    assert sent[-1]["more_body"] is True
    assert proxy.registry.ready(Role.DECODE)[0].load == 0


async def test_each_chunk_is_passed_on_as_it_came() -> None:
    backends = epd()
    pieces = [sample("decode-stream.sse")[n : n + 7] for n in range(0, 2343, 7)]

    async def trickle() -> Any:
        for piece in pieces:
            yield piece

    backends.decode[0].answers(httpx.Response(200, content=trickle()))
    reply = await chat(backends.proxy(), ask(TEXT))
    assert reply.chunks == pieces
    assert reply.is_whole


async def test_the_trace_tells_who_served_what() -> None:
    backends = epd()
    backends.decode[0].answers(httpx.ConnectError("refused"))
    trace: list[Any] = []
    body = json.dumps(ask(image())).encode()
    scope: dict[str, Any] = {"epd_proxy.trace": trace}
    await call(backends.proxy(), "POST", CHAT, body, **scope)
    assert [(step.stage, step.url, step.status) for step in trace] == [
        ("encode", "http://e0:8000", 200),
        ("prefill", "http://p0:8000", 200),
        ("decode", "http://d0:8000", 0),
    ]
    assert all(0 <= step.seconds < 5 for step in trace)


async def test_with_a_shared_store_decode_finds_the_cache_by_content() -> None:
    backends = epd()
    backends.prefill[0].answers(httpx.Response(200, content=b"whatever it says"))
    body = ask(image(), TEXT, stream=False)
    reply = await chat(backends.proxy(kv_connector="shared"), body)
    assert reply.status == 200
    (prefill,), (decode,) = backends.prefill[0].bodies, backends.decode[0].bodies
    assert "kv_transfer_params" not in prefill
    assert prefill["max_tokens"] == 1
    assert prefill["ec_transfer_params"].keys() == {"any-hash"}
    (reference, _), (media, _) = (each["messages"][0]["content"] for each in (prefill, decode))
    assert reference["type"] == "image_embeds"
    assert media == {**image(), "uuid": reference["uuid"]}
    assert decode == {**body, "messages": decode["messages"]}


async def test_with_a_shared_store_text_reaches_decode_as_it_came() -> None:
    backends = epd()
    body = json.dumps(ask(TEXT), indent=1).encode()
    await chat(backends.proxy(kv_connector="shared"), body)
    assert backends.decode[0].raw == [body]


async def test_with_a_shared_store_and_no_rewriting_decode_gets_the_callers_words() -> None:
    backends = epd()
    body = json.dumps(ask(image(), TEXT), indent=1).encode()
    await chat(backends.proxy(kv_connector="shared", no_rewrite=True), body)
    assert backends.decode[0].raw == [body]


@pytest.mark.parametrize(
    ("url", "host"),
    [("http://10.0.0.31:8000", "10.0.0.31"), ("http://[fd00::1]:8000/x", "fd00::1")],
)
async def test_the_handles_host_is_that_of_prefills_url_where_it_is_told(
    url: str, host: str
) -> None:
    backends = epd(encode=0)
    raw = b'{"kv_transfer_params":{"remote_host":"localhost","remote_port":5600,"x":[1.0]}}'
    backends.router.post(url + CHAT).respond(200, content=raw)
    proxy = backends.proxy(prefill=url, kv_remote_host_from_url=True)
    await chat(proxy, ask(TEXT))
    expected = b'{"remote_host":"%b","remote_port":5600,"x":[1.0]}' % host.encode()
    assert b'"kv_transfer_params":' + expected in backends.decode[0].raw[0]


async def test_no_handle_has_no_host_to_replace() -> None:
    backends = epd(encode=0)
    backends.prefill[0].answers(httpx.Response(200, json={"kv_transfer_params": None}))
    assert (await chat(backends.proxy(kv_remote_host_from_url=True), ask(TEXT))).status == 200


async def test_older_encoders_get_the_max_tokens_they_need() -> None:
    backends = epd(prefill=0)
    await chat(backends.proxy(encode_max_tokens=1), ask(image()))
    assert backends.encode[0].bodies[0]["max_tokens"] == 1
