from __future__ import annotations

import hashlib
import hmac
import json
import threading
import time
from typing import Any

import pytest

from epd_proxy import Config
from epd_proxy import media as module
from epd_proxy.errors import RequestError
from epd_proxy.media import (
    Item,
    Messages,
    Naming,
    Part,
    Place,
    check_sources,
    find_parts,
    items_of,
)
from epd_proxy.payload import Payload, to_json
from tests.backends import Backends, ask, image
from tests.driver import chat

PNG = "data:image/png;base64,iVBORw0KGgo="
WAV = {"data": "UklGRjQAAABXQVZF", "format": "wav"}


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def body_of(*parts: Any) -> bytes:
    return json.dumps(ask(*parts)).encode()


def parts_of(*parts: Any) -> list[Part]:
    return find_parts(Payload(body_of(*parts)))


async def items_in(body: bytes) -> tuple[Payload, list[Item]]:
    payload = Payload(body)
    return payload, await items_of(payload, Messages(payload), find_parts(payload))


async def item_of(part: Any) -> Item:
    """The one item of a request; ``part`` is JSON text where the spelling matters."""
    text = part if isinstance(part, bytes) else json.dumps(part).encode()
    _, (item,) = await items_in(b'{"messages":[{"role":"user","content":[%b]}]}' % text)
    return item


async def key_of(part: Any) -> str:
    return (await item_of(part)).key


def as_json(part: Any) -> Any:
    return json.loads(to_json(part))


IMAGE = {"type": "image_url", "image_url": {"url": PNG}}

SPELLINGS = [
    (IMAGE, IMAGE),
    ({"type": "image_url", "image_url": PNG}, IMAGE),
    ({"image_url": PNG}, IMAGE),
    ({"image_url": {"url": PNG}}, IMAGE),
    ({"type": None, "image_url": PNG}, IMAGE),
    ({"type": "input_image", "image_url": PNG}, IMAGE),
    ({"type": "input_image", "image_url": {"url": PNG}}, IMAGE),
    (
        {"type": "input_image", "image_url": PNG, "detail": "auto"},
        {**IMAGE, "detail": "auto"},
    ),
    (
        {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}},
        {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}},
    ),
    ({"video_url": "http://v"}, {"type": "video_url", "video_url": {"url": "http://v"}}),
    (
        {"type": "audio_url", "audio_url": "http://a", "lang": ["é"]},
        {"type": "audio_url", "audio_url": {"url": "http://a"}, "lang": ["é"]},
    ),
    ({"input_audio": WAV}, {"type": "input_audio", "input_audio": WAV}),
    (
        {"type": "input_audio", "input_audio": "UklG"},
        {"type": "input_audio", "input_audio": "UklG"},
    ),
    # Without a type the first payload key counts, and the others must not reach the engine.
    (
        {"video_url": "http://v", "input_audio": WAV, "audio_url": "http://a"},
        {"type": "audio_url", "audio_url": {"url": "http://a"}},
    ),
    ({**IMAGE, "video_url": None, "image_pil": "x"}, IMAGE),
]


@pytest.mark.parametrize(("part", "canonical"), SPELLINGS)
async def test_every_spelling_that_vllm_reads_as_media_is_encoded_in_the_canonical_one(
    part: dict[str, Any], canonical: dict[str, Any]
) -> None:
    item = await item_of(part)

    assert as_json(item.canonical()) == canonical
    assert as_json(item.for_encode()) == {**canonical, "uuid": item.key}


