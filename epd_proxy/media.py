"""
The media in a chat request: where it stands, what each engine is to read, and its content key.

A content part counts as media if vLLM would read it as such, in any message of any role:

    {"type": "image_url", "image_url": {"url": ...}}        also video_url, audio_url
    {"type": "input_audio", "input_audio": {"data": ..., "format": ...}}
    {"image_url": ...}, {"type": "input_image", ...}        other spellings, brought into the first

What vLLM does not read as media (text, unknown types, bare strings) is left for decode to judge.
The rules are those of ``vllm/renderers/chat_utils`` in vLLM 0.33.0.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from epd_proxy.config import Config
from epd_proxy.errors import RequestError
from epd_proxy.payload import (
    Buffer,
    Json,
    Payload,
    elements_of,
    fields_of,
    is_string,
    size_of,
)

MODALITY = {
    "image_url": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}
EMBEDS = {"image_embeds": "image", "audio_embeds": "audio", "video_embeds": "video"}
PAYLOAD_KEYS = frozenset({*MODALITY, *EMBEDS, "prompt_embeds"})

# With a uuid or without a type, vLLM goes by the keys of a part, in this order; else by its type.
# `image_pil` is for Python callers and never right in JSON.
_BY_KEY = (
    "image_url",
    "image_pil",
    "image_embeds",
    "audio_embeds",
    "video_embeds",
    "prompt_embeds",
    "audio_url",
    "input_audio",
    "video_url",
)
_OWN_KEYS = frozenset({*_BY_KEY, "type", "uuid"})

# From here on a digest is made on a thread: it would hold up everybody else's tokens.
_LARGE = 256 << 10

_LONGEST_UUID = 2048
_LONGEST_SCHEME = 64
# No blanks, controls, backslashes or user names, which parsers read differently.
_PLAIN_URL = re.compile(
    r"[A-Za-z][A-Za-z0-9+.-]*://"
    r"(?:\[[0-9A-Fa-f:.]+\]|[^\s\x00-\x20\x7f\\@/?#:\[\]]+)(?::[0-9]*)?"
    r"(?:[/?#][^\s\x00-\x20\x7f\\]*)?"
)
_UNSAFE_UUID = re.compile(r"^/|(?:^|/)\.\.(?:/|$)|[\x00-\x1f\x7f-\x9f]")


class Place(NamedTuple):
    """``messages[message].content[part]``"""

    message: int
    part: int

    def __str__(self) -> str:
        return f"messages[{self.message}].content[{self.part}]"


class Part(NamedTuple):
    """A content part that vLLM reads as media, as decoded."""

    place: Place
    kind: str
    """The key that holds its payload: ``image_url``, ``input_audio``, ``video_embeds`` ..."""
    tree: dict[str, Any]
    name: str | None
    """The caller's uuid as vLLM reads it; None if there is none."""


class Item(NamedTuple):
    """One media part that an encoder has to see."""

    place: Place
    kind: str
    """image_url, video_url, audio_url or input_audio"""
    key: str
    """The content key: the uuid that encode and consumer go by."""
    uuid: Json
    """The same as JSON, the caller's own spelling if the caller named it."""
    part: dict[str, msgspec.Raw]
    """The caller's part, member by member."""
    is_plain: bool = False
    size: int = 1
    """Bytes of media, or of the URL that stands for it: its share in an encoder's load."""
    """Whether it holds a type and media in the one spelling that all engines read, no more."""

    @property
    def modality(self) -> str:
        return MODALITY[self.kind]

    def extras(self) -> dict[str, Json]:
        """The caller's further keys: they can reach the chat template."""
        if self.is_plain:
            return {}
        return {name: value for name, value in self.part.items() if name not in _OWN_KEYS}

    def canonical(self) -> dict[str, Json]:
        """The part in the one spelling that engines read whatever else it says."""
        if self.is_plain:
            return {**self.part}
        payload: Json = self.part[self.kind]
        if is_string(self.part[self.kind]) and self.kind != "input_audio":
            payload = {"url": payload}
        uuid = {"uuid": self.part["uuid"]} if "uuid" in self.part else {}
        return {"type": self.kind, self.kind: payload, **uuid, **self.extras()}

    def for_encode(self) -> dict[str, Json]:
        return {**self.canonical(), "uuid": self.uuid}

    def pinned(self) -> dict[str, Json]:
        """
        The caller's part with the content key as its uuid.

        With a uuid, vLLM goes by the first payload key it knows, even if that is null: only the
        one that counted before may stay.
        """
        part: dict[str, Json] = {
            name: value
            for name, value in self.part.items()
            if name == self.kind or name not in _BY_KEY
        }
        return {**part, "uuid": self.uuid}


