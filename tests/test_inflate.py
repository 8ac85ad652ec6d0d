from __future__ import annotations

import gzip
import json
import random
import tracemalloc
import zlib
from collections.abc import Callable, Iterable

import pytest

from epd_proxy.errors import BodyTooLarge, RequestError, UnsupportedEncoding
from epd_proxy.inflate import Inflater

BODY = json.dumps({"messages": [{"role": "user", "content": "x" * n} for n in range(400)]}).encode()
NOISE = random.Random(5).randbytes(300_000)
LIMIT = 1 << 20


def raw_deflate(plain: bytes) -> bytes:
    deflater = zlib.compressobj(wbits=-15)
    return deflater.compress(plain) + deflater.flush()


def unchanged(plain: bytes) -> bytes:
    return plain


Coder = Callable[[bytes], bytes]
CODERS: list[tuple[str, Coder]] = [
    ("", unchanged),
    ("identity", unchanged),
    ("gzip", gzip.compress),
    ("x-gzip", gzip.compress),
    ("GZip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
    ("gzip, deflate", lambda plain: zlib.compress(gzip.compress(plain))),
    ("deflate,gzip", lambda plain: gzip.compress(raw_deflate(plain))),
    (" identity ,gzip,, ", gzip.compress),
    ("gzip, gzip, gzip", lambda plain: gzip.compress(gzip.compress(gzip.compress(plain)))),
]


def inflated(encoding: str, chunks: Iterable[bytes], limit: int = LIMIT) -> bytes:
    inflater = Inflater(encoding, limit)
    plain = [inflater.feed(chunk) for chunk in chunks]
    inflater.finish()
    return b"".join(plain)


def in_chunks(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 20])
@pytest.mark.parametrize(("encoding", "coder"), CODERS)
def test_a_body_comes_out_as_it_was_whatever_its_chunks(
    encoding: str, coder: Coder, size: int
) -> None:
    assert inflated(encoding, in_chunks(coder(BODY), size)) == BODY


@pytest.mark.parametrize("plain", [b"", b"{}", NOISE, bytes(LIMIT), b"ab" * 131_072])
@pytest.mark.parametrize(("encoding", "coder"), CODERS)
def test_any_plain_body_within_the_limit_comes_out_whole(
    encoding: str, coder: Coder, plain: bytes
) -> None:
    assert inflated(encoding, [coder(plain), b""]) == plain


@pytest.mark.parametrize("level", range(10))
@pytest.mark.parametrize("wbits", [-15, -9, 9, 15])
def test_every_level_and_window_of_deflate_is_told_apart(level: int, wbits: int) -> None:
    deflater = zlib.compressobj(level, wbits=wbits)
    assert inflated("deflate", [deflater.compress(BODY) + deflater.flush()]) == BODY


@pytest.mark.parametrize("size", [1, 5, 1 << 20])
def test_gzip_may_have_many_members(size: int) -> None:
    members = [BODY, b"", b"tail", *[b"m"] * 200]
    data = b"".join(map(gzip.compress, members))
    assert inflated("gzip", in_chunks(data, size)) == b"".join(members)


def test_what_can_be_known_comes_out_at_once() -> None:
    deflater = zlib.compressobj(wbits=31)
    inflater = Inflater("gzip", LIMIT)
    first = deflater.compress(b"first") + deflater.flush(zlib.Z_SYNC_FLUSH)
    assert inflater.feed(first) == b"first"


def test_nothing_is_kept_back_where_a_piece_is_just_full_and_the_chunk_at_its_end() -> None:
    data = zlib.compress(bytes(LIMIT))
    # A byte of it stands for a kilobyte, so the first piece is full around here.
    for end in range(240, 280):
        inflater = Inflater("deflate", LIMIT)
        assert inflater.feed(data[:end]) == zlib.decompressobj().decompress(data[:end])


@pytest.mark.parametrize(
    "encoding",
    [
        "br",
        "zstd",
        "compress",
        "gzip, br",
        "gzip gzip",
        "gzip;q=1",
        "*",
        "\xff",
        ", ".join(["gzip"] * 4),
    ],
)
def test_any_other_coding_is_a_415_that_says_what_is_accepted(encoding: str) -> None:
    with pytest.raises(UnsupportedEncoding) as caught:
        Inflater(encoding, LIMIT)
    headers, body = caught.value.answer("r1")
    assert dict(headers)[b"accept-encoding"] == b"gzip, deflate"
    error = json.loads(body)["error"]
    assert (error["code"], error["type"]) == (415, "invalid_request_error")