@pytest.mark.parametrize(
    "content",
    [
        "text",
        None,
        {"type": "image_url", "image_url": {"url": PNG}},
        ["a bare string"],
        [[IMAGE]],
        [{"type": "text", "text": PNG}],
        [{"type": "text", "text": "hi", "image_url": PNG}],
        [{"type": "image", "image": PNG}],
        [{"type": "file", "file": {"file_data": PNG}}],
        [{"type": 7}],
        [{"type": ["image_url"], "image_url": PNG}],
        [{"type": "image_pil", "image_pil": "x"}],
        [{"image_pil": "x", "video_url": "http://v"}],
        [{"type": "image_url", "uuid": "k"}],
        [{}],
    ],
)
def test_what_vllm_does_not_read_as_media_is_left_alone(content: Any) -> None:
    body = {"messages": [{"role": "user", "content": content}, {"role": "user"}, "x", 7, None]}

    assert find_parts(Payload(json.dumps(body).encode())) == []


def test_media_is_found_in_every_role_and_in_the_order_of_the_prompt() -> None:
    messages = [
        {"role": "system", "content": [image("http://1")]},
        {"role": "user", "content": ["x", {"type": "video_url", "video_url": {"url": "http://2"}}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": [image("http://3")]},
        {
            "role": "user",
            "content": [
                {"type": "audio_url", "audio_url": {"url": "http://4"}},
                {"type": "text", "text": "and"},
                {"type": "input_audio", "input_audio": WAV},
                image("http://5"),
            ],
        },
    ]

    found = find_parts(Payload(json.dumps({"messages": messages}).encode()))

    assert [(str(part.place), part.kind) for part in found] == [
        ("messages[0].content[0]", "image_url"),
        ("messages[1].content[1]", "video_url"),
        ("messages[3].content[0]", "image_url"),
        ("messages[4].content[0]", "audio_url"),
        ("messages[4].content[2]", "input_audio"),
        ("messages[4].content[3]", "image_url"),
    ]


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "text", "video_url": "http://v", "uuid": "k"}, "video_url"),
        ({"type": "video_url", "video_url": "http://v", "image_url": None, "uuid": 1}, "image_url"),
        ({"type": "video_url", "video_url": "http://v", "image_url": None}, "video_url"),
        ({"type": "image_url", "image_embeds": {}, "uuid": "k"}, "image_embeds"),
        ({"type": "x", "video_embeds": {}, "audio_embeds": {}, "uuid": "k"}, "audio_embeds"),
        (
            {"type": "video_embeds", "video_embeds": {}, "audio_embeds": {}, "uuid": "k"},
            "video_embeds",
        ),
        ({"image_embeds": {}, "video_url": "http://v"}, "image_embeds"),
        ({"prompt_embeds": "x", "input_audio": WAV}, "prompt_embeds"),
        ({"type": "audio_embeds"}, "audio_embeds"),
    ],
)
def test_a_part_is_read_by_its_keys_where_vllm_does_so(part: dict[str, Any], kind: str) -> None:
    (found,) = parts_of(part)

    assert found.kind == kind


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (b"{}", "messages is missing"),
        (b'{"messages":null}', "messages must be a list"),
        (b'{"messages":{}}', "messages must be a list"),
    ],
)
def test_messages_that_are_no_list_are_a_400(messages: bytes, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        find_parts(Payload(messages))

    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url"},
        {"type": "image_url", "image_url": None},
        {"type": "image_url", "image_url": {}, "uuid": ""},
        {"type": "image_url", "image_url": {"url": ""}, "uuid": None},
        {"type": "image_url", "image_url": {"url": 7}},
        {"type": "image_url", "image_url": ""},
        {"type": "image_url", "url": PNG},
        {"type": "input_image"},
        {"image_url": []},
        {"type": "video_url", "video_url": {"url": None}},
        {"type": "audio_url", "audio_url": True},
        {"type": "input_audio", "input_audio": None},
        {"type": "input_audio", "input_audio": {"url": "http://a"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    ],
)
def test_a_part_with_neither_media_nor_a_uuid_is_a_400_that_names_it(part: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[1\].*neither") as caught:
        parts_of("text", part)

    assert caught.value.status == 400
    assert caught.value.param == "messages[0].content[1]"


@pytest.mark.parametrize("uuid", [b"null", b'""', b"0", b"false", b"{}", b"[]"])
async def test_a_uuid_that_is_empty_as_vllms_proxy_sees_it_counts_as_none(uuid: bytes) -> None:
    url = b"data:image/png;base64,AA=="
    item = await item_of(b'{"type":"image_url","image_url":{"url":"%b"},"uuid":%b}' % (url, uuid))
    assert item.key == hashlib.sha256(url).hexdigest()
    assert item.uuid == item.key


@pytest.mark.parametrize("payload", ["null", "{}", '{"url":""}', '"http://x"', "7"])
@pytest.mark.parametrize(
    ("uuid", "key"),
    [
        (b'"k1"', "k1"),
        (b'"https://media.example.com/a/../b"', None),
        (b'"https://media.example.com/a..b/c"', "https://media.example.com/a..b/c"),
        (rb'"\u006b\/1\u00e9"', "k/1é"),
        ('"画像 🌍"'.encode(), "画像 🌍"),
        (b'" "', " "),
        (b"7", "7"),
        (b"7.50", "7.5"),
        (b"true", "True"),
        (b'{"a": 1}', "{'a': 1}"),
    ],
)
async def test_a_callers_uuid_is_the_key_and_keeps_its_spelling(
    payload: str, uuid: bytes, key: str | None
) -> None:
    part = b'{"type":"image_url","image_url":%b,"uuid":%b}' % (payload.encode(), uuid)
    if key is None:
        with pytest.raises(RequestError, match="uuid may become a path"):
            await item_of(part)
        return

    item = await item_of(part)

    assert item.key == key
    assert b'"uuid":%b' % uuid in to_json(item.for_encode())
    assert to_json(item.pinned()) == part


@pytest.mark.parametrize(
    "uuid", ["/etc", "/", "..", "../x", "a/..", "a/../b", "a\x00", "a\nb", "\x7f", "\x85"]
)
@pytest.mark.parametrize("kind", ["image_url", "image_embeds", "prompt_embeds"])
def test_a_uuid_that_could_leave_a_directory_or_holds_control_characters_is_a_400(
    uuid: str, kind: str
) -> None:
    with pytest.raises(RequestError, match="uuid") as caught:
        parts_of({"type": kind, kind: None, "uuid": uuid})

    assert caught.value.param == "messages[0].content[0].uuid"


async def test_an_unsafe_uuid_is_seen_through_escapes_and_cuts() -> None:
    with pytest.raises(RequestError, match="uuid"):
        await item_of(rb'{"image_url":null,"uuid":"\u002e\u002e/x"}')
    long = b'{"image_url":null,"uuid":"/;base64,%b"}' % (b"A" * 2030)
    with pytest.raises(RequestError, match="uuid may become a path"):
        await item_of(long)


@pytest.mark.parametrize("letter", ["A", "é", "🌍"])
async def test_a_uuid_may_have_2048_characters_and_no_more(letter: str) -> None:
    assert await key_of({"image_url": None, "uuid": letter * 2048}) == letter * 2048
    with pytest.raises(RequestError, match="more than 2048 characters") as caught:
        await key_of({"image_url": None, "uuid": letter * 2049})
    assert (caught.value.status, caught.value.param) == (400, "messages[0].content[0].uuid")


async def test_a_long_uuid_is_seen_through_cuts() -> None:
    uuid = "data:image/png;base64," + "A" * 8192
    payload = Payload(body_of({"image_url": None, "uuid": uuid}))
    assert len(payload.skeleton) < 200
    with pytest.raises(RequestError, match="more than 2048 characters"):
        find_parts(payload)


@pytest.mark.parametrize(
    ("part", "url"),
    [
        (b'{"type":"image_url","image_url":{"url":"data:image/png;base64,AA=="}}', None),
        (rb'{"type":"image_url","image_url":{"url":"data:image\/png;base64,AA=="}}', None),
        (rb'{"type":"image_url","image_url":{"url":"\u0064ata:image/png;base64,AA=="}}', None),
        (b'{"image_url":"data:image/png;base64,AA==","uuid":""}', None),
        (b'{"video_url":{"fps":1,"url":"data:image/png;base64,AA=="},"uuid":null}', None),
        (b'{"type":"input_audio","input_audio":"data:image/png;base64,AA=="}', None),
        (
            b'{"image_url":"data:image/png;charset=utf-8;base64,AA=="}',
            "data:image/png;charset=utf-8;base64,AA==",
        ),
        (b'{"image_url":"DATA:image/png;BASE64,AA=="}', "DATA:image/png;BASE64,AA=="),
        (b'{"image_url":"data:,x"}', "data:,x"),
        (rb'{"image_url":"data:image/png;base64,AA\n=="}', "data:image/png;base64,AA\n=="),
        (b'{"image_url":"file:///tmp/x.png"}', "file:///tmp/x.png"),
        ('{"image_url":"https://例え/é?🌍"}'.encode(), "https://例え/é?🌍"),
    ],
)
async def test_a_url_is_not_judged_and_its_key_is_made_from_the_decoded_text(
    part: bytes, url: str | None
) -> None:
    assert await key_of(part) == sha256(url or "data:image/png;base64,AA==")


LETTERS = "iVBORw0KGgo+/" * 400


@pytest.mark.parametrize(
    "part",
    [
        b'{"image_url":"data:;base64,%b"}',
        rb'{"image_url":"\u0064ata:;base64,%b"}',
        b'{"image_url":{"url":"data:;base64,%b","detail":"low"}}',
    ],
)
async def test_a_url_cut_out_of_the_body_has_the_key_of_the_whole(part: bytes) -> None:
    assert await key_of(part % LETTERS.encode()) == sha256("data:;base64," + LETTERS)


async def test_a_url_that_cannot_be_cut_has_the_same_key() -> None:
    escaped = LETTERS.replace("/", "\\/").encode()

    assert await key_of(b'{"image_url":"data:;base64,%b"}' % escaped) == await key_of(
        {"image_url": "data:;base64," + LETTERS}
    )


AUDIO = {
    "short": b'{"type":"input_audio","input_audio":{"data":"UklG","format":"wav"}}',
    "another order, blanks": b'{ "input_audio" : {"format":"wav", "data":"UklG"} }',
    "an empty uuid": b'{"type":"input_audio","uuid":"","input_audio":{"data":"UklG"}}',
    "numbers": b'{"input_audio":{"data":"A","x":[1e5,0.10,-0,-0.0,1.0,1E-400,2]}}',
    "great integers": b'{"input_audio":{"data":"A","n":123456789012345678901234567890}}',
    "floats": b'{"input_audio":{"data":"A","f":[1e23,9007199254740993.0,0.30000000000000004]}}',
    "constants": b'{"input_audio":{"data":"A"},"x":[true,false,null,{},[]]}',
    "non-ASCII": '{"input_audio":{"data":"A","format":"é🌍\u2028"},"ключ":"\u007f"}'.encode(),
    "escapes": rb'{"input_audio":{"data":"A\/B","x":"\u00e9\ud83d\ude00\n\"\\"}}',
    "nested unknown keys": b'{"input_audio":{"data":"A"},"z":{"b":{"d":1,"c":[{"y":1,"x":2}]}}}',
    "repeated keys": b'{"input_audio":{"data":"A","data":"B"},"x":1,"x":{"y":1,"y":2}}',
    "cut data": b'{"type":"input_audio","input_audio":{"data":"%b","format":"wav"}}'
    % LETTERS.encode(),
    "uncut data": b'{"input_audio":{"data":"%b"}}' % LETTERS.replace("/", "\\/").encode(),
    "cuts in unknown keys": b'{"input_audio":{"data":"%b"},"z":"x;base64,%b","a":{"data":"%b"}}'
    % (LETTERS.encode(), b"A" * 2048, b"B" * 2048),
    "base64 as keys": b'{"input_audio":{"data":"A"},"a;base64,%b":1,"a;base64,%b":2}'
    % (b"Z" * 2048, b"B" * 2048),
    "one long key twice": b'{"input_audio":{"data":"A"},";base64,%b":1,";base64,%b":2}'
    % (b"Z" * 2048, b"Z" * 2048),
}


@pytest.mark.parametrize("part", AUDIO.values(), ids=AUDIO.keys())
async def test_the_key_of_input_audio_is_made_from_what_python_would_dump(part: bytes) -> None:
    assert await key_of(part) == sha256(json.dumps(json.loads(part), sort_keys=True))


async def test_keys_of_large_media_are_made_on_a_thread_and_equal_those_made_inline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []
    digest = module._digest

    def watched(content: Any) -> str:
        threads.append(threading.current_thread())
        return digest(content)

    monkeypatch.setattr(module, "_digest", watched)
    urls = ["data:;base64," + letter * (200 << 10) for letter in "AB"]

    together = [item.key for item in (await items_in(body_of(*map(image, urls))))[1]]
    alone = [await key_of(image(url)) for url in urls]

    assert together == alone == [sha256(url) for url in urls]
    here = threading.current_thread()
    assert [thread is here for thread in threads] == [False, False, True, True]


async def test_a_named_part_is_never_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module, "_digest")

    assert await key_of(image(PNG, uuid="k")) == "k"


async def test_equal_pictures_share_a_key_and_keep_their_places() -> None:
    _, items = await items_in(body_of(image("http://a"), "x", image("http://b"), image("http://a")))

    assert [item.place for item in items] == [Place(0, 0), Place(0, 2), Place(0, 3)]
    assert [item.key for item in items] == [sha256(f"http://{name}") for name in "aba"]
    assert [item.modality for item in items] == ["image"] * 3


async def test_a_raw_part_keeps_its_spelling_and_gets_the_key_as_its_uuid() -> None:
    part = b'{"type":"input_image","detail":"\\u0061uto","image_url":"http:\\/\\/a","uuid":""}'
    item = await item_of(part)

    uuid = b'"uuid":"%b"' % sha256("http://a").encode()
    assert to_json(item.pinned()) == part.replace(b'"uuid":""', uuid)


async def test_a_raw_part_loses_payload_keys_that_would_win_once_it_has_a_uuid() -> None:
    part = {"type": "video_url", "video_url": {"url": "http://v"}, "x": 1}
    item = await item_of({**part, "image_url": None, "image_pil": None, "audio_embeds": "t"})

    assert as_json(item.pinned()) == {**part, "uuid": sha256("http://v")}
    assert as_json(item.extras()) == {"x": 1}


def test_parts_are_replaced_and_all_the_rest_of_the_messages_keeps_its_bytes() -> None:
    body = (
        b'{"messages":[ {"role":"assistant","content":null,"tool_calls":[{"n":1.0}]},'
        b'{"content":[{"type":"text" , "text":"\\u0061"},{"image_url":"x"},"s"],"role":"user"},'
        b'{"role":"user","content":"a","content":[7,{"image_url":"y"}]}]}'
    )
    messages = Messages(Payload(body))

    changed = messages.with_parts({Place(1, 1): {"new": 1}, Place(2, 1): 2})

    assert to_json(changed) == (
        b'[{"role":"assistant","content":null,"tool_calls":[{"n":1.0}]},'
        b'{"content":[{"type":"text" , "text":"\\u0061"},{"new":1},"s"],"role":"user"},'
        b'{"role":"user","content":[7,2]}]'
    )


# Whose name an item has

TENANT = {"media_ids": "tenant", "media_ids_secret": "s", "api_key": ["a", "b"]}


async def named(part: Any, owner: str | None = None, **options: Any) -> Item:
    payload = Payload(body_of(part))
    naming = Naming.of(Config(decode="http://d", **options))
    (item,) = await items_of(payload, Messages(payload), find_parts(payload), naming, owner)
    return item


PARTS: list[dict[str, Any]] = [
    image(PNG),
    {"type": "image_url", "image_url": PNG},
    {"image_url": PNG, "x": [1]},
    {"type": "input_audio", "input_audio": WAV},
    {"type": "video_url", "video_url": {"url": "data:;base64," + "A" * 9000}},
]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("uuid", ["mine", "", None, 7])
async def test_named_by_content_the_callers_uuid_plays_no_part(
    part: dict[str, Any], uuid: Any
) -> None:
    plain = await named(part)
    found = await named({**part, "uuid": uuid}, media_ids="content")
    assert found.key == found.uuid == plain.key
    assert as_json(found.pinned()) == as_json(plain.pinned())
    assert as_json(found.for_encode()) == as_json(plain.for_encode())


@pytest.mark.parametrize("part", PARTS)
async def test_named_for_a_tenant_the_name_is_an_hmac_of_content_and_owner(
    part: dict[str, Any],
) -> None:
    digest = (await named(part)).key
    for uuid in ({}, {"uuid": "mine"}):
        found = await named({**part, **uuid}, "a", **TENANT)
        expected = hmac.new(b"s", f"{digest}a".encode(), "sha256").hexdigest()
        assert found.key == found.uuid == expected


async def test_tenants_have_names_of_their_own_that_depend_on_the_secret() -> None:
    part = image(PNG)
    keys = [
        (await named(part, "a", **TENANT)).key,
        (await named(part, "b", **TENANT)).key,
        (await named(part, "a", **{**TENANT, "media_ids_secret": "t"})).key,
        (await named(image("http://other"), "a", **TENANT)).key,
        (await named(part)).key,
    ]
    assert len(set(keys)) == 5
    assert (await named(part, "a\udcff", **TENANT)).key not in keys


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": None, "uuid": "k"},
        {"type": "image_url", "image_url": {"url": ""}, "uuid": "k"},
        {"type": "image_url", "image_url": {"url": 7}, "uuid": "k"},
        {"input_audio": {"data": None}, "uuid": "k"},
    ],
)
@pytest.mark.parametrize("options", [{"media_ids": "content"}, TENANT])
@pytest.mark.parametrize("encoders", [0, 1])
async def test_where_uuids_do_not_count_a_uuid_alone_is_a_400_that_names_the_part(
    part: dict[str, Any], options: dict[str, Any], encoders: int
) -> None:
    backends = Backends(encode=encoders)
    headers = {"authorization": "Bearer a"}
    reply = await chat(backends.proxy(**options), ask("look:", part), headers)
    assert (reply.status, reply.error["param"]) == (400, "messages[0].content[1]")
    assert "does not stand for media" in reply.error["message"]
    assert backends.decode[0].requests == []


