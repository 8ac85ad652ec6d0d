"""
``Inflater``: request bodies that come compressed, inflated as they arrive and never beyond a limit.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from epd_proxy.errors import BodyTooLarge, RequestError, UnsupportedEncoding

_CODINGS = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}
_MAX_CODINGS = 3
# bgzip's members hold 64 KiB each, so this is 640 MiB; a hostile member holds nothing and takes 20
# bytes, but as long as any to set up.
_MAX_MEMBERS = 10_000
# What zlib has not used of its input it hands back as a copy, so it gets little at a time.
_INPUT = 16 << 10
_OUTPUT = 256 << 10


class Inflater:
    """
    Undoes the codings of one request body.

    ``content_encoding`` is the header's value: ``gzip`` (``x-gzip``), ``deflate`` (with zlib's
    wrapping or raw, clients send both) and ``identity``, in the order in which they were applied,
    three at most. ``limit`` bounds the bytes before, between and after them. Raises
    UnsupportedEncoding (415).
    """

    def __init__(self, content_encoding: str, limit: int) -> None:
        self._limit = limit
        self._received = 0
        self._layers = [_Layer(coding, limit) for coding in reversed(_codings(content_encoding))]

    def feed(self, chunk: bytes) -> bytes:
        """
        All that ``chunk`` makes known of the plain body.

        Raises BodyTooLarge (413) before more than the limit is inflated, and RequestError (400)
        for what is corrupt, or goes on after its end. Then the body is lost: feed no more of it.
        """
        self._received += len(chunk)
        if self._received > self._limit:
            raise BodyTooLarge(f"the request body is larger than {self._limit} bytes")
        pieces: Iterable[bytes] = [chunk]
        for layer in self._layers:
            pieces = layer.inflate(pieces)
        return b"".join(pieces)

    def finish(self) -> None:
        """At the end of the body. Raises RequestError (400) if it has been cut short."""
        for layer in self._layers:
            layer.finish()


def _codings(content_encoding: str) -> list[str]:
    words = [word.strip().lower() for word in content_encoding.split(",")]
    words = [word for word in words if word not in ("", "identity")]
    if len(words) > _MAX_CODINGS or not _CODINGS.keys() >= set(words):
        raise UnsupportedEncoding(
            "a request body may be encoded with gzip and deflate,"
            f" {_MAX_CODINGS} times at most, and with nothing else"
        )
    return [_CODINGS[word] for word in words]


class _Layer:
    """
    One coding.

    ``_stream`` is None before the first byte and after the end of a stream. Gzip may have more of
    them, its members, one after the other.
    """

    def __init__(self, coding: str, limit: int) -> None:
        self._coding = coding
        self._limit = limit
        self._size = 0
        self._begun = 0
        self._stream: zlib._Decompress | None = None

    def inflate(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Pieces of at most 256 KiB, none made before it is asked for."""
        for chunk in chunks:
            for start in range(0, len(chunk), _INPUT):
                yield from self._inflate(chunk[start : start + _INPUT])

    def _inflate(self, data: bytes) -> Iterator[bytes]:
        # Where a piece is full, zlib may hold more of it without any input left.
        is_full = False
        while data or is_full:
            stream = self._stream = self._stream or self._begin(data[0])
            # One byte more than may come; and never 0, which to zlib means no limit.
            room = min(_OUTPUT, self._limit - self._size + 1)
            try:
                piece = stream.decompress(data, room)
            except zlib.error as exc:
                raise RequestError(f"the {self._coding} request body is corrupt: {exc}") from None
            self._size += len(piece)
            if self._size > self._limit:
                raise BodyTooLarge(f"the request body is larger than {self._limit} bytes inflated")
            yield piece
            if stream.eof:
                self._stream = None
                data, is_full = stream.unused_data, False
            else:
                data, is_full = stream.unconsumed_tail, len(piece) == room

    def _begin(self, first: int) -> zlib._Decompress:
        """For a stream whose first byte is ``first``."""
        self._begun += 1
        if self._coding == "deflate":
            if self._begun > 1:
                raise self._goes_on()
            # 8 is how zlib's wrapping starts. Raw it would be a stored block with padding that
            # is not zero, which nobody writes.
            return zlib.decompressobj(zlib.MAX_WBITS if first & 15 == 8 else -zlib.MAX_WBITS)
        if self._begun > 1 and first != 0x1F:
            raise self._goes_on()
        if self._begun > _MAX_MEMBERS:
            raise RequestError(f"the gzip request body has more than {_MAX_MEMBERS} members")
        return zlib.decompressobj(16 + zlib.MAX_WBITS)

    def _goes_on(self) -> RequestError:
        return RequestError(f"the request body goes on after the end of its {self._coding} data")

    def finish(self) -> None:
        if self._stream is not None or not self._begun:
            raise RequestError(f"the request body ends before its {self._coding} data does")
