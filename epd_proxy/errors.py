"""
Everything the proxy raises on purpose, and the HTTP answer each one becomes.

* ConfigError                    the start is refused; names the flag
* ProxyError              500    internal_error
  + RequestError          400    invalid_request_error: the caller sent what we cannot serve
    - BodyTooLarge        413
    - BodyTimeout         408
    - UnsupportedEncoding 415
    - Unprocessable       422
    - MethodNotAllowed    405
  + Unauthorized          401    authentication_error
  + Forbidden             403    authentication_error
  + NotFound              404    not_found_error
    - ModelNotFound       404
  + Conflict              409    invalid_request_error: the fleet cannot be like that
  + Overloaded            503    overloaded_error: we ourselves have no room
  + NoInstance            503    overloaded_error: no ready server plays the role
  + DeadlineExceeded      504    timeout_error: the caller's own limit has passed
  + UpstreamError         502    upstream_error: a server failed
    - Unreachable         502    no connection, so nothing was sent
      . Exhausted         503    overloaded_error: no connection free
    - UpstreamTimeout     504    timeout_error
    - EngineError                a server's own error, passed on with its status

A ProxyError is caught once, in ``EPDProxy.__call__``, and sent as JSON in OpenAI's error shape,
with two keys of our own: ``stage`` (encode, prefill, decode or null) and ``request_id``.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, ClassVar, Protocol

import msgspec

RawHeaders = list[tuple[bytes, bytes]]

_JSON = (b"content-type", b"application/json")
_RETRY_LATER = (b"retry-after", b"1")
_LONGEST_TEXT = 2048


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
    type: str = "internal_error"
    headers: ClassVar[RawHeaders] = []
    """What the answer says besides."""

    def __init__(self, message: str, *, param: str | None = None, stage: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.stage = stage

    def answer(self, request_id: str, *, expose_topology: bool = False) -> tuple[RawHeaders, bytes]:
        """
        The answer's headers and body.

        ``expose_topology``: callers may learn where engines live.
        """
        error = {
            "message": self.exposed() if expose_topology else self.message,
            "type": self.type,
            "param": self.param,
            "code": self.status,
            "stage": self.stage,
            "request_id": request_id,
        }
        return [_JSON, *self.headers], msgspec.json.encode({"error": error})

    def log_line(self) -> str:
        """What the operator reads; may name addresses that callers must not see."""
        return self.message

    def exposed(self) -> str:
        """What callers read who may see addresses."""
        return self.log_line()


class RequestError(ProxyError):
    status = 400
    type = "invalid_request_error"


class BodyTooLarge(RequestError):
    status = 413


class BodyTimeout(RequestError):
    status = 408


class UnsupportedEncoding(RequestError):
    status = 415
    headers: ClassVar[RawHeaders] = [(b"accept-encoding", b"gzip, deflate")]


class MethodNotAllowed(RequestError):
    status = 405

    def __init__(self, method: str, allowed: str) -> None:
        super().__init__(f"{method} is not allowed here; allowed: {allowed}")
        self.allowed = allowed

    def answer(self, request_id: str, *, expose_topology: bool = False) -> tuple[RawHeaders, bytes]:
        headers, body = super().answer(request_id, expose_topology=expose_topology)
        return [*headers, (b"allow", self.allowed.encode())], body


class Unauthorized(ProxyError):
    status = 401
    type = "authentication_error"
    headers: ClassVar[RawHeaders] = [(b"www-authenticate", b"Bearer")]


class Forbidden(ProxyError):
    status = 403
    type = "authentication_error"


class NotFound(ProxyError):
    status = 404
    type = "not_found_error"


class ModelNotFound(NotFound):
    def __init__(self, model: str) -> None:
        super().__init__(f"the model {model!r:.200} does not exist", param="model")


class Conflict(ProxyError):
    status = 409
    type = "invalid_request_error"


class Unprocessable(RequestError):
    status = 422


class Overloaded(ProxyError):
    status = 503
    type = "overloaded_error"
    headers: ClassVar[RawHeaders] = [_RETRY_LATER]


class NoInstance(ProxyError):
    status = 503
    type = "overloaded_error"
    headers: ClassVar[RawHeaders] = [_RETRY_LATER]


class DeadlineExceeded(ProxyError):
    status = 504
    type = "timeout_error"


class Redo(Enum):
    """What may be tried again after a failure, before the caller has got anything."""

    NEVER = "never"
    ELSEWHERE = "elsewhere"
    """By another instance, not by the one that failed."""
    ANYWHERE = "anywhere"
    """By another instance if there is one, else by the same."""


class Engine(Protocol):
    """What an error knows of the instance it came from."""

    @property
    def role(self) -> str: ...

    @property
    def url(self) -> str: ...


class UpstreamError(ProxyError):
    """
    An engine failed to answer, or answered what no engine should.

    Where the engine lives is for the log alone: callers are not told.
    """

    status = 502
    type = "upstream_error"

    def __init__(
        self, engine: Engine, reason: str, *, cause: str = "", redo: Redo = Redo.NEVER
    ) -> None:
        super().__init__(f"the {engine.role} server {reason}", stage=str(engine.role))
        self.engine = engine
        self.cause = cause
        self.redo = redo

    def log_line(self) -> str:
        return f"{self.message} ({self.engine.url}{': ' if self.cause else ''}{self.cause})"


class Unreachable(UpstreamError):
    """Nothing was sent, so the same body may go to another instance."""


class Exhausted(Unreachable):
    status = 503
    type = "overloaded_error"
    headers: ClassVar[RawHeaders] = [_RETRY_LATER]


class UpstreamTimeout(UpstreamError):
    status = 504
    type = "timeout_error"


class EngineError(UpstreamError):
    """
    An engine's own error, for the caller to see.

    ``content`` is its body, or the beginning of one that is too long (``is_whole``). A JSON object
    that has ``error`` reaches the caller as its bytes, anything else as our error with its words.
    """

    def __init__(
        self,
        engine: Engine,
        status: int,
        content: bytes,
        *,
        headers: RawHeaders | None = None,
        is_whole: bool = True,
        redo: Redo = Redo.NEVER,
    ) -> None:
        super().__init__(engine, f"answered with status {status}", redo=redo)
        self.status = status
        self.type = "upstream_error" if status >= 500 else "invalid_request_error"
        self._passed_on = headers or []
        said = _decoded(content) if is_whole else None
        self._verbatim = content if isinstance(said, dict) and "error" in said else None
        self._summary = self.message
        words = _words_of(said) or content[:_LONGEST_TEXT].decode(errors="replace").strip()
        self.message = words or self._summary

    def answer(self, request_id: str, *, expose_topology: bool = False) -> tuple[RawHeaders, bytes]:
        if self._verbatim is not None:
            return [_JSON, *self._passed_on], self._verbatim
        headers, body = super().answer(request_id, expose_topology=expose_topology)
        return [*headers, *self._passed_on], body

    def log_line(self) -> str:
        return f"{self._summary} ({self.engine.url})"

    def exposed(self) -> str:
        return f"{self.message} ({self.engine.url})"


def _decoded(content: bytes) -> Any:
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def _words_of(said: Any) -> str:
    """The message in the flat shape of older engines, or in FastAPI's."""
    if not isinstance(said, dict):
        return ""
    words = said.get("message") or said.get("detail") or ""
    text = words if isinstance(words, str) else msgspec.json.encode(words).decode()
    return text[:_LONGEST_TEXT]
