"""
What goes over the wire to an engine, and what of its answer comes back.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import httpx
import pytest

from epd_proxy import Config, EPDProxy, Instance, Role
from epd_proxy.upstream import Buffers, Upstream, default_transport
from tests.backends import Backends, ask, decoded, image, streamed
from tests.driver import call, chat

CALLERS = {
    "authorization": "Bearer k",
    "traceparent": "00-1",
    "x-session-id": "s",
    "x-vllm-priority": "-1",
    "user-agent": "curl/8",
    "accept": "*/*",
    "x-foo": "1",
    "x-bar": "2",
    # The rest is for the proxy alone.
    "x-prefiller-url": "http://10.0.0.1",
    "x-data-parallel-host-port": "10.0.0.1:1",
    "host": "proxy:8000",
    "connection": "keep-alive, X-Bar",
    "content-length": "7",
    "content-type": "application/json; charset=utf-8",
    "content-encoding": "identity",
    "transfer-encoding": "chunked",
    "te": "trailers",
    "trailer": "x",
    "upgrade": "h2c",
    "keep-alive": "5",
    "proxy-authorization": "Basic x",
    "expect": "100-continue",
    "cookie": "a=b",
    "x-data-parallel-rank": "7",
    "x-prefiller-host-port": "10.0.0.1:1",
    "x-encoder-hosts-ports": "10.0.0.1:1",
}
END_TO_END = {
    "authorization",
    "traceparent",
    "x-session-id",
    "x-vllm-priority",
    "user-agent",
    "accept",
    "x-foo",
}


async def test_every_stage_gets_the_callers_end_to_end_headers_and_no_others() -> None:
    backends = Backends(prefill=1)
    await chat(backends.proxy(), ask(image()), {**CALLERS, "accept-encoding": "gzip"})
    for engine in (backends.encode[0], backends.prefill[0], backends.decode[0]):
        (request,) = engine.requests
        own = {"host", "content-type", "content-length", "x-request-id"}
        if engine is backends.decode[0]:
            own |= {"accept-encoding"}
        assert set(request.headers) == END_TO_END | own
        assert {name: request.headers[name] for name in END_TO_END} == {
            name: CALLERS[name] for name in END_TO_END
        }
        assert request.headers["host"] == request.url.netloc.decode()
        assert request.headers["content-type"] == "application/json"
        assert request.headers["content-length"] == str(len(request.content))


ROUTING = {
    "x-data-parallel-rank": "7",
    "x-data-parallel-host-port": "10.0.0.1:1",
    "x-prefiller-host-port": "10.0.0.1:1",
    "x-encoder-hosts-ports": "10.0.0.1:1",
}


async def test_routing_headers_of_trusted_callers_reach_every_stage() -> None:
    backends = Backends(prefill=1)
    await chat(backends.proxy(trust_transfer_params=True), ask(image()), ROUTING)
    for engine in (backends.encode[0], backends.prefill[0], backends.decode[0]):
        headers = engine.requests[0].headers
        assert {name: headers[name] for name in ROUTING} == ROUTING


async def test_the_proxys_own_choice_of_a_replica_is_the_only_one_decode_hears() -> None:
    backends = Backends(encode=0)
    proxy = backends.proxy(trust_transfer_params=True, ec_consumer_dp_size=2)
    for _ in range(2):
        await chat(proxy, ask(image()), ROUTING)
    ranks = [
        request.headers.get_list("x-data-parallel-rank") for request in backends.decode[0].requests
    ]
    assert sorted(ranks) == [["0"], ["1"]]


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({}, "Bearer mine"),
        ({"api_key": ["mine"]}, None),
        ({"upstream_api_key": "ours"}, "Bearer ours"),
        ({"api_key": ["mine"], "upstream_api_key": "ours"}, "Bearer ours"),
    ],
)
async def test_the_callers_key_stops_where_the_proxy_checks_it_or_has_its_own(
    options: dict[str, Any], sent: str | None
) -> None:
    backends = Backends(prefill=1)
    models = backends.router.get("http://d0:8000/v1/models").respond(200)
    proxy = backends.proxy(**options)
    mine = {"authorization": "Bearer mine"}
    assert (await chat(proxy, ask(image()), mine)).status == 200
    assert (await call(proxy, "GET", "/v1/models", headers=mine)).status == 200
    engines = (backends.encode[0], backends.prefill[0], backends.decode[0])
    requests = [engine.requests[0] for engine in engines] + [models.calls[0].request]
    for request in requests:
        assert request.headers.get_list("authorization") == ([] if sent is None else [sent])


async def test_keys_in_a_file_stop_at_the_proxy_too(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("mine")
    backends = Backends(encode=0)
    proxy = backends.proxy(api_key_file=str(tmp_path / "keys"))
    await chat(proxy, ask(image()), {"authorization": "Bearer mine"})
    assert "authorization" not in backends.decode[0].requests[0].headers


async def test_without_a_key_of_the_callers_engines_get_ours() -> None:
    backends = Backends(encode=0)
    await chat(backends.proxy(upstream_api_key="ours"), ask(image()))
    assert backends.decode[0].requests[0].headers["authorization"] == "Bearer ours"


@pytest.mark.parametrize("value", ["a\nx-evil: 1", "a\r\nx-evil: 1", "a\rb", "\n", "\0", "a\0b"])
@pytest.mark.parametrize("name", ["x-a", "accept-encoding", "authorization", "traceparent"])
async def test_a_header_that_ends_where_another_line_begins_is_a_400(name: str, value: str) -> None:
    backends = Backends(prefill=1)
    reply = await chat(backends.proxy(), ask(image()), {name: value})
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert all(
        engine.requests == []
        for engine in (backends.encode[0], backends.prefill[0], backends.decode[0])
    )


@pytest.mark.parametrize("name", ["x-a\n", "x-a: b\r\nx-c", "x\0"])
async def test_a_name_of_a_header_with_a_line_break_is_a_400(name: str) -> None:
    assert (await chat(Backends().proxy(), ask(image()), {name: "1"})).status == 400


async def test_without_accept_encoding_decode_is_asked_for_none() -> None:
    backends = Backends()
    await chat(backends.proxy(), ask(image()))
    assert "accept-encoding" not in backends.decode[0].requests[0].headers


async def test_repeated_headers_stay_repeated_and_hop_by_hop_ones_go() -> None:
    backends = Backends()
    headers = [
        ("Set-Cookie", "a=1"),
        ("set-cookie", "b=2"),
        ("date", "then"),
        ("server", "uvicorn"),
        ("Connection", "close, X-Foo"),
        ("x-foo", "1"),
        ("keep-alive", "5"),
        ("trailer", "x"),
        ("transfer-encoding", "chunked"),
        ("x-request-id", "the engine's"),
    ]
    backends.decode[0].answers(httpx.Response(200, headers=headers, content=b"{}"))
    reply = await chat(backends.proxy(), ask(image()), {"x-request-id": "r1"})
    assert reply.headers == [
        ("set-cookie", "a=1"),
        ("set-cookie", "b=2"),
        ("date", "then"),
        ("server", "uvicorn"),
        ("x-request-id", "r1"),
    ]


async def test_a_length_beside_chunks_is_not_believed() -> None:
    backends = Backends()
    headers = {"content-length": "7", "transfer-encoding": "chunked"}
    backends.decode[0].answers(httpx.Response(200, headers=headers, content=b"{}"))
    reply = await chat(backends.proxy(), ask(image()))
    assert (reply.body, reply.header("content-length")) == (b"{}", None)


@pytest.mark.parametrize("http_version", ["1.0", "1.1"])
@pytest.mark.parametrize("declared", [True, False])
async def test_an_http_1_0_caller_gets_an_unstreamed_answer_with_a_length(
    http_version: str, declared: bool
) -> None:
    backends = Backends(encode=0)
    content = b'{"choices": []}'

    async def pieces() -> Any:
        yield content[:5]
        yield content[5:]

    headers = {"content-type": "application/json"}
    if declared:
        headers["content-length"] = str(len(content))
    backends.decode[0].answers(httpx.Response(200, headers=headers, content=pieces()))
    reply = await chat(backends.proxy(), ask(image()), http_version=http_version)
    assert reply.body == content
    expected = [str(len(content))] if declared or http_version == "1.0" else []
    assert [value for name, value in reply.headers if name == "content-length"] == expected


async def test_an_http_1_0_caller_gets_a_stream_as_it_comes() -> None:
    backends = Backends(encode=0)
    backends.decode[0].answers(streamed())
    reply = await chat(backends.proxy(), ask(image(), stream=True), http_version="1.0")
    assert reply.body == streamed().content


async def test_an_http_1_0_callers_answer_that_breaks_off_is_an_error_of_its_own() -> None:
    async def broken() -> Any:
        yield b"{"
        raise httpx.ReadError("reset")

    backends = Backends(encode=0)
    headers = {"content-type": "application/json"}
    backends.decode[0].answers(httpx.Response(200, headers=headers, content=broken()))
    proxy = backends.proxy(decode_retries=0)
    reply = await chat(proxy, ask(image()), http_version="1.0")
    assert (reply.status, reply.error["stage"]) == (502, "decode")


@pytest.mark.parametrize("exposed", [False, True])
@pytest.mark.parametrize(
    "failure",
    [
        httpx.ConnectError("to 10.0.0.1"),
        httpx.ReadError("reset"),
        httpx.ReadTimeout("late"),
        httpx.Response(302, headers={"location": "http://10.0.0.1"}),
        httpx.Response(400, text="no"),
    ],
)
async def test_addresses_of_engines_are_told_where_the_operator_says_so_alone(
    exposed: bool, failure: Any
) -> None:
    backends = Backends(encode=0)
    backends.decode[0].answers(failure)
    reply = await chat(backends.proxy(expose_topology=exposed, decode_retries=0), ask(image()))
    assert (b"d0:8000" in reply.body) is exposed
    assert reply.header("location") is None
    assert exposed or b"10.0.0.1" not in reply.body


async def test_an_answer_that_came_compressed_stays_compressed() -> None:
    backends = Backends()
    content = gzip.compress(b"{}" * 500)

    async def pieces() -> Any:
        yield content[:9]
        yield content[9:]

    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    backends.decode[0].answers(httpx.Response(200, headers=headers, content=pieces()))
    reply = await chat(backends.proxy(), ask(image()))
    assert reply.body == content
    assert reply.header("content-encoding") == "gzip"


async def test_a_compressed_report_is_read_and_a_broken_one_is_a_502() -> None:
    backends = Backends()

    def compressed(content: bytes) -> httpx.Response:
        async def body() -> Any:
            yield content

        return httpx.Response(200, headers={"content-encoding": "gzip"}, content=body())

    backends.encode[0].answers(
        compressed(gzip.compress(b'{"ec_transfer_params": {"h": {"metadata": {}}}}')),
        compressed(b"no gzip"),
    )
    proxy = backends.proxy()
    assert (await chat(proxy, ask(image()))).status == 200
    assert "h" in backends.decode[0].bodies[0]["ec_transfer_params"]
    reply = await chat(proxy, ask(image()))
    assert (reply.status, reply.error["stage"]) == (502, "encode")
    assert "cannot be read" in reply.error["message"]


@pytest.mark.parametrize(
    ("address", "target", "host"),
    [
        ("http://d:8000", "http://d:8000/v1/chat/completions", "d:8000"),
        ("http://d/pre/fix/", "http://d/pre/fix/v1/chat/completions", "d"),
        ("https://d:443", "https://d/v1/chat/completions", "d"),
        ("http://[::1]:8000/", "http://[::1]:8000/v1/chat/completions", "[::1]:8000"),
        ("http+unix://%2Frun%2Fd", "http+unix://%2frun%2fd/v1/chat/completions", "localhost"),
    ],
)
async def test_an_engine_is_called_below_its_address(address: str, target: str, host: str) -> None:
    backends = Backends(encode=0)
    route = backends.router.post(target).mock(return_value=decoded())
    assert (await chat(backends.proxy(decode=address), ask(image()))).status == 200
    (request,) = (each.request for each in route.calls)
    assert str(request.url) == target
    assert request.headers["host"] == host


async def test_connecting_and_waiting_in_line_have_limits() -> None:
    backends = Backends()
    await chat(backends.proxy(), ask(image()))
    await chat(backends.proxy(connect_timeout=0, pool_timeout=0), ask(image()))
    limits = [request.extensions["timeout"] for request in backends.decode[0].requests]
    rest = {"write": None, "read": None}
    assert limits == [
        {"connect": 5.0, "pool": 5.0, **rest},
        {"connect": None, "pool": None, **rest},
    ]


async def test_other_transports_get_one_limit_for_head_and_body() -> None:
    backends = Backends(prefill=1)
    options = {"encode_timeout": 9, "prefill_timeout": 8, "first_byte_timeout": 7}
    await chat(backends.proxy(**options, idle_timeout=6), ask(image()))
    await chat(backends.proxy(**options, idle_timeout=0), ask(image()))
    engines = (backends.encode[0], backends.prefill[0], backends.decode[0])
    reads = [[one.extensions["timeout"]["read"] for one in engine.requests] for engine in engines]
    assert reads == [[9, 9], [8, 8], [7, None]]


class Looker(httpx.AsyncBaseTransport):
    """Keeps the buffers of the last body."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, Buffers)
        self.buffers = list(request.stream.buffers)
        return decoded()