class Messages:
    """The messages of a body as slices, in which parts can be replaced."""

    def __init__(self, payload: Payload) -> None:
        self._messages = elements_of(payload.fields["messages"])
        self._fields: dict[int, dict[str, msgspec.Raw]] = {}
        self._contents: dict[int, list[msgspec.Raw]] = {}

    def part(self, place: Place) -> dict[str, msgspec.Raw]:
        return fields_of(self._content(place.message)[place.part])

    def _content(self, message: int) -> list[msgspec.Raw]:
        if message not in self._contents:
            self._fields[message] = fields_of(self._messages[message])
            self._contents[message] = elements_of(self._fields[message]["content"])
        return self._contents[message]

    def with_parts(self, parts: Mapping[Place, Json]) -> list[Json]:
        """The messages with other parts in some places."""
        messages: list[Json] = [*self._messages]
        contents: dict[int, list[Json]] = {}
        for place, part in parts.items():
            if place.message not in contents:
                contents[place.message] = [*self._content(place.message)]
            contents[place.message][place.part] = part
        for message, content in contents.items():
            messages[message] = {**self._fields[message], "content": content}
        return messages


def find_parts(payload: Payload) -> list[Part]:
    """
    The media parts, in the order of the prompt, references included.

    Raises RequestError if ``messages`` is missing or no list, if a part has neither media nor a
    uuid, or if its uuid may not be used.
    """
    messages = payload.tree.get("messages")
    if not isinstance(messages, list):
        reason = "must be a list" if "messages" in payload.tree else "is missing"
        raise RequestError(f"messages {reason}", param="messages")
    found: list[Part] = []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            for j, part in enumerate(content):
                if isinstance(part, dict) and (kind := _kind_of(part)):
                    place = Place(i, j)
                    found.append(Part(place, kind, part, _name_of(payload, place, kind, part)))
    return found


def _kind_of(part: dict[str, Any]) -> str | None:
    """The key by which vLLM reads the part; None if it does not read it as media."""
    kind, uuid = part.get("type"), part.get("uuid")
    if kind is None or uuid is not None:
        keys: Iterable[str] = _BY_KEY
        if kind == "video_embeds":
            keys = (key for key in _BY_KEY if key != "audio_embeds")
        found = next((key for key in keys if key in part), None)
        # An empty uuid is ours to replace: without a payload the type says what is missing.
        if found or uuid:
            return found if found in PAYLOAD_KEYS else None
    if kind == "input_image":
        return "image_url"
    return kind if isinstance(kind, str) and kind in PAYLOAD_KEYS else None


def _name_of(payload: Payload, place: Place, kind: str, part: dict[str, Any]) -> str | None:
    uuid = part.get("uuid")
    if not uuid:
        if kind in MODALITY and _is_empty(kind, part):
            raise RequestError(
                f"{place}: the {kind} part has neither media nor a uuid", param=str(place)
            )
        return None
    name = payload.text(uuid) if isinstance(uuid, str) else str(uuid)
    if len(name) > _LONGEST_UUID:
        raise RequestError(
            f"{place}.uuid has more than {_LONGEST_UUID} characters", param=f"{place}.uuid"
        )
    if _UNSAFE_UUID.search(name):
        raise RequestError(
            f"{place}.uuid may become a path: it must not start with /, hold a .. segment or"
            " control characters",
            param=f"{place}.uuid",
        )
    return name


def _is_empty(kind: str, part: dict[str, Any]) -> bool:
    payload = part.get(kind)
    if isinstance(payload, dict):
        payload = payload.get("data" if kind == "input_audio" else "url")
    return not isinstance(payload, str) or not payload


class Naming(NamedTuple):
    """
    What names media in the caches of all engines (``--media-ids``).

    A caller's uuid is the key of everybody: who names another's can have or spoil it. So it may be
    ignored (``renames``), and the name be made with a secret and the caller's API key.
    """

    renames: bool = False
    secret: bytes | None = None

    @classmethod
    def of(cls, config: Config) -> Naming:
        secret = config.media_ids_secret.encode() if config.media_ids == "tenant" else None
        return cls(config.media_ids != "caller", secret)

    def key(self, digest: str, owner: str | None) -> str:
        """``digest``: the content key, in hex."""
        if self.secret is None:
            return digest
        # A digest has a fixed length, so the two cannot run into each other.
        message = f"{digest}{owner}".encode(errors="surrogateescape")
        return hmac.digest(self.secret, message, "sha256").hex()