@pytest.mark.parametrize("limit", [1, 2, len(BODY) - 1, len(BODY)])
@pytest.mark.parametrize(("encoding", "coder"), CODERS)
def test_the_limit_is_exact(encoding: str, coder: Coder, limit: int) -> None:
    plain = BODY[:limit]
    # What is compressed may be larger than what is plain, and counts as well.
    if len(coder(plain)) <= limit:
        assert inflated(encoding, [coder(plain)], limit) == plain
    with pytest.raises(BodyTooLarge, match=f"larger than {limit} bytes"):
        inflated(encoding, [coder(BODY + b"!")], limit)


def test_one_byte_too_many_is_found_where_the_input_ends_before_it() -> None:
    deflater = zlib.compressobj(wbits=31)
    inflater = Inflater("gzip", 1000)
    assert inflater.feed(deflater.compress(bytes(1000)) + deflater.flush(zlib.Z_SYNC_FLUSH))
    with pytest.raises(BodyTooLarge):
        inflater.feed(deflater.compress(b"\0") + deflater.flush())


def bomb(codings: int) -> bytes:
    """A thousand mebibytes of zeros, the checksum wrong: nobody is to come that far."""
    deflater = zlib.compressobj(9, wbits=31)
    head = deflater.compress(bytes(1 << 20)) + deflater.flush(zlib.Z_FULL_FLUSH)
    again = deflater.compress(bytes(1 << 20)) + deflater.flush(zlib.Z_FULL_FLUSH)
    data = head + again * 999 + deflater.flush()
    for _ in range(codings - 1):
        data = gzip.compress(data)
    return data


@pytest.mark.parametrize("codings", [1, 2, 3])
def test_a_bomb_is_stopped_at_the_limit_in_time_and_memory(codings: int) -> None:
    data = bomb(codings)
    limit = 4 << 20
    inflater = Inflater(", ".join(["gzip"] * codings), limit)
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLarge):
            inflater.feed(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit * 1.25


def test_a_coding_between_two_others_is_bounded_as_well() -> None:
    # Stored blocks of nothing: endless data that inflates to nothing.
    nothing = b"\x00\x00\x00\xff\xff" * 400_000
    with pytest.raises(BodyTooLarge):
        inflated("deflate, gzip", [gzip.compress(nothing)])


def test_members_of_nothing_are_not_counted_for_ever() -> None:
    with pytest.raises(RequestError, match="more than 10000 members"):
        inflated("gzip", [gzip.compress(b"", 1) * 10_001])


@pytest.mark.parametrize(("encoding", "coder"), CODERS[2:])
def test_a_body_that_is_cut_short_is_a_400_wherever_the_cut_is(encoding: str, coder: Coder) -> None:
    data = coder(BODY[:200])
    for end in range(len(data)):
        with pytest.raises(
            RequestError, match=r"ends before its (gzip|deflate) data does"
        ) as caught:
            inflated(encoding, [data[:end]])
        assert caught.value.status == 400


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("garbage", [b"\0", b"x", b"{}", b"\x78\x9c"])
@pytest.mark.parametrize(("encoding", "coder"), CODERS[2:])
def test_what_follows_the_end_is_a_400(
    encoding: str, coder: Coder, garbage: bytes, apart: bool
) -> None:
    data = coder(BODY)
    chunks = [data, garbage] if apart else [data + garbage]
    with pytest.raises(RequestError, match=r"goes on after the end of its (gzip|deflate) data"):
        inflated(encoding, chunks)


def spoilt(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gzip", b"{}"),
        ("gzip", zlib.compress(BODY)),
        ("gzip", spoilt(gzip.compress(BODY), -6)),
        ("gzip", spoilt(gzip.compress(BODY), 12)),
        ("gzip", gzip.compress(BODY) + b"\x1f\x8c"),
        ("deflate", b'{"messages": []}'),
        ("deflate", gzip.compress(BODY)),
        ("deflate", spoilt(zlib.compress(BODY), -2)),
        ("deflate", zlib.compress(BODY, wbits=15)[:1] + b"\0" + zlib.compress(BODY)[2:]),
        ("gzip, deflate", zlib.compress(BODY)),
    ],
)
def test_corrupt_data_is_a_400_that_says_so(encoding: str, data: bytes) -> None:
    with pytest.raises(RequestError, match="request body is corrupt: Error -3") as caught:
        inflated(encoding, [data])
    assert caught.value.status == 400


def test_noise_ends_in_a_400_and_in_nothing_else() -> None:
    rng = random.Random(11)
    endings = {200: 0, 400: 0, 413: 0}
    for _ in range(2000):
        encoding, coder = rng.choice(CODERS[2:])
        data = bytearray(coder(BODY[: rng.randrange(2000)]))
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        chunks = in_chunks(bytes(data), rng.choice([3, 50, 5000]))
        try:
            inflated(encoding, chunks, 1500)
            endings[200] += 1
        except RequestError as exc:
            endings[exc.status] += 1
    assert all(endings.values())
