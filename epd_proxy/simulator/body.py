"""
The body of a chat request: its JSON, and all that is checked before its parts are looked at.

The first check that fails is the answer, so their order is part of the behaviour.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.datastructures import Headers

from epd_proxy.simulator.errors import EngineError, bad_request, bad_schema

Json = dict[str, Any]

_SCHEMA: dict[str, type | tuple[type, ...]] = {
    "model": str,
    "cache_salt": str,
    "max_tokens": int,
    "max_completion_tokens": int,
    "min_tokens": int,
    "n": int,
    "stream_options": dict,
    "mm_processor_kwargs": dict,
    "media_io_kwargs": dict,
    "kv_transfer_params": dict,
    "ec_transfer_params": dict,
    "stream": bool,
    "stop": (str, list),
}
_MAX_N = 16384


def load_body(raw: bytes) -> Any:
    """The JSON value of a body, or None where vLLM finds none."""
    try:
        text = raw.decode()
        value = json.loads(text)
        if "\\u" in text:
            # A lone surrogate passes json.loads, and no tokenizer.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


def token_limit(body: Json) -> int | None:
    limit: int | None = body.get("max_completion_tokens")
    return body.get("max_tokens") if limit is None else limit


def choice_count(body: Json) -> int:
    n: int | None = body.get("n")
    return 1 if n is None else n


def check_body(headers: Headers, body: Any, model: str) -> None:
    media_type = headers.get("content-type", "").partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise bad_schema("Input should be a valid dictionary", "body")
    if not isinstance(body, dict):
        raise bad_schema("JSON decode error", "body")
    _check_schema(body)
    _check_messages(body.get("messages"))
    _check_model(body.get("model"), model)
    _check_options(body)
    _check_limits(body)
    for name in ("kv_transfer_params", "ec_transfer_params"):
        _check_integers(body.get(name))
    if not body["messages"]:
        raise EngineError("Cannot apply chat template to an empty conversation.")


def _check_schema(body: Json) -> None:
    for name, kind in _SCHEMA.items():
        if body.get(name) is not None and not isinstance(body[name], kind):
            raise bad_schema("Input has a wrong type", f"body.{name}")


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list):
        raise bad_schema("Field required", "body.messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise bad_schema("Input should be a message with a role", "body.messages")
        if not isinstance(message.get("content"), str | list | None):
            raise bad_schema("Input should be a string or a list", "body.messages")


def _check_model(asked: str | None, model: str) -> None:
    if asked and model not in ("*", asked):
        message = f"The model `{asked}` does not exist. Valid aliases: {model}."
        raise EngineError(message, "NotFoundError", 404, "model")


def _check_options(body: Json) -> None:
    if body.get("stream_options") is not None and not body.get("stream"):
        message = "Stream options can only be defined when `stream=True`."
        raise bad_request(message, "stream_options")
    salt = body.get("cache_salt")
    if salt is not None and (not 1 <= len(salt) <= 128 or set(salt) & set("@/\\\0")):
        raise bad_request("cache_salt must be 1 to 128 plain characters.", "cache_salt")


def _check_limits(body: Json) -> None:
    limit, least, n = token_limit(body), body.get("min_tokens") or 0, choice_count(body)
    if limit is not None and limit < 1:
        raise bad_request(f"max_tokens must be at least 1, got {limit}.", "max_tokens")
    if limit is not None and least > limit:
        message = f"min_tokens must be less than or equal to max_tokens={limit}, got {least}."
        raise EngineError(message)
    if not 1 <= n <= _MAX_N:
        raise bad_request(f"n must be between 1 and {_MAX_N}, got {n}.", "n")
    if n > 1 and body.get("temperature") == 0:
        raise EngineError(f"n must be 1 when using greedy sampling, got {n}.")


def _check_integers(params: Any) -> None:
    # Not by recursion: json.loads may go deeper than Python's own functions.
    rest = [params]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            rest.extend(value.values())
        elif isinstance(value, list):
            rest.extend(value)
        elif isinstance(value, int) and not -(2**63) <= value < 2**64:
            message = "extra_args integers must be between -2**63 and 2**64 - 1."
            raise bad_request(message, "extra_args")
