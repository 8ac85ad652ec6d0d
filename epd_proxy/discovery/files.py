"""
A file that declares instances, read again when it changes.

The file is looked at, not subscribed to: that sees a ConfigMap's ``..data`` symlink being swapped,
files on a network, and editors that write beside and rename.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from epd_proxy.discovery.sources import Source, Tell
from epd_proxy.registry import Spec


class _Version(NamedTuple):
    """Differs when the file may hold something else."""

    path: str
    inode: int
    size: int
    modified: int


class FileSource(Source):
    """
    ``read`` gives the instances in the file, or raises ValueError or OSError with the reason.

    A bad file is refused, its reason logged once, and what the file said before stays. A change
    is read when the file has been still for ``settle`` seconds, so that a half-written one is not.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[Path], Sequence[Spec]],
        tell: Tell,
        *,
        interval: float = 1.0,
        settle: float = 0.2,
    ) -> None:
        super().__init__(f"file {path}", tell)
        self._path = path
        self._read = read
        self._interval = interval
        self._settle = settle
        self._version: _Version | None = None
        self._specs: Sequence[Spec] | None = None

    async def start(self) -> None:
        self.reload()
        self._repeat(self._look)

    def reload(self) -> None:
        """Reads the file now, changed or not; what is wrong with it is logged again."""
        self._load(self._seen())

    async def _look(self) -> None:
        await asyncio.sleep(self._interval)
        seen = self._seen()
        while seen != self._version:
            await asyncio.sleep(self._settle)
            before, seen = seen, self._seen()
            if seen == before:
                self._load(seen)
        if self._specs is not None:
            self._say(self._specs)

    def _load(self, seen: _Version | None) -> None:
        self._version = seen
        try:
            self._specs = self._read(self._path)
        except (OSError, ValueError) as exc:
            # What the registry refused before is no longer wanted either.
            self._specs = None
            # Another version may be wrong for the same reason: that is news.
            self._reasons.pop("file", None)
            self._note("file", f"cannot be used: {exc}")
        else:
            self._note("file", "")
            self._say(self._specs)

    def _seen(self) -> _Version | None:
        """None where there is no file."""
        try:
            path = os.path.realpath(self._path)
            found = os.stat(path)
        except OSError:
            return None
        return _Version(path, found.st_ino, found.st_size, found.st_mtime_ns)