@pytest.mark.parametrize("uuid", ["/etc", "a/../b", "a\n", "x" * 2049])
async def test_a_uuid_that_is_not_used_must_be_harmless_all_the_same(uuid: str) -> None:
    reply = await chat(Backends().proxy(media_ids="content"), ask(image(PNG, uuid=uuid)))
    assert (reply.status, reply.error["param"]) == (400, "messages[0].content[0].uuid")


@pytest.mark.parametrize("counts", [{"encode": 0}, {"encode": 0, "prefill": 1}, {"encode": 1}])
@pytest.mark.parametrize(
    "fields", [{}, {"no_rewrite": True}, {"kv_connector": "shared"}, {"use_beam_search": True}]
)
async def test_no_engine_ever_sees_a_uuid_that_does_not_count(
    counts: dict[str, int], fields: dict[str, Any]
) -> None:
    backends = Backends(**counts)
    options = {name: value for name, value in fields.items() if name != "use_beam_search"}
    proxy = backends.proxy(media_ids="content", **options)
    beam = "use_beam_search" in fields
    await chat(proxy, ask(image(PNG, uuid="theirs"), use_beam_search=beam))
    every = [*backends.encode, *backends.prefill, *backends.decode]
    raw = [body for engine in every for body in engine.raw]
    assert raw
    assert not any(b"theirs" in body for body in raw)
    assert [sha256(PNG).encode() in body for body in backends.decode[0].raw] == [True]