async def test_a_body_is_sent_in_the_pieces_it_was_cut_into() -> None:
    picture = "data:image/png;base64," + "QUJD" * 4000
    transport = Looker()
    proxy = EPDProxy(config=Config(decode="http://d"), transport=transport)
    await chat(proxy, ask(image(picture), kv_transfer_params={"drop": "me"}))
    assert [type(buffer) for buffer in transport.buffers] == [bytes, memoryview, bytes]
    assert bytes(transport.buffers[1]) == b"QUJD" * 4000


async def test_cookies_of_engines_are_not_kept() -> None:
    backends = Backends()
    backends.decode[0].answers(httpx.Response(200, headers={"set-cookie": "a=1"}))
    proxy = backends.proxy()
    await chat(proxy, ask(image()))
    await chat(proxy, ask(image()))
    assert "cookie" not in backends.decode[0].requests[1].headers


async def test_a_redirect_is_not_followed() -> None:
    backends = Backends()
    headers = {"location": "http://elsewhere/"}
    backends.decode[0].answers(httpx.Response(307, headers=headers))
    backends.router.get("http://d0:8000/v1/models").mock(httpx.Response(302, headers=headers))
    proxy = backends.proxy()
    reply = await chat(proxy, ask(image()))
    assert (reply.status, reply.error["stage"]) == (502, "decode")
    assert "status 307" in reply.error["message"]
    assert reply.header("location") is None
    assert len(backends.decode[0].requests) == 1
    reply = await call(proxy, "GET", "/v1/models")
    assert (reply.status, reply.header("location")) == (502, None)


async def test_the_default_transport_reaches_nobody_where_nobody_listens() -> None:
    config = Config(decode="http://d")
    upstream = Upstream(default_transport(config), config)
    with pytest.raises(Exception, match="could not be reached") as caught:
        await upstream.get(Instance(Role.DECODE, "http://127.0.0.1:1"), "/health", [])
    await upstream.aclose()
    assert "127.0.0.1:1" in caught.value.log_line()  # type: ignore[attr-defined]
