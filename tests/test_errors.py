from __future__ import annotations

import json

import pytest

from epd_proxy import errors
from epd_proxy.errors import (
    BodyTooLarge,
    EngineRefusal,
    MethodNotAllowed,
    NoInstance,
    NotFound,
    ProxyError,
    RequestError,
    UpstreamError,
    UpstreamTimeout,
)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ProxyError("x"), 500, "internal_error"),
        (RequestError("x", param="messages"), 400, "invalid_request_error"),
        (BodyTooLarge("x"), 413, "invalid_request_error"),
        (MethodNotAllowed("GET", "POST"), 405, "invalid_request_error"),
        (NotFound("x"), 404, "not_found_error"),
        (NoInstance("x", stage="encode"), 503, "overloaded_error"),
        (UpstreamError("prefill", "http://p", "x"), 502, "upstream_error"),
        (UpstreamTimeout("decode", "http://d", "x"), 504, "timeout_error"),
    ],
)
def test_an_error_has_openais_shape(error: ProxyError, status: int, kind: str) -> None:
    headers, body = error.answer("r1")
    assert (b"content-type", b"application/json") in headers
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


def test_a_wrong_method_is_told_the_right_ones() -> None:
    headers, _ = MethodNotAllowed("PUT", "GET, HEAD").answer("r1")
    assert (b"allow", b"GET, HEAD") in headers


def test_an_engines_refusal_is_its_own_words() -> None:
    headers = [(b"content-type", b"text/html")]
    error = EngineRefusal("encode", "http://e:1", 422, headers, b"<p>no</p>")
    assert error.answer("r1") == (headers, b"<p>no</p>")
    assert error.log_line() == "the encode server refused the request (http://e:1)"


def test_the_address_of_an_engine_is_for_the_log_and_not_for_callers() -> None:
    error = UpstreamError("decode", "http://10.0.0.3:8000", "broke", cause="ReadError reset")
    assert error.log_line() == "the decode server broke (http://10.0.0.3:8000: ReadError reset)"
    assert b"10.0.0.3" not in error.answer("r1")[1]
    assert UpstreamError("decode", "http://d", "broke").log_line().endswith("broke (http://d)")
    assert RequestError("bad").log_line() == "bad"


def test_the_tree_in_the_docstring_names_every_error() -> None:
    assert errors.__doc__ is not None
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert name in errors.__doc__
