from __future__ import annotations

import json

import msgspec
import pybase64
import pytest

from epd_proxy import payload as module
from epd_proxy.errors import RequestError
from epd_proxy.payload import (
    Buffer,
    Payload,
    elements_of,
    fields_of,
    is_array,
    is_object,
    is_string,
    size_of,
    to_json,
)

LONG = b"iVBORw0KGgo+/" * 800  # 10400 letters, a multiple of four
URL = b"data:image/png;base64," + LONG


def joined(buffers: list[Buffer]) -> bytes:
    return b"".join(buffers)


def views(buffers: list[Buffer]) -> list[memoryview]:
    return [buffer for buffer in buffers if isinstance(buffer, memoryview)]


@pytest.mark.parametrize(
    "value",
    [
        b"9223372036854775807",
        b"123456789012345678901234567890",
        b"1e5",
        b"1E+5",
        b"0.10",
        b"-0",
        b"1.0",
        rb'"\u00e9\/\ud83d\ude00"',
        '"é🌍\u2028"'.encode(),
        b"[ 1 , 2.50 ]",
        b'{"b": 1, "a": null}',
    ],
)
def test_a_value_that_is_not_replaced_keeps_its_spelling(value: bytes) -> None:
    payload = Payload(b'{"model": "m", "x": %b, "stream": true}' % value)

    changed = joined(payload.with_fields({"stream": False}))

    assert changed == b'{"model":"m","x":%b,"stream":false}' % value


def test_a_body_without_changes_is_sent_as_the_bytes_that_came() -> None:
    body = b'{ "a" : 1 , "a" : 2 }\n'
    payload = Payload(body)

    (sent,) = payload.with_fields({}, frozenset({"absent"}))

    assert sent is body


def test_fields_are_replaced_in_place_added_at_the_end_and_removed() -> None:
    payload = Payload(b'{"a":1,"b":2,"c":3}')

    changed = joined(payload.with_fields({"d": 4, "a": []}, frozenset({"a", "b"})))

    assert changed == b'{"a":[],"c":3,"d":4}'


def test_the_last_of_repeated_keys_counts_in_every_view_of_the_body() -> None:
    payload = Payload(b'{"stream":true,"m":{"x":1,"x":2},"str\\u0065am":false}')

    assert payload.tree == {"stream": False, "m": {"x": 2}}
    assert bytes(payload.fields["stream"]) == b"false"
    assert {name: bytes(v) for name, v in fields_of(payload.fields["m"]).items()} == {"x": b"2"}
    assert joined(payload.with_fields({"m": 0})) == b'{"stream":false,"m":0}'


def test_a_byte_order_mark_is_accepted_and_not_forwarded() -> None:
    assert joined(Payload(b'\xef\xbb\xbf{"a":1}').with_fields({})) == b'{"a":1}'


INVALID = {
    "empty": b"",
    "truncated": b'{"a":',
    "trailing comma": b'{"a":1,}',
    "trailing bytes": b'{"a":1} x',
    "NaN": b'{"a":NaN}',
    "Infinity": b'{"a":-Infinity}',
    "a number no double can hold": b'{"a":1e400}',
    "a lone surrogate": rb'{"a":"\ud800"}',
    "a control character": b'{"a":"\x01"}',
    "a raw line break": b'{"a":"\n"}',
    "invalid UTF-8": b'{"a":"\xff"}',
    "a surrogate in UTF-8": b'{"a":"\xed\xa0\x80"}',
    "invalid UTF-8 in a key": b'{"\xff":1}',
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "nested too deeply": b'{"a":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
}


@pytest.mark.parametrize("body", INVALID.values(), ids=INVALID.keys())
def test_what_is_no_json_is_a_400_with_media_and_without(body: bytes) -> None:
    with pytest.raises(RequestError) as plain:
        Payload(body)
    with pytest.raises(RequestError) as with_media:
        Payload(b'{"media":"%b","rest":%b}' % (URL, body or b","))

    assert plain.value.status == with_media.value.status == 400


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"null", b"7", b'["%b"]' % URL, b'"%b"' % URL])
def test_json_that_is_no_object_is_a_400(body: bytes) -> None:
    with pytest.raises(RequestError, match="must be a JSON object"):
        Payload(body)


def test_the_reason_names_the_position_in_the_callers_body() -> None:
    body = b'{"url":"%b","a":NaN}' % URL

    with pytest.raises(RequestError, match=rf"\(byte {body.index(b'NaN')}\)"):
        Payload(body)


def test_a_fault_below_deep_nesting_is_a_400_at_every_depth() -> None:
    for depth in (*range(900, 1000), 20_000):
        with pytest.raises(RequestError):
            Payload(b'{"a":' + b"[" * depth + b"NaN")


CUT = {
    "a data URL": b'{"url":"%b"}' % URL,
    "a data URL with parameters": b'{"url":"data:a/b;charset=x;base64,%b"}' % LONG,
    "padding": b'{"url":"data:;base64,%bAA=="}' % LONG,
    "a value of data": b'{"data":"%b"}' % LONG,
    "a value of data after blanks": b'{"data" \t:\r\n "%b"}' % LONG,
    "a URL after a short one": b'{"a":";base64,AAAA","b":"%b"}' % URL,
    "data after a key without a string": b'{"x":["data"],"data":{"data":"%b"}}' % LONG,
    "a URL far behind": b'{"a":"%b","b":"%b"}' % (b" text " * 5000, URL),
    "across a window of the search": b'{"a":"%b","data":"%b"}' % (b"." * 4083, LONG),
}


