"""
What an engine remembers from one request to the next: the newest, and not without end.
"""

from __future__ import annotations

from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")

_REMEMBERED = 4096


class Memory(dict[_K, _V]):
    """A dict that forgets its oldest entry when it is full."""

    def __setitem__(self, key: _K, value: _V) -> None:
        super().__setitem__(key, value)
        if len(self) > _REMEMBERED:
            del self[next(iter(self))]
