"""
Who may enter: ``Keys`` knows the callers, ``Gate`` counts the requests that are inside.
"""

from __future__ import annotations

import asyncio
import collections
import hmac
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from epd_proxy.errors import ConfigError, Overloaded, Unauthorized

_FULL = "the proxy serves as many requests as it may"


class Keys:
    """
    The keys of callers; without any, everybody may enter.

    ``api_key_file`` is a path, empty for none: one key a line, in UTF-8, without blank lines and
    those that start with ``#``; it is read once, here. Raises ConfigError if it cannot be read or
    holds no key, since that would let everybody in.
    """

    def __init__(self, api_key: Sequence[str], api_key_file: str = "") -> None:
        keys = [*api_key, *(_keys_in(api_key_file) if api_key_file else [])]
        if not all(keys):
            raise ConfigError("--api-key", "a key must not be empty")
        self._owners: list[tuple[bytes, str]] = [(_digest(_bytes_of(key)), key) for key in keys]

    def owner(self, authorization: str) -> str | None:
        """
        The key that the header ``authorization`` holds; None where no keys are set.

        ``authorization`` is the field's value in latin-1, empty if there is none. Raises
        Unauthorized (401).
        """
        if not self._owners:
            return None
        scheme, _, given = authorization.encode("latin-1").partition(b" ")
        if scheme.lower() != b"bearer":
            raise Unauthorized("an API key is needed: Authorization: Bearer KEY")
        digest = _digest(given.strip())
        owner: str | None = None
        for known, key in self._owners:
            # No way out before the last, so that the time does not tell which key it was.
            if hmac.compare_digest(digest, known):
                owner = key
        if owner is None:
            raise Unauthorized("the API key is not known")
        return owner


class AdminKey:
    """``X-API-Key`` of those who run the fleet; empty: there are none."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def __bool__(self) -> bool:
        return bool(self._key)

    def matches(self, given: str) -> bool:
        """``given``: the header's value in latin-1. Compared in constant time."""
        return bool(self._key) and hmac.compare_digest(given.encode("latin-1"), self._key)


def _digest(key: bytes) -> bytes:
    """All are of one length: not even the length of a key shows in the time of a comparison."""
    return sha256(key).digest()


def _bytes_of(key: str) -> bytes:
    """As a caller sends it; from the environment it may hold bytes that are not UTF-8."""
    return key.encode(errors="surrogateescape")


def _keys_in(path: str) -> list[str]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as exc:
        raise ConfigError("--api-key-file", str(exc)) from None
    lines = [line.strip() for line in text.split("\n")]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError("--api-key-file", f"{path!r} holds no key")
    return keys


class Turn:
    """A place in the line before a ``Gate``."""

    __slots__ = ("deadline", "future")

    def __init__(self, future: asyncio.Future[None], deadline: float | None) -> None:
        self.future = future
        self.deadline = deadline


class Gate:
    """
    Lets so many requests in at once, and so many others wait in line, first come, first served.

    Parameters:

    * **max_concurrency** - requests inside at most; 0: no limit.
    * **max_queue** - requests in line at most; 0: nobody waits.
    * **queue_timeout** - seconds that each of them waits at most; 0: no limit.

    A place that becomes free goes straight to the first in line and stays counted meanwhile, so
    where one is free nobody waits. What ``enter`` returned is given to ``leave`` once, whether its
    turn has come or not. Belongs to one event loop.
    """

    def __init__(
        self, max_concurrency: int = 0, max_queue: int = 0, queue_timeout: float = 0.0
    ) -> None:
        self.inside = 0
        self._max_concurrency = max_concurrency or sys.maxsize
        self._max_queue = max_queue
        self._queue_timeout = queue_timeout
        self._line: collections.deque[asyncio.Future[None]] = collections.deque()

    @property
    def waiting(self) -> int:
        return len(self._line)

    def enter(self) -> Turn | None:
        """
        Enters if there is a free place, else stands in line: then ``wait`` for the turn.

        Raises Overloaded (503) if the line is full.
        """
        if self.inside < self._max_concurrency:
            self.inside += 1
            return None
        if len(self._line) >= self._max_queue:
            raise Overloaded(_FULL)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._line.append(future)
        return Turn(future, loop.time() + self._queue_timeout if self._queue_timeout else None)

    async def wait(self, turn: Turn) -> None:
        """Until it is our turn. Raises Overloaded (503) if that is not in time."""
        try:
            async with asyncio.timeout_at(turn.deadline):
                await turn.future
        except TimeoutError:
            reason = f"none of them ended within {self._queue_timeout:g} s"
            raise Overloaded(f"{_FULL}, and {reason}") from None

    def leave(self, turn: Turn | None = None) -> None:
        if turn is not None and turn.future in self._line:
            self._line.remove(turn.future)
            return
        if turn is not None and turn.future.cancelled():
            # It had given up when it was passed over.
            return
        while self._line:
            future = self._line.popleft()
            if not future.done():
                future.set_result(None)
                return
        self.inside -= 1
