"""
``Payload`` against ``json`` and msgspec: the same verdict, and the bytes that do not change.
"""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from epd_proxy.chat import Chat
from epd_proxy.config import Config
from epd_proxy.errors import RequestError
from epd_proxy.media import Place
from epd_proxy.payload import Json, Payload, elements_of, fields_of
from tests.backends import Backends, report
from tests.driver import chat

CONFIG = Config(decode="http://d")
LONG = b"iVBORw0KGgo+/" * 800
MEDIA = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,%b"}}' % LONG


def refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"no double can hold {digits}")
    return number


def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Python lets surrogates through that stand for no character; also where a key comes again."""
    json.dumps(pairs, ensure_ascii=False).encode()
    return dict(pairs)


def strict(text: bytes) -> Any:
    """What a parser by the letter of RFC 8259 makes of ``text``; raises ValueError."""
    return json.loads(
        text.decode().removeprefix("\ufeff"),
        parse_constant=refuse,
        parse_float=finite,
        object_pairs_hook=members,
    )


def verdict(text: bytes) -> Any:
    """The object, or None where ``text`` is none."""
    try:
        value = strict(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def parsed(text: bytes) -> Payload | None:
    try:
        return Payload(text)
    except RequestError:
        return None


def by_msgspec(text: bytes) -> Any:
    """The same by msgspec, of the whole body, nothing cut out of it."""
    try:
        value = msgspec.json.decode(text.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.DecodeError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def same(left: Any, right: Any) -> bool:
    """Equal as JSON, so that 1 and true, or 0.0 and -0.0, are not."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


# JSON text in all its spellings

blanks = st.text(" \t\r\n", max_size=2)
escaped = st.sampled_from(
    ["\\n", "\\/", '\\"', "\\\\", "\\u0061", "\\u00e9", "\\ud83c\\udf0d", "\\u2028", "\\u0000"]
)
letters = st.text(st.characters(codec="utf-8", exclude_characters='"\\', min_codepoint=32))
broken = st.sampled_from(["\\ud83c", "\\udf0d", "\\x", "\\u12", "\n", "\x00", "\t"])
base64 = st.sampled_from([LONG.decode(), LONG.decode() + "AA==", "AAAA", LONG.decode() + "A"])
hints = st.sampled_from([";base64,", "data:image/png;base64,", "data", "image_url", "messages"])


