"""
What an engine answers in place of a chat completion.

* EngineError     the front-end refuses the request
  + bad_schema      400   a field is missing or has a wrong type
  + bad_request     400   a field has a value that vLLM names in ``param``
  + bug             500   vLLM should have refused, and stumbles
* Failure           any   put there by a test; its default body is that of a lost request
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.responses import JSONResponse, Response

INTERNAL_ERROR = (
    b'{"error":{"message":"Internal server error","type":"InternalServerError",'
    b'"param":null,"code":500}}'
)


@dataclass(frozen=True)
class Failure:
    """Answered instead of a chat request, at once and byte for byte."""

    status: int
    body: bytes = INTERNAL_ERROR
    content_type: str = "application/json"
    headers: Sequence[tuple[str, str]] = ()

    def response(self) -> Response:
        response = Response(self.body, self.status)
        response.headers["content-type"] = self.content_type
        for name, value in self.headers:
            response.headers.append(name, value)
        return response


class EngineError(Exception):
    """A request that vLLM's front-end does not let through."""

    def __init__(
        self,
        message: str,
        kind: str = "BadRequestError",
        status: int = 400,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = {"message": message, "type": kind, "param": param, "code": status}

    def response(self) -> Response:
        return JSONResponse({"error": self.error}, self.status)


def bad_request(message: str, param: str) -> EngineError:
    return EngineError(f"{message} (parameter={param})", param=param)


def bad_schema(problem: str, location: str) -> EngineError:
    message = f"1 validation error:\n  {{'loc': '{location}', 'msg': '{problem}'}}"
    return EngineError(message, "Bad Request", param=location)


def bug(message: str) -> EngineError:
    return EngineError(message, "InternalServerError", 500)