async def test_named_by_callers_and_without_encoders_media_stays_as_it_came() -> None:
    backends = Backends(encode=0)
    body = json.dumps(ask(image(PNG, uuid="theirs")), indent=1).encode()
    await chat(backends.proxy(), body)
    assert backends.decode[0].raw == [body]


# Where media may come from


def fault_of(url: Any, **options: Any) -> RequestError | None:
    payload = Payload(body_of({"type": "image_url", "image_url": {"url": url}}))
    try:
        check_sources(payload, find_parts(payload), Config(decode="http://d", **options))
    except RequestError as exc:
        return exc
    return None


def is_allowed(url: Any, **options: Any) -> bool:
    fault = fault_of(url, **options)
    assert fault is None or (fault.status, fault.param) == (400, "messages[0].content[0]")
    return fault is None


HOSTS = ["good.example", "::1", "[fd00::]", "10.0.0.1", "Other.Example."]


@pytest.mark.parametrize(
    "url",
    [
        "http://good.example/a.png",
        "HTTPS://GOOD.Example:8443/x?y=z#w",
        "http://good.example",
        "http://good.example.:80/",
        "http://good.example?x=@evil",
        "http://good.example#@evil",
        "http://good.example/@evil/:80//x",
        "http://other.example/",
        "http://[::1]:8000/x",
        "http://[fd00::]/",
        "http://10.0.0.1:1/",
        "s3://good.example/x",
        "data:image/png;base64,AAAA",
        "DATA:,http://evil",
        "http://good.example/é?ü",
        "http://good.example/;base64," + "A" * 9000,
        "data:;base64," + "A" * 9000,
    ],
)
def test_media_may_come_from_the_hosts_that_are_allowed(url: str) -> None:
    assert is_allowed(url, allowed_media_hosts=HOSTS)


