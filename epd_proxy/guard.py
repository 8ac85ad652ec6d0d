"""
``Guard``: whether a stream has said anything of value yet, or has died before it did.

An engine answers a stream with 200 before it has done any work, so its first failure comes as an
event: an error, an ``abort``, or the end. While nothing of value has gone before, the caller can
still be told by a status, or the request be done again.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

import msgspec

from epd_proxy.payload import NO_JSON

_END_OF_LINE = re.compile(rb"\r\n|\n|\r")
_UNKNOWN = 502


class Stillborn(Exception):
    """``status``: the error's ``code``, else 502; ``content``: the error event, if any."""

    def __init__(self, reason: str, status: int = _UNKNOWN, content: bytes = b"") -> None:
        super().__init__(reason)
        self.status = status
        self.content = content


class Guard:
    """Reads the beginning of an event stream, however it is cut into pieces."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._data: list[bytes] = []
        self._is_first = True
        self._may_be_half = False

    def feed(self, piece: bytes) -> bool:
        """Whether the stream has said something of value. Raises Stillborn."""
        if self._may_be_half:
            # The line has ended with the first half of this.
            piece = piece.removeprefix(b"\n")
        self._may_be_half = piece.endswith(b"\r")
        self._pieces.append(piece)
        if b"\n" not in piece and b"\r" not in piece:
            return False
        *lines, rest = _END_OF_LINE.split(b"".join(self._pieces))
        self._pieces = [rest]
        return any(self._read(line) for line in lines)

    def end(self) -> NoReturn:
        """The stream has ended before it said anything of value. Raises Stillborn."""
        raise Stillborn("ended its stream before it said anything")

    def _read(self, line: bytes) -> bool:
        if self._is_first:
            self._is_first = False
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            return False
        event, self._data = b"\n".join(self._data), []
        if event.strip() == b"[DONE]":
            self.end()
        return bool(event) and _has_value(event)


def _has_value(event: bytes) -> bool:
    """What cannot be read counts as value: it is for the caller to judge. Raises Stillborn."""
    try:
        chunk = msgspec.json.decode(event)
    except NO_JSON:
        return True
    if not isinstance(chunk, dict):
        return True
    if (error := chunk.get("error")) is not None:
        raise Stillborn("failed before it said anything", _code_of(error), event)
    choices = chunk.get("choices")
    if not isinstance(choices, list) or any(map(_says_something, choices)):
        return True
    if any(choice.get("finish_reason") == "abort" for choice in choices):
        raise Stillborn("gave up before it said anything: finish_reason abort")
    return False


def _says_something(choice: Any) -> bool:
    """Content, reasoning, a tool call, or the reason for a proper end."""
    if not isinstance(choice, dict):
        return True
    delta = choice.get("delta") or {}
    if not isinstance(delta, dict) or any(delta[name] for name in delta if name != "role"):
        return True
    return choice.get("finish_reason") not in (None, "abort")


def _code_of(error: Any) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    try:
        status = int(code) if isinstance(code, int | str) else _UNKNOWN
    except ValueError:
        return _UNKNOWN
    return status if 400 <= status <= 599 else _UNKNOWN