BY_CALLER = Naming()


async def items_of(
    payload: Payload,
    messages: Messages,
    parts: Sequence[Part],
    naming: Naming = BY_CALLER,
    owner: str | None = None,
) -> list[Item]:
    """
    ``parts`` under their content keys, which are those of vLLM's proxy unless ``naming`` says else.

    The key is the caller's uuid; else the SHA-256 of the URL; else, for ``input_audio``, of the
    part as Python's ``json.dumps(part, sort_keys=True)`` writes it. Raises RequestError (400) for
    a part that is a uuid alone where uuids do not count.
    """
    if naming.renames:
        parts = [_without_uuid(part) for part in parts]
    contents = [_content_of(payload, part) for part in parts if part.name is None]
    if sum(map(size_of, contents)) <= _LARGE:
        digests = [_digest(content) for content in contents]
    else:
        loop = asyncio.get_running_loop()
        digests = await loop.run_in_executor(None, lambda: [_digest(each) for each in contents])
    keys = iter([naming.key(digest, owner) for digest in digests])
    return [
        _item(payload, part, messages.part(part.place), next(keys) if part.name is None else None)
        for part in parts
    ]


def _without_uuid(part: Part) -> Part:
    if _is_empty(part.kind, part.tree):
        raise RequestError(
            f"{part.place}: a uuid does not stand for media here; send the media itself",
            param=str(part.place),
        )
    tree = {name: value for name, value in part.tree.items() if name != "uuid"}
    return part._replace(tree=tree, name=None)


def check_sources(payload: Payload, parts: Iterable[Part], config: Config) -> None:
    """
    Raises RequestError (400) for media from where ``--allowed-media-schemes`` and
    ``--allowed-media-hosts`` do not allow it.

    The engines fetch it, not the proxy, so a URL that two parsers may read in two ways is refused.
    """
    schemes, hosts = config.allowed_media_schemes, config.allowed_media_hosts
    if not (schemes or hosts):
        return
    for part in parts:
        value = part.tree.get(part.kind)
        url = value.get("url") if isinstance(value, dict) else value
        if part.kind != "input_audio" and isinstance(url, str) and url:
            reason = _fault_of_source(url, schemes, hosts)
            if reason:
                raise RequestError(f"{part.place}: {reason}", param=str(part.place))


def _fault_of_source(url: str, schemes: Sequence[str], hosts: Sequence[str]) -> str:
    scheme = url[:_LONGEST_SCHEME].partition(":")[0].lower()
    if schemes and scheme not in schemes:
        return f"media may come by {', '.join(schemes)} alone"
    if not hosts or scheme == "data":
        return ""
    if not _PLAIN_URL.fullmatch(url):
        return "the URL of the media is not plain enough to tell its host"
    try:
        host = (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        host = ""
    return "" if host in hosts else "media may not come from that host"


def _item(payload: Payload, part: Part, fields: dict[str, msgspec.Raw], digest: str | None) -> Item:
    key = digest or part.name or ""
    if "uuid" not in part.tree:
        fields.pop("uuid", None)
    return Item(
        part.place,
        part.kind,
        key,
        key if digest else fields["uuid"],
        fields,
        # Of these two keys alone, one is the kind's, and the other must be the type.
        is_plain=len(part.tree) == 2
        and part.tree.get("type") == part.kind
        and isinstance(part.tree[part.kind], dict),
        # It may be the uuid alone that came.
        size=payload.size(fields[part.kind]) if part.kind in fields else 1,
    )


def _content_of(payload: Payload, part: Part) -> list[Buffer]:
    """What the content key is the digest of."""
    value = part.tree[part.kind]
    if isinstance(value, str):
        return payload.utf8(value)
    if part.kind == "input_audio":
        return payload.utf8(json.dumps(part.tree, sort_keys=True))
    return payload.utf8(value["url"])


def _digest(content: list[Buffer]) -> str:
    digest = hashlib.sha256()
    for buffer in content:
        digest.update(buffer)
    return digest.hexdigest()