@pytest.mark.parametrize(
    "url",
    [
        "http://evil/",
        "http://good.example.evil/",
        "http://evilgood.example/",
        "http://good.example@evil/",
        "http://good.example:80@evil/",
        "http://good.example%40evil/",
        "http://user@good.example/",
        "http://user:pw@good.example/",
        "http://evil\\@good.example/",
        "http://good.example\\@evil/",
        "http://good.example\\.evil/",
        "http:\\\\evil/good.example",
        "http://evil\t.good.example/",
        "http://good.example\t/",
        "ht\ntp://good.example/",
        "http://good.example\r\n.evil/",
        "http://good.example /",
        " http://good.example/",
        "\x01http://good.example/",
        "http://good.example/ x",
        "http://good.example\x00.evil/",
        "http://good.example\x7f/",
        "http://good.example\u3000/",
        "http://good.example\u00a0.evil/",
        "http://g\u200bood.example/",
        "http://ｇood.example/",
        "http://good\u3002example/",
        "http://good.example\uff0fevil/",
        "http://good.example\u2044evil/",
        "http://g%6Fod.example/",
        "http:good.example/",
        "http:/good.example/",
        "http:///good.example/",
        "http:////good.example/",
        "//good.example/x",
        "good.example/x",
        "/good.example",
        "http://",
        "http://:80/",
        "http://?good.example",
        "file:///etc/passwd",
        "file:/etc/passwd",
        "1http://good.example/",
        "http://[::1",
        "http://[::2]/",
        "http://evil[::1]/",
        "http://[::1]evil/",
        "http://[::1].good.example/",
        "http://[good.example]/",
        "http://[::1%25eth0]/",
        "http://good.example:80:90/",
        "http://good.example:evil/",
        "http://10.0.0.1.evil/",
        "http://0x0a000001/",
        "http://167772161/",
        "http://10.1/",
        "javascript:good.example",
        "http://evil/;base64," + "A" * 9000,
        ";base64," + "A" * 9000,
        "http://" + "A" * 9000,
    ],
)
def test_what_may_mean_another_host_to_another_parser_is_refused(url: str) -> None:
    assert not is_allowed(url, allowed_media_hosts=HOSTS)
    assert is_allowed(url)


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://x/y", True),
        ("HTTPS://x", True),
        ("hTTps://x", True),
        ("data:,x", True),
        ("DATA:image/png;base64,AAAA", True),
        ("data:;base64," + "A" * 9000, True),
        ("http://x", False),
        ("file:///etc/passwd", False),
        ("ftp://x", False),
        ("httpsx://x", False),
        (" https://x", False),
        ("\thttps://x", False),
        ("https\n://x", False),
        ("://x", False),
        (":https://x", False),
        ("x" * 100 + "https:", False),
        ("x;base64," + "A" * 9000, False),
    ],
)
def test_media_may_come_by_the_schemes_that_are_allowed(url: str, allowed: bool) -> None:
    assert is_allowed(url, allowed_media_schemes="HTTPS://, data:") is allowed


