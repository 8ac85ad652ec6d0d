"""
Everything the proxy raises on purpose, and the HTTP answer each one becomes.

* ConfigError                  the start is refused; names the flag
* ProxyError            500    internal_error
  + RequestError        400    invalid_request_error: the caller sent what we cannot serve
    - BodyTooLarge      413
    - MethodNotAllowed  405
  + Forbidden           403    authentication_error
  + NotFound            404    not_found_error
  + NoInstance          503    overloaded_error: no ready server plays the role
  + EngineRefusal              an engine's own answer, passed on with its status and body
  + UpstreamError       502    upstream_error: a server failed
    - UpstreamTimeout   504    timeout_error

A ProxyError is caught once, in ``EPDProxy.__call__``, and sent as JSON in OpenAI's error shape,
with two keys of our own: ``stage`` (encode, prefill, decode or null) and ``request_id``.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

RawHeaders = list[tuple[bytes, bytes]]


class ConfigError(ValueError):
    """
    A value the proxy cannot start with.

    ``option`` is the flag's name, ``--decode-retries``; in Python and TOML the same name with
    underscores.
    """

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(f"{option}: {reason}")
        self.option = option
        self.reason = reason


class ProxyError(Exception):
    """Base class of what a request can end with. ``param`` is the place in the body."""

    status: int = 500
    type: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, stage: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.stage = stage

    def answer(self, request_id: str) -> tuple[RawHeaders, bytes]:
        """The answer's headers and body."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.status,
            "stage": self.stage,
            "request_id": request_id,
        }
        return [(b"content-type", b"application/json")], msgspec.json.encode({"error": error})

    def log_line(self) -> str:
        """What the operator reads; may name addresses that callers must not see."""
        return self.message


class RequestError(ProxyError):
    status = 400
    type = "invalid_request_error"


class BodyTooLarge(RequestError):
    status = 413


class MethodNotAllowed(RequestError):
    status = 405

    def __init__(self, method: str, allowed: str) -> None:
        super().__init__(f"{method} is not allowed here; allowed: {allowed}")
        self.allowed = allowed

    def answer(self, request_id: str) -> tuple[RawHeaders, bytes]:
        headers, body = super().answer(request_id)
        return [*headers, (b"allow", self.allowed.encode())], body


class Forbidden(ProxyError):
    status = 403
    type = "authentication_error"


class NotFound(ProxyError):
    status = 404
    type = "not_found_error"


class NoInstance(ProxyError):
    status = 503
    type = "overloaded_error"


class EngineRefusal(ProxyError):
    """An engine refused the request; the caller gets its words, not ours."""

    def __init__(self, stage: str, url: str, status: int, headers: RawHeaders, body: bytes) -> None:
        super().__init__(f"the {stage} server refused the request", stage=stage)
        self.url = url
        self.status = status
        self.headers = headers
        self.body = body

    def answer(self, request_id: str) -> tuple[RawHeaders, bytes]:
        return self.headers, self.body

    def log_line(self) -> str:
        return f"{self.message} ({self.url})"


class UpstreamError(ProxyError):
    """
    An engine failed to answer, or answered what no engine should.

    ``url`` is for the log alone: callers are not told where engines live.
    """

    status = 502
    type = "upstream_error"

    def __init__(self, stage: str, url: str, reason: str, *, cause: str = "") -> None:
        super().__init__(f"the {stage} server {reason}", stage=stage)
        self.url = url
        self.cause = cause

    def log_line(self) -> str:
        return f"{self.message} ({self.url}{': ' if self.cause else ''}{self.cause})"


class UpstreamTimeout(UpstreamError):
    status = 504
    type = "timeout_error"