@pytest.mark.parametrize("body", CUT.values(), ids=CUT.keys())
def test_long_base64_is_cut_out_and_put_back_as_views_of_the_body(body: bytes) -> None:
    payload = Payload(body)

    sent = payload.with_fields({"new": 1})

    (cut,) = views(sent)
    assert cut.obj is payload.body is body
    assert LONG in bytes(cut)
    assert LONG not in payload.skeleton
    assert json.loads(joined(sent)) == {**json.loads(body), "new": 1}


def test_a_cut_that_ends_a_piece_leaves_no_empty_buffer() -> None:
    payload = Payload(b'{"data":"%b"}' % LONG)
    (text,) = payload.tree.values()

    assert payload.utf8(text) == [LONG]
    assert payload.text(text) == LONG.decode()
    assert payload.text("plain") == "plain"


UNCUT = {
    "short": b'{"url":"data:;base64,AAAA"}',
    "just too short": b'{"data":"%b"}' % (b"A" * 8188),
    "a line break": rb'{"url":"data:;base64,%b\n%b"}' % (LONG, LONG),
    "an escaped slash": rb'{"url":"data:;base64,%b\/AAA"}' % LONG,
    "the other alphabet": b'{"url":"data:;base64,%b-_AA"}' % LONG,
    "an open end": b'{"data":"%bA"}' % LONG,
    "padding inside": b'{"data":"%bA=AA"}' % LONG,
    "no base64": b'{"data":"%b"}' % (b"hello, world " * 100),
    "upper case": b'{"url":"data:;BASE64,%b"}' % LONG,
    "a key": b'{"x;base64,%b" :1}' % LONG,
    "an escaped key": rb'{"a":"\"data\":\"%b"}' % LONG,
}


@pytest.mark.parametrize("body", UNCUT.values(), ids=UNCUT.keys())
def test_what_is_no_long_base64_is_left_to_msgspec(body: bytes) -> None:
    payload = Payload(body)

    assert payload.skeleton is body
    assert payload.tree == json.loads(body)


@pytest.mark.parametrize("fault", [b"\xff", b"\x01", b"\n", b"\xed\xa0\x80", b"\\x", b"\\ud800"])
def test_a_fault_inside_long_base64_is_a_400(fault: bytes) -> None:
    for at in (0, 2600, len(LONG)):
        run = LONG[:at] + fault + LONG[at:]
        with pytest.raises(RequestError):
            Payload(b'{"url":"data:;base64,%b"}' % run)


def test_a_run_without_an_end_is_a_400() -> None:
    with pytest.raises(RequestError, match="truncated"):
        Payload(b'{"data":"%b' % LONG)


@pytest.mark.parametrize(
    "bomb",
    [
        b'{"a":["' + b";base64," * 20_000 + b'"]}',
        b'{"a":[' + b'";base64,",' * 20_000 + b"1]}",
        b'{"a":[' + b'"data",' * 20_000 + b"1]}",
        b'{"a":[' + b'{"data":""},' * 20_000 + b"1]}",
    ],
    ids=["one string", "many strings", "keys without values", "empty values"],
)
def test_a_body_full_of_openings_is_searched_a_bounded_number_of_times(
    bomb: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[int] = []
    search = module._next_hint

    def counted(body: bytes, position: int) -> int:
        searches.append(position)
        return search(body, position)

    monkeypatch.setattr(module, "_next_hint", counted)

    assert Payload(bomb).tree == json.loads(bomb)
    assert len(searches) <= 1000
    assert searches == sorted(set(searches))


def test_every_letter_of_a_long_run_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    decode = pybase64.b64decode

    def counted(text: memoryview, *, validate: bool) -> bytes:
        seen.append(len(text))
        return decode(text, validate=validate)

    monkeypatch.setattr(pybase64, "b64decode", counted)
    letters = b"A" * (1 << 20)

    assert Payload(b'{"data":"%b"}' % letters).tree
    assert sum(seen) == len(letters)
    assert max(seen) == 1 << 18


def test_many_cuts_return_each_to_its_place() -> None:
    runs = [bytes([letter]) * 8192 for letter in b"ABCDEFGHIJKL"]
    payload = Payload(to_json({"a": [f"data:;base64,{run.decode()}" for run in runs]}))

    last_first = to_json(elements_of(payload.fields["a"])[::-1])

    expected = [f"data:;base64,{run.decode()}" for run in reversed(runs)]
    assert json.loads(joined(payload.expand(last_first))) == expected
    assert len(views(payload.expand(last_first))) == len(runs)


def test_two_payloads_of_equal_media_are_cut_alike() -> None:
    assert Payload(b'{"data":"%b"}' % LONG).tree == Payload(b'{"data":"%b"}' % LONG[::-1]).tree


def test_json_values_are_told_apart_by_their_first_byte() -> None:
    values: list[msgspec.Raw] = elements_of(b' [ {"a":1} , [] , "x" , 1 ] ')

    assert [is_object(value) for value in values] == [True, False, False, False]
    assert [is_array(value) for value in values] == [False, True, False, False]
    assert [is_string(value) for value in values] == [False, False, True, False]
    assert size_of([b"ab", memoryview(b"c"), to_json(1)]) == 4