def test_both_scheme_and_host_must_be_allowed() -> None:
    both = {"allowed_media_schemes": "https,data", "allowed_media_hosts": "good.example"}
    assert is_allowed("https://good.example/", **both)
    assert is_allowed("data:,x", **both)
    assert not is_allowed("http://good.example/", **both)
    assert not is_allowed("https://evil/", **both)
    assert not is_allowed("data:,x", allowed_media_schemes="https", allowed_media_hosts="h")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://evil/"}},
        {"type": "image_url", "image_url": "http://evil/"},
        {"image_url": "http://evil/"},
        {"type": "input_image", "image_url": "http://evil/"},
        {"type": "video_url", "video_url": {"url": "http://evil/"}},
        {"audio_url": {"url": "http://evil/"}},
        {"type": "image_url", "image_url": {"url": "http://evil/"}, "uuid": "k"},
        {"type": "text", "text": "x", "image_url": {"url": "http://evil/"}, "uuid": "k"},
    ],
)
@pytest.mark.parametrize("encoders", [0, 1])
@pytest.mark.parametrize("beam", [False, True])
async def test_a_source_that_is_not_allowed_is_a_400_that_names_the_part(
    part: dict[str, Any], encoders: int, beam: bool
) -> None:
    backends = Backends(encode=encoders)
    proxy = backends.proxy(allowed_media_hosts=["good.example"])
    body = ask(image("http://good.example/x"), part, use_beam_search=beam)
    reply = await chat(proxy, body)
    assert (reply.status, reply.error["param"]) == (400, "messages[0].content[1]")
    assert reply.error["message"].startswith("messages[0].content[1]: ")
    assert all(engine.requests == [] for engine in (*backends.encode, *backends.decode))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": None, "uuid": "k"},
        {"type": "image_url", "image_url": {"url": ""}, "uuid": "k"},
        {"type": "image_url", "image_url": {"url": 7}, "uuid": "k"},
        {"type": "input_audio", "input_audio": WAV},
        {"type": "text", "text": "http://evil/"},
    ],
)
def test_what_names_no_source_is_allowed_everywhere(part: dict[str, Any]) -> None:
    payload = Payload(body_of(part))
    config = Config(
        decode="http://d", allowed_media_hosts=("good.example",), allowed_media_schemes=("https",)
    )
    check_sources(payload, find_parts(payload), config)


def test_the_host_of_a_very_long_url_takes_no_time_to_tell() -> None:
    began = time.process_time()
    for url in ("http://" + "." * 500_000 + " ", "http://good.example/" + "/?" * 250_000 + "\\"):
        assert not is_allowed(url, allowed_media_hosts="good.example")
    assert time.process_time() - began < 2