def joined(*pieces: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(st.one_of(*pieces), max_size=4).map("".join)


strings = joined(letters, escaped, hints, hints.flatmap(lambda hint: base64.map(hint.__add__))).map(
    '"{}"'.format
)
numbers = st.sampled_from(
    ["0", "-0", "1", "-1.50", "1e5", "1E+05", "0.10", "9223372036854775808", "1" * 40, "1e-400"]
)
scalars = st.one_of(strings, numbers, st.sampled_from(["true", "false", "null"]))


def arrays(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    inner = st.lists(st.tuples(blanks, values, blanks).map("".join), max_size=3)
    return inner.map(lambda found: f"[{','.join(found)}]")


def objects(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    key = st.one_of(strings, st.sampled_from(['"data"', '"a"', '"\\u0061"', '"url"']))
    member = st.tuples(blanks, key, blanks, st.just(":"), blanks, values, blanks).map("".join)
    return st.lists(member, max_size=4).map(lambda found: f"{{{','.join(found)}}}")


values = st.recursive(scalars, lambda inner: arrays(inner) | objects(inner), max_leaves=8)
documents = objects(values).map(str.encode)


@given(documents)
@example(b'{"data":"%b","data" : "%b"}' % (LONG, LONG))
@example(b'{"a;base64,%b":1,"a;base64,%b":2}' % (LONG, LONG))
def test_a_document_is_the_same_value_to_json_and_its_own_bytes_unchanged(body: bytes) -> None:
    payload = Payload(body)
    expected = strict(body)
    (sent,) = payload.with_fields({})
    assert sent is body
    found = {name: json.loads(whole(payload, raw)) for name, raw in payload.fields.items()}
    assert same(found, expected)


def whole(payload: Payload, raw: msgspec.Raw) -> bytes:
    return b"".join(payload.expand(bytes(raw)))


changes = st.dictionaries(
    st.sampled_from(["a", "data", "stream", "kv_transfer_params", "messages"]),
    st.one_of(st.just(None), st.booleans(), st.just({"x": [1, "é"]})),
    max_size=3,
)
names = st.frozensets(st.sampled_from(["a", "data", "stream", "nobody's"]), max_size=2)


@given(documents, changes, names)
def test_what_is_changed_is_the_right_json_and_the_rest_keeps_its_bytes(
    body: bytes, changed: dict[str, Json], without: frozenset[str]
) -> None:
    payload = Payload(body)
    sent = b"".join(payload.with_fields(changed, without))

    given = {name: value for name, value in strict(body).items() if name not in without}
    expected = {**given, **changed}
    assert same(strict(sent), expected)

    before, after = payload.fields, fields_of(sent)
    assert list(after) == [
        name for name in {**before, **changed} if name in changed or name not in without
    ]
    for name in before.keys() - changed.keys() - without:
        assert bytes(after[name]) == whole(payload, before[name])
        assert bytes(after[name]) in body


faults = st.one_of(
    st.binary(min_size=1, max_size=3),
    broken.map(str.encode),
    st.sampled_from(
        [b"NaN", b"-Infinity", b"1e400", b",", b"]", b"}", b'"', b"01", b"1.", b".5", b"+1", b"'"]
    ),
    st.sampled_from([b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xe2\x80"]),
)


@given(documents, faults, st.integers(0, 20_000), st.booleans())
def test_a_fault_anywhere_gets_the_verdict_of_a_strict_parser(
    body: bytes, fault: bytes, at: int, replaces: bool
) -> None:
    at = at % (len(body) + 1)
    body = body[:at] + fault + body[at + replaces * len(fault) :]
    expected, payload = verdict(body), parsed(body)
    assert (payload is None) == (expected is None) == (by_msgspec(body) is None)
    if payload is not None:
        assert same(strict(b"".join(payload.with_fields({"new": 1}))), {**expected, "new": 1})


@given(documents, st.integers(0, 20_000))
def test_a_document_that_is_cut_short_is_refused(body: bytes, at: int) -> None:
    with pytest.raises(RequestError):
        Payload(body[: at % len(body)])


@given(st.binary(max_size=60))
@example(b"\xef\xbb\xbf{}")
@example(b"\xef\xbb\xbf\xef\xbb\xbf{}")
@example("{}".encode("utf-16"))
@example("{}".encode("utf-16-le"))
@example("{}".encode("utf-32"))
@example(b"")
@example(b"[]")
def test_any_bytes_get_the_verdict_of_a_strict_parser(body: bytes) -> None:
    assert (parsed(body) is None) == (verdict(body) is None) == (by_msgspec(body) is None)


@given(documents, faults, st.integers(0, 20_000))
def test_beside_media_the_verdict_is_the_same_as_without(
    body: bytes, fault: bytes, at: int
) -> None:
    at = at % (len(body) + 1)
    for text in (body, body[:at] + fault + body[at:]):
        beside = b'{"messages":[{"content":[%b]}],"x":%b}' % (MEDIA, text)
        alone = b'{"messages":[{"content":[]}],"x":%b}' % text
        plain = verdict(alone)
        assert (parsed(beside) is None) == (parsed(alone) is None) == (plain is None)


# The same through the stages


FAULTS: dict[str, bytes] = {
    "NaN": b"NaN",
    "Infinity": b"-Infinity",
    "a number no double can hold": b"1e400",
    "a negative one": b"-1e400",
    "a leading zero": b"01",
    "a trailing comma": b"[1,]",
    "a lone surrogate": rb'"\ud800"',
    "the other half": rb'"\udc00"',
    "two halves in the wrong order": rb'"\udc00\ud800"',
    "invalid UTF-8": b'"\xff"',
    "a surrogate in UTF-8": b'"\xed\xa0\x80"',
    "an overlong form": b'"\xc0\xaf"',
    "a control character": b'"\x1f"',
    "single quotes": b"'x'",
    "a comment": b"1/**/",
    "nothing": b"",
    "more than one value": b"1 2",
    "nested too deeply": b"[" * 20_000 + b"]" * 20_000,
}
FINE: dict[str, bytes] = {
    "a great integer": b"123456789012345678901234567890",
    "an exponent": b"1e5",
    "a tiny number": b"1e-400",
    "negative zero": b"-0",
    "DEL": b'"\x7f"',
    "a pair": rb'"\ud83c\udf0d"',
    "a line separator": '"\u2028"'.encode(),
    "a key twice": b'{"a":1,"a":2}',
}


@pytest.mark.parametrize("value", FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.parametrize("prefill", [0, 1])
async def test_what_is_no_json_is_a_400_with_media_and_without_and_troubles_nobody(
    value: bytes, prefill: int
) -> None:
    for content in (b"", b'{"image_url":"x"}', MEDIA):
        backends = Backends(prefill=prefill)
        body = b'{"messages":[{"role":"user","content":[%b]}],"x":%b}' % (content, value)
        reply = await chat(backends.proxy(), body)
        assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
        assert [*backends.router.calls] == []


@pytest.mark.parametrize("value", FINE.values(), ids=FINE.keys())
@pytest.mark.parametrize("prefill", [0, 1])
async def test_what_is_json_reaches_every_stage_in_its_own_spelling(
    value: bytes, prefill: int
) -> None:
    grid = {"modality": "image", "item_indices": [0], "metadata": {"image_grid_thw": [1, 4, 4]}}
    for content in (b"", b'{"image_url":"x"}', MEDIA):
        backends = Backends(prefill=prefill)
        backends.encode[0].answers(report({"h": grid}))
        body = (
            b'{"messages":[{"role":"user","content":[%b]}],"x":%b,"mm_processor_kwargs":{"y":%b}}'
            % (content, value, value)
        )
        assert (await chat(backends.proxy(), body)).status == 200
        for engine in (*backends.prefill, *backends.decode):
            fields = fields_of(engine.raw[0])
            assert bytes(fields["x"]) == value
        for sent in backends.encode[0].raw:
            assert bytes(fields_of(sent)["mm_processor_kwargs"]) == b'{"y":%b}' % value


@pytest.mark.parametrize("body", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
async def test_other_encodings_than_utf_8_are_a_400(body: str) -> None:
    text = json.dumps({"messages": []}).encode(body)
    assert (await chat(Backends().proxy(), text)).status == 400


@pytest.mark.parametrize("content", [b'"hi"', b"[%b]" % MEDIA])
async def test_a_byte_order_mark_reaches_no_engine(content: bytes) -> None:
    backends = Backends(encode=0)
    body = b'{"messages":[{"role":"user","content":%b}]}' % content
    assert (await chat(backends.proxy(), b"\xef\xbb\xbf" + body)).status == 200
    assert backends.decode[0].raw == [body]


@pytest.mark.parametrize("stream", [b'"true"', b"1", b"null", b"{}", b"[]", b'"x"'])
async def test_a_stream_that_is_no_boolean_goes_to_decode_as_sent(stream: bytes) -> None:
    backends = Backends(prefill=1)
    body = b'{"messages":[{"content":[{"image_url":"x"}]}],"stream":%b}' % stream
    assert (await chat(backends.proxy(), body)).status == 200
    assert bytes(fields_of(backends.decode[0].raw[0])["stream"]) == stream
    assert backends.encode[0].bodies[0]["stream"] is False
    assert backends.prefill[0].bodies[0]["stream"] is False


async def test_of_a_key_that_stands_twice_every_stage_acts_on_the_last() -> None:
    backends = Backends(prefill=1)
    body = (
        b'{"messages":[{"content":[{"image_url":"first"}]}],"model":"a",'
        b'"messages":[{"content":[{"image_url":"last","image_url":"very last"}]}],"model":"b"}'
    )
    assert (await chat(backends.proxy(), body)).status == 200
    for engine in (backends.encode[0], backends.prefill[0], backends.decode[0]):
        assert b"first" not in engine.raw[0]
        assert b"very last" in engine.raw[0]
        assert engine.bodies[0]["model"] == "b"


others = st.one_of(
    values, st.sampled_from(['{"type":"text","text":"hi"}', '"x"', '{"type":7}', "null"])
)
media = st.sampled_from(
    [MEDIA.decode(), '{"image_url":"x"}', '{"type" : "input_image", "image_url":"\\u0061"}']
)


@given(st.lists(st.tuples(others, media, others), min_size=1, max_size=3), values)
def test_parts_that_are_not_replaced_keep_their_bytes(
    contents: list[tuple[str, str, str]], unknown: str
) -> None:
    messages = ",".join(
        f'{{"role":"user","content":[{before},{part},{after}]}}' for before, part, after in contents
    )
    body = f'{{"seed":1.50,"messages":[{messages}],"unknown":{unknown}}}'.encode()
    try:
        found = Chat(body, CONFIG)
    except RequestError:
        assume(False)
        raise
    places = [Place(index, 1) for index in range(len(contents))]
    sent = b"".join(found.body(found.with_parts({place: {"new": 1} for place in places})))

    fields = fields_of(sent)
    assert bytes(fields["seed"]) == b"1.50"
    assert bytes(fields["unknown"]) == unknown.encode()
    for message, (before, _, after) in zip(elements_of(fields["messages"]), contents, strict=True):
        parts = [bytes(part) for part in elements_of(fields_of(message)["content"])]
        assert parts == [before.encode(), b'{"new":1}', after.encode()]
