from __future__ import annotations

import json
from typing import Any

import pytest

from epd_proxy import Instance, Role, errors
from epd_proxy.errors import (
    BodyTimeout,
    BodyTooLarge,
    DeadlineExceeded,
    EngineError,
    Exhausted,
    Forbidden,
    MethodNotAllowed,
    NoInstance,
    NotFound,
    Overloaded,
    ProxyError,
    RequestError,
    Unauthorized,
    Unreachable,
    UnsupportedEncoding,
    UpstreamError,
    UpstreamTimeout,
)

D = Instance(Role.DECODE, "http://10.0.0.3:8000")
JSON = (b"content-type", b"application/json")


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ProxyError("x"), 500, "internal_error"),
        (RequestError("x", param="messages"), 400, "invalid_request_error"),
        (BodyTooLarge("x"), 413, "invalid_request_error"),
        (BodyTimeout("x"), 408, "invalid_request_error"),
        (UnsupportedEncoding("x"), 415, "invalid_request_error"),
        (MethodNotAllowed("GET", "POST"), 405, "invalid_request_error"),
        (Unauthorized("x"), 401, "authentication_error"),
        (Forbidden("x"), 403, "authentication_error"),
        (NotFound("x"), 404, "not_found_error"),
        (Overloaded("x"), 503, "overloaded_error"),
        (NoInstance("x", stage="encode"), 503, "overloaded_error"),
        (DeadlineExceeded("x", stage="decode"), 504, "timeout_error"),
        (UpstreamError(D, "x"), 502, "upstream_error"),
        (Unreachable(D, "x"), 502, "upstream_error"),
        (Exhausted(D, "x"), 503, "overloaded_error"),
        (UpstreamTimeout(D, "x"), 504, "timeout_error"),
        (EngineError(D, 503, b""), 503, "upstream_error"),
        (EngineError(D, 422, b""), 422, "invalid_request_error"),
    ],
)
def test_an_error_has_openais_shape(error: ProxyError, status: int, kind: str) -> None:
    headers, body = error.answer("r1")
    assert JSON in headers
    assert json.loads(body) == {
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.param,
            "code": status,
            "stage": error.stage,
            "request_id": "r1",
        }
    }
    assert error.status == status


@pytest.mark.parametrize(
    ("error", "header"),
    [
        (MethodNotAllowed("PUT", "GET, HEAD"), (b"allow", b"GET, HEAD")),
        (Unauthorized("x"), (b"www-authenticate", b"Bearer")),
        (UnsupportedEncoding("x"), (b"accept-encoding", b"gzip, deflate")),
        (Overloaded("x"), (b"retry-after", b"1")),
        (NoInstance("x"), (b"retry-after", b"1")),
        (Exhausted(D, "x"), (b"retry-after", b"1")),
    ],
)
def test_an_error_tells_the_caller_what_would_help(
    error: ProxyError, header: tuple[bytes, bytes]
) -> None:
    assert error.answer("r1")[0] == [JSON, header]


def test_a_failed_engine_says_its_stage() -> None:
    assert UpstreamError(D, "broke").stage == "decode"
    assert type(UpstreamError(D, "broke").stage) is str


@pytest.mark.parametrize(
    "content",
    [
        b'{"error":{"message":"no","code":422}}',
        b' { "error" : "Unauthorized" , "x" : 1.0 } ',
        b'{"error":null}',
        '{"error":{"message":"é\u2028"}}'.encode(),
    ],
)
def test_an_engines_json_that_has_an_error_is_its_own_bytes(content: bytes) -> None:
    passed_on = [(b"retry-after", b"7")]
    error = EngineError(D, 429, content, headers=passed_on)
    assert error.answer("r1") == ([JSON, *passed_on], content)
    assert error.answer("r1", expose_topology=True)[1] == content


WORDS: list[tuple[bytes, str]] = [
    (b'{"object":"error","message":"too long","type":"x"}', "too long"),
    (b'{"detail":"Not Found"}', "Not Found"),
    (b'{"message":"","detail":"second"}', "second"),
    (b'{"detail":[{"loc":["body"],"msg":"bad"}]}', '[{"loc":["body"],"msg":"bad"}]'),
    (b"Internal Server Error\n", "Internal Server Error"),
    (b"<html><h1>Bad Gateway</h1></html>", "<html><h1>Bad Gateway</h1></html>"),
    (b"\xffno", "\ufffdno"),
    (b'["error"]', '["error"]'),
    (b'"error"', '"error"'),
    (b'{"error":', '{"error":'),
    (b"[" * 5000, "[" * 2048),
    (b"{}", "{}"),
    (b"", "the decode server answered with status 418"),
    (b" \r\n", "the decode server answered with status 418"),
    (b"x" * 2047 + "é".encode(), "x" * 2047 + "\ufffd"),
    (b'{"message":"%b"}' % (b"y" * 5000), "y" * 2048),
    (b'a"b\nc\x00', 'a"b\nc\x00'),
]


@pytest.mark.parametrize(("content", "words"), WORDS, ids=range(len(WORDS)))
def test_any_other_error_of_an_engine_is_wrapped_with_its_words(content: bytes, words: str) -> None:
    headers, body = EngineError(D, 418, content, headers=[(b"retry-after", b"7")]).answer("r1")
    assert headers == [JSON, (b"retry-after", b"7")]
    error = json.loads(body)["error"]
    assert error["message"] == words
    assert (error["code"], error["stage"], error["request_id"]) == (418, "decode", "r1")


def test_an_error_that_is_not_all_there_is_wrapped_though_it_began_as_json() -> None:
    content = b'{"error":{"message":"x"}}'
    _, body = EngineError(D, 500, content, is_whole=False).answer("r1")
    assert json.loads(body)["error"]["message"] == content.decode()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UpstreamError(D, "broke", cause="ReadError reset"), "broke ({0}: ReadError reset)"),
        (UpstreamError(D, "broke"), "broke ({0})"),
        (EngineError(D, 422, b"<p>no</p>"), "answered with status 422 ({0})"),
    ],
)
def test_the_address_of_an_engine_is_for_the_log_and_not_for_callers(
    error: UpstreamError, line: str
) -> None:
    assert error.log_line() == "the decode server " + line.format("http://10.0.0.3:8000")
    assert b"10.0.0.3" not in error.answer("r1")[1]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UpstreamError(D, "broke", cause="reset"), "the decode server broke ({0}: reset)"),
        (EngineError(D, 422, b"<p>no</p>"), "<p>no</p> ({0})"),
        (RequestError("bad"), "bad"),
    ],
)
def test_callers_may_be_told_addresses_where_the_operator_says_so(
    error: ProxyError, message: str
) -> None:
    _, body = error.answer("r1", expose_topology=True)
    assert json.loads(body)["error"]["message"] == message.format("http://10.0.0.3:8000")


def test_what_is_no_engines_fault_is_logged_as_it_is() -> None:
    assert RequestError("bad").log_line() == "bad"


def test_the_tree_in_the_docstring_names_every_error() -> None:
    assert errors.__doc__ is not None
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert name in errors.__doc__


def test_the_tree_in_the_docstring_is_the_real_one() -> None:
    assert errors.__doc__ is not None
    above: list[Any] = []
    for line in errors.__doc__.splitlines():
        words = line.split()
        if not words or words[0] not in ("*", "+", "-", "."):
            continue
        depth = len(line) - len(line.lstrip())
        above[depth // 2 :] = [getattr(errors, words[1])]
        if depth:
            assert above[-1].__bases__ == (above[-2],)
