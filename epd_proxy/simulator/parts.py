"""
The parts of the messages: which are media, which are words.

What a part is, vLLM reads from its type, or, with a uuid or without a type, from its keys:

    {"type": "image_url", "image_url": {"url": ...}}    raw; also video_url, audio_url
    {"type": "input_image", "image_url": "..."}         raw
    {"type": "input_audio", "input_audio": {...}}       raw
    {"type": "image_embeds", "image_embeds": ...}       embeds; also video_, audio_embeds
    {"type": "text", "text": "..."}, "..."              words
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from epd_proxy.simulator.body import Json
from epd_proxy.simulator.embeds import MODALITIES, check_embeds
from epd_proxy.simulator.errors import bad_request, bad_schema, bug
from epd_proxy.simulator.media import fetch

# With a uuid, or without a type, the first of these keys decides, in this order.
_BY_KEY = (
    "image_url",
    "image_embeds",
    "audio_embeds",
    "video_embeds",
    "prompt_embeds",
    "audio_url",
    "input_audio",
    "video_url",
)
_MODALITY = {
    "image_url": "image",
    "input_image": "image",
    "image_embeds": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio_embeds": "audio",
    "video_url": "video",
    "video_embeds": "video",
}
# Where the words stand.
_TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "tool_reference": "name",
}


@dataclass(frozen=True)
class Item:
    """One media item; of a video with its sound track there are two."""

    modality: str
    embeds: bool
    uuid: str | None
    # Bytes of raw media, metadata or base64 of embeds, None for "you have it".
    data: Any


def read_messages(body: Json) -> tuple[list[Item], str]:
    """All items, and the last text a user said."""
    with_sound = bool((body.get("mm_processor_kwargs") or {}).get("use_audio_in_video"))
    items: list[Item] = []
    words = ""
    for role, part in _parts(body):
        found = _read_part(part, with_sound)
        if isinstance(found, list):
            items += found
        elif found and role == "user":
            words = found
    return items, words


def check_items(items: list[Item], role: str) -> None:
    for item in items:
        if item.embeds and role == "encode":
            name = f"{item.modality}_embeds"
            raise bad_request(f"You must set `--enable-mm-embeds` to input `{name}`", name)
    for modality in MODALITIES:
        group = [item for item in items if item.modality == modality]
        if len({item.embeds for item in group}) > 1:
            message = f"Mixing raw {modality} and embedding inputs is not allowed"
            raise bad_request(message, f"{modality}_embeds")
        check_embeds(modality, [item.data for item in group if item.embeds])


def _parts(body: Json) -> Iterator[tuple[str, Any]]:
    """Each part with the role that said it."""
    for message in body["messages"]:
        content = message.get("content") or []
        for part in [content] if isinstance(content, str) else content:
            yield message["role"], part


def _read_part(part: Any, with_sound: bool) -> str | list[Item]:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise bad_schema("Input should be a string or an object", "body.messages")
    kind = _kind(part)
    if kind in _TEXTS:
        return _text(part.get(_TEXTS[kind]))
    if kind == "prompt_embeds":
        raise bad_request("You must set `--enable-prompt-embeds` to input `prompt_embeds`", kind)
    if kind not in _MODALITY:
        supported = ", ".join(sorted((*_MODALITY, *_TEXTS, "prompt_embeds")))
        message = f"Unsupported chat content part type: {kind!r}. Supported types: {supported}."
        raise bad_request(message, "type")
    if kind.endswith("_embeds"):
        return _embeds(part, kind, with_sound)
    return _raw(part, kind, with_sound)


def _kind(part: Json) -> str:
    kind = part.get("type")
    if kind is None or part.get("uuid") is not None:
        return _kind_by_key(part)
    if not isinstance(kind, str):
        raise bad_request("Invalid 'type' field in multimodal part.", "type")
    return kind


def _kind_by_key(part: Json) -> str:
    # Beside video_embeds, audio_embeds are the sound track.
    soundtrack = "audio_embeds" if part.get("type") == "video_embeds" else None
    for key in _BY_KEY:
        if key in part and key != soundtrack:
            return key
    raise bad_request("Missing 'type' field in multimodal part.", "type")


def _text(value: Any) -> str:
    if not isinstance(value, str | None):
        raise bad_schema("Input should be a valid string", "body.messages")
    return value or ""


def _embeds(part: Json, kind: str, with_sound: bool) -> list[Item]:
    items = [_embeds_item(part, kind)]
    if kind == "video_embeds" and "audio_embeds" in part:
        if not with_sound:
            raise bug("Failed to apply prompt replacement for mm_items['audio'][0]")
        items.append(_embeds_item(part, "audio_embeds"))
    return items


def _embeds_item(part: Json, kind: str) -> Item:
    payload = part.get(kind)
    data = payload if isinstance(payload, dict | str) else None
    return Item(_MODALITY[kind], embeds=True, uuid=_uuid(part), data=data)


def _raw(part: Json, kind: str, with_sound: bool) -> list[Item]:
    modality, url = _MODALITY[kind], _url(part, kind)
    data = fetch(url, modality) if url else None
    item = Item(modality, embeds=False, uuid=_uuid(part), data=data)
    if url and with_sound and modality == "video":
        return [item, Item("audio", embeds=False, uuid=item.uuid, data=data)]
    return [item]


def _url(part: Json, kind: str) -> str | None:
    payload = part.get("image_url" if kind == "input_image" else kind)
    if part.get("uuid") is None and part.get("type") is not None:
        # Only here does vLLM validate the payload against its type.
        wanted = str if kind == "input_image" else dict
        if payload is not None and not isinstance(payload, wanted):
            raise bad_schema(f"Input should be a valid {wanted.__name__}", f"body.{kind}")
    if isinstance(payload, dict) and kind == "input_audio":
        data = payload.get("data")
        return f"data:audio/{payload.get('format')};base64,{data}" if data else None
    url = payload.get("url") if isinstance(payload, dict) else payload
    return url if isinstance(url, str) else None


def _uuid(part: Json) -> str | None:
    return None if part.get("uuid") is None else str(part["uuid"])
