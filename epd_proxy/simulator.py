"""
Scripted encode, prefill and decode engines that talk like vLLM 0.33.0.

For the demo and for tests: no model, but the same checks, reports, handles and
answers on the wire. Nothing is imported from the rest of the package, so that
a mistake of the proxy is not repeated here.

A chat request passes through this file from top to bottom:

* the body is checked        ``_load``, ``_check``            or EngineError
* its parts become items     ``_read_messages``               or EngineError
* an item gets its mm_hash   ``_mm_hash``, ``_measure``
* encode reports             ``_report``
* prefill, decode look for   ``_embedding_lost``, ``_kv_lost``  or a lost Reply
* the Reply is written       ``_whole``, ``_events``
* and ``Simulator`` holds what one engine remembers, and serves HTTP

An EngineError has a true status. A lost Reply is found after the front-end has
let the request through: a 500, or an error event in a stream that began as 200.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
import math
import time
import uuid
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from starlette.types import Receive, Scope, Send

Json = dict[str, Any]

ROLES = ("encode", "prefill", "decode", "prefill_decode")
MODALITIES = ("image", "video", "audio")

_CHAT = "/v1/chat/completions"
_INTERNAL = (
    b'{"error":{"message":"Internal server error","type":"InternalServerError",'
    b'"param":null,"code":500}}'
)
_REMEMBERED = 4096


@dataclass(frozen=True)
class Received:
    """One request to ``/v1/chat/completions``, as it arrived."""

    headers: list[tuple[bytes, bytes]]
    body: bytes


@dataclass(frozen=True)
class Failure:
    """Answered instead of a chat request, at once and byte for byte."""

    status: int
    body: bytes = _INTERNAL
    content_type: str = "application/json"
    headers: Sequence[tuple[str, str]] = ()

    def response(self) -> Response:
        response = Response(self.body, self.status)
        response.headers["content-type"] = self.content_type
        for name, value in self.headers:
            response.headers.append(name, value)
        return response


class EngineError(Exception):
    """A request that vLLM's front-end does not let through."""

    def __init__(
        self, message: str, kind: str = "BadRequestError", status: int = 400, param: Any = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = {"message": message, "type": kind, "param": param, "code": status}

    def response(self) -> Response:
        return JSONResponse({"error": self.error}, self.status)


def _bad_request(message: str, param: str) -> EngineError:
    return EngineError(f"{message} (parameter={param})", param=param)


def _bad_schema(problem: str, location: str) -> EngineError:
    message = f"1 validation error:\n  {{'loc': '{location}', 'msg': '{problem}'}}"
    return EngineError(message, "Bad Request", param=location)


def _bug(message: str) -> EngineError:
    return EngineError(message, "InternalServerError", 500)


# The body


_SCHEMA: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("model", "cache_salt"), str),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens", "n"), int),
    **dict.fromkeys(("stream_options", "mm_processor_kwargs", "media_io_kwargs"), dict),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), dict),
    "stream": bool,
    "stop": (str, list),
}
_MAX_N = 16384


def _load(raw: bytes) -> Any:
    """The JSON value of a body, or None where vLLM finds none."""
    try:
        text = raw.decode()
        value = json.loads(text)
        if "\\u" in text:
            # A lone surrogate passes json.loads, and no tokenizer.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


def _check(headers: Headers, body: Any, model: str) -> None:
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise _bad_schema("Input should be a valid dictionary", "body")
    if not isinstance(body, dict):
        raise _bad_schema("JSON decode error", "body")
    _check_schema(body)
    _check_model(body.get("model"), model)
    _check_options(body)
    _check_limits(body)
    for name in ("kv_transfer_params", "ec_transfer_params"):
        _check_integers(body.get(name))
    if not body["messages"]:
        raise EngineError("Cannot apply chat template to an empty conversation.")


def _check_schema(body: Json) -> None:
    for name, kind in _SCHEMA.items():
        if body.get(name) is not None and not isinstance(body[name], kind):
            raise _bad_schema("Input has a wrong type", f"body.{name}")
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise _bad_schema("Field required", "body.messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _bad_schema("Input should be a message with a role", "body.messages")
        if not isinstance(message.get("content"), str | list | None):
            raise _bad_schema("Input should be a string or a list", "body.messages")


def _check_model(asked: str | None, model: str) -> None:
    if asked and model not in ("*", asked):
        message = f"The model `{asked}` does not exist. Valid aliases: {model}."
        raise EngineError(message, "NotFoundError", 404, "model")


def _check_options(body: Json) -> None:
    if body.get("stream_options") is not None and not body.get("stream"):
        message = "Stream options can only be defined when `stream=True`."
        raise _bad_request(message, "stream_options")
    salt = body.get("cache_salt")
    if salt is not None and (not 1 <= len(salt) <= 128 or set(salt) & set("@/\\\0")):
        raise _bad_request("cache_salt must be 1 to 128 plain characters.", "cache_salt")


def _check_limits(body: Json) -> None:
    limit, least, n = _token_limit(body), body.get("min_tokens") or 0, _choices(body)
    if limit is not None and limit < 1:
        raise _bad_request(f"max_tokens must be at least 1, got {limit}.", "max_tokens")
    if limit is not None and least > limit:
        message = f"min_tokens must be less than or equal to max_tokens={limit}, got {least}."
        raise EngineError(message)
    if not 1 <= n <= _MAX_N:
        raise _bad_request(f"n must be between 1 and {_MAX_N}, got {n}.", "n")
    if n > 1 and body.get("temperature") == 0:
        raise EngineError(f"n must be 1 when using greedy sampling, got {n}.")


def _check_integers(params: Any) -> None:
    rest = [params]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            rest.extend(value.values())
        elif isinstance(value, list):
            rest.extend(value)
        elif isinstance(value, int) and not -(2**63) <= value < 2**64:
            message = "extra_args integers must be between -2**63 and 2**64 - 1."
            raise _bad_request(message, "extra_args")


def _token_limit(body: Json) -> int | None:
    limit: int | None = body.get("max_completion_tokens")
    return body.get("max_tokens") if limit is None else limit


def _choices(body: Json) -> int:
    n: int | None = body.get("n")
    return 1 if n is None else n


# Parts of messages


# With a uuid, or without a type, the first of these keys decides, in this order.
_BY_KEY = ["image_url", "image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"]
_BY_KEY += ["audio_url", "input_audio", "video_url"]
_TEXTS = dict.fromkeys(("text", "input_text", "output_text"), "text")
_TEXTS |= {"refusal": "refusal", "thinking": "thinking", "tool_reference": "name"}
_MEDIA = dict.fromkeys(("image_url", "input_image", "image_embeds"), "image")
_MEDIA |= dict.fromkeys(("audio_url", "input_audio", "audio_embeds"), "audio")
_MEDIA |= dict.fromkeys(("video_url", "video_embeds"), "video")
# The keys that may be JSON arrays in place of tensors.
_METADATA = {
    "image": ("image_grid_thw",),
    "video": ("video_grid_thw", "second_per_grid_ts"),
    "audio": ("audio_num_tokens", "audio_feature_lengths"),
}
_IMAGES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a")
# A zip or a pickle that torch reads, or a numpy file.
_TENSORS = (b"PK\x03\x04", b"\x80\x02", b"\x93NUMPY")


@dataclass(frozen=True)
class Item:
    """One media item; of a video with its sound track there are two."""

    modality: str
    embeds: bool
    uuid: str | None
    # Bytes of raw media, metadata or base64 of embeds, None for "you have it".
    data: Any


def _read_messages(body: Json) -> tuple[list[Item], str]:
    """All items, and the last text a user said."""
    with_sound = bool((body.get("mm_processor_kwargs") or {}).get("use_audio_in_video"))
    items: list[Item] = []
    words = ""
    for message in body["messages"]:
        content = message.get("content") or []
        for part in [content] if isinstance(content, str) else content:
            found = _read_part(part, with_sound)
            if not isinstance(found, str):
                items += found
            elif found and message["role"] == "user":
                words = found
    return items, words


def _read_part(part: Any, with_sound: bool) -> str | list[Item]:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise _bad_schema("Input should be a string or an object", "body.messages")
    kind = _kind(part)
    if kind in _TEXTS:
        return _text(part.get(_TEXTS[kind]))
    if kind == "prompt_embeds":
        raise _bad_request("You must set `--enable-prompt-embeds` to input `prompt_embeds`", kind)
    if kind not in _MEDIA:
        supported = ", ".join(sorted((*_MEDIA, *_TEXTS, "prompt_embeds")))
        message = f"Unsupported chat content part type: {kind!r}. Supported types: {supported}."
        raise _bad_request(message, "type")
    read = _embeds if kind.endswith("_embeds") else _raw
    return read(part, kind, with_sound)


def _kind(part: Json) -> str:
    kind = part.get("type")
    if kind is None or part.get("uuid") is not None:
        for key in _BY_KEY:
            if key in part and (key, kind) != ("audio_embeds", "video_embeds"):
                return key
        raise _bad_request("Missing 'type' field in multimodal part.", "type")
    if not isinstance(kind, str):
        raise _bad_request("Invalid 'type' field in multimodal part.", "type")
    return kind


def _text(value: Any) -> str:
    if not isinstance(value, str | None):
        raise _bad_schema("Input should be a valid string", "body.messages")
    return value or ""


def _uuid(part: Json) -> str | None:
    return None if part.get("uuid") is None else str(part["uuid"])


def _embeds(part: Json, kind: str, with_sound: bool) -> list[Item]:
    kinds = [kind]
    if kind == "video_embeds" and "audio_embeds" in part:
        if not with_sound:
            raise _bug("Failed to apply prompt replacement for mm_items['audio'][0]")
        kinds.append("audio_embeds")
    payloads = [(each, part.get(each)) for each in kinds]
    return [
        Item(_MEDIA[each], True, _uuid(part), data if isinstance(data, dict | str) else None)
        for each, data in payloads
    ]


def _raw(part: Json, kind: str, with_sound: bool) -> list[Item]:
    modality, url = _MEDIA[kind], _url(part, kind)
    item = Item(modality, False, _uuid(part), _fetch(url, modality) if url else None)
    if url and with_sound and modality == "video":
        return [item, Item("audio", False, item.uuid, item.data)]
    return [item]


def _url(part: Json, kind: str) -> str | None:
    payload = part.get("image_url" if kind == "input_image" else kind)
    if part.get("uuid") is None and part.get("type") is not None:
        # Only here does vLLM validate the payload against its type.
        wanted = str if kind == "input_image" else dict
        if payload is not None and not isinstance(payload, wanted):
            raise _bad_schema(f"Input should be a valid {wanted.__name__}", f"body.{kind}")
    if isinstance(payload, dict) and kind == "input_audio":
        data = payload.get("data")
        return f"data:audio/{payload.get('format')};base64,{data}" if data else None
    url = payload.get("url") if isinstance(payload, dict) else payload
    return url if isinstance(url, str) else None


def _fetch(url: str, modality: str) -> bytes:
    """The bytes behind a URL; those of http are its text, for nothing is fetched."""
    scheme = url.partition(":")[0].lower()
    if scheme in ("http", "https"):
        return url.encode()
    if scheme == "file":
        raise EngineError("Cannot load local files without `--allowed-local-media-path`.")
    if scheme != "data":
        raise EngineError("The URL must be either a HTTP, data or file URL.")
    content = _from_data_url(url)
    if not content or (modality == "image" and not _is_image(content)):
        raise EngineError(f"Failed to load {modality}: cannot identify {modality} file")
    return content


def _from_data_url(url: str) -> bytes:
    head, comma, data = url.partition(",")
    if not comma:
        raise EngineError(f"Invalid data URL {url[:32]!r}: missing ',' separator.")
    if not head.endswith(";base64"):
        message = "Only base64 data URLs are supported for now."
        raise EngineError(message, "NotImplementedError", 501)
    return _from_base64(data)


def _from_base64(data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        raise EngineError("Non-base64 digit found") from None


def _is_image(content: bytes) -> bool:
    if content.startswith(_IMAGES[0]):
        return len(content) >= 24 and 0 not in _png_size(content)
    return content.startswith(_IMAGES) or (content[:4], content[8:12]) == (b"RIFF", b"WEBP")


def _png_size(png: bytes) -> tuple[int, int]:
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def _check_items(items: list[Item], role: str) -> None:
    for item in items:
        if item.embeds and role == "encode":
            name = f"{item.modality}_embeds"
            raise _bad_request(f"You must set `--enable-mm-embeds` to input `{name}`", name)
    for modality in MODALITIES:
        group = [item for item in items if item.modality == modality]
        if len({item.embeds for item in group}) > 1:
            message = f"Mixing raw {modality} and embedding inputs is not allowed"
            raise _bad_request(message, f"{modality}_embeds")
        _check_embeds(modality, [item.data for item in group if item.embeds])


def _check_embeds(modality: str, payloads: list[Any]) -> None:
    forms = [type(payload) for payload in payloads]
    if len(set(forms)) > 1:
        if forms[0] is dict and None in payloads:
            raise _bug("'NoneType' object has no attribute 'items'")
        raise EngineError(str(forms[0]), "NotImplementedError", 501)
    for payload in payloads:
        if isinstance(payload, str):
            _check_tensor(modality, payload)
        elif payload is not None:
            _check_metadata(modality, payload)
    if dict in forms and len({frozenset(payload) for payload in payloads}) > 1:
        raise EngineError("All dictionaries in the list of embeddings must have the same keys.")


def _check_metadata(modality: str, payload: Json) -> None:
    for key, value in payload.items():
        if isinstance(value, str):
            _check_tensor(modality, value)
        elif isinstance(value, list):
            _check_array(modality, key, value)
        else:
            raise _bug(f"{type(value).__name__!r} object has no attribute 'ndim'")
    if payload.keys().isdisjoint(_METADATA[modality]):
        raise EngineError(f"The data should contain the fields: {set(_METADATA[modality])}")


def _check_tensor(modality: str, data: str) -> None:
    content = _from_base64(data)
    # vLLM reads numpy files for images and videos only.
    if not content.startswith(_TENSORS[:2] if modality == "audio" else _TENSORS):
        raise _bug("unpack requires a buffer of 4 bytes")


def _check_array(modality: str, key: str, values: list[Any]) -> None:
    if key not in _METADATA[modality]:
        raise EngineError(f"JSON arrays are only supported for metadata: {key}")
    if not all(_is_number(value) for value in values):
        raise EngineError(f"Metadata {key} must be a finite numeric array.")
    if any(isinstance(value, int) and not -(2**63) <= value < 2**63 for value in values):
        raise EngineError(f"Invalid metadata array: {key}")
    if key == "audio_num_tokens" and not (len(values) == 1 and _counts(values)):
        raise EngineError(f"{key} must contain one positive integer per audio")
    if not values:
        raise _bug(f"Expected there to be 1 prompt placeholders for {key}, but found 0")


def _is_number(value: Any) -> bool:
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))


def _counts(values: list[Any]) -> bool:
    return all(type(value) is int and value > 0 for value in values)


# Items in the engine


@dataclass(frozen=True)
class Feature:
    """What an item becomes in the engine."""

    modality: str
    mm_hash: str
    metadata: Json
    # True if the embedding must come from somewhere else.
    reference: bool = False


def _mm_hash(item: Item, body: Json, model: str) -> str:
    """The uuid, or the content in its place, unless options change what it becomes."""
    identity = item.uuid
    if identity is None:
        raw = item.data if isinstance(item.data, bytes) else _dump(item.data).encode()
        # Not the bare hash: no proxy can guess it from the URL.
        identity = "content-" + hashlib.sha256(item.modality.encode() + raw).hexdigest()
    options = (
        body.get("mm_processor_kwargs"),
        (body.get("media_io_kwargs") or {}).get(item.modality),
    )
    if not any(options):
        return identity
    named = _dump([model, item.modality, identity, *options])
    return hashlib.sha256(named.encode()).hexdigest()


def _dump(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _measure(modality: str, content: bytes) -> Json:
    """Metadata of raw media: of a PNG by its size, else made up from the bytes."""
    first, second = hashlib.sha256(content).digest()[:2]
    if modality == "audio":
        return {"audio_num_tokens": [1 + first]}
    height, width = 1 + first % 8, 1 + second % 8
    if content.startswith(_IMAGES[0]):
        width, height = (math.ceil(side / 28) for side in _png_size(content))
    grid = [1, 2 * height, 2 * width]
    if modality == "image":
        return {"image_grid_thw": grid}
    return {"video_grid_thw": grid, "second_per_grid_ts": [1.0]}


def _grid(metadata: Json) -> list[Any] | None:
    grids = (metadata.get(f"{modality}_grid_thw") for modality in ("image", "video"))
    return next((grid for grid in grids if isinstance(grid, list)), None)


def _tokens(metadata: Json) -> int | None:
    """How long the embedding must be; None if the metadata does not say."""
    grid = _grid(metadata)
    if grid is not None:
        return math.prod(grid) // 4 if _counts(grid) else None
    counts = metadata.get("audio_num_tokens")
    return counts[0] if isinstance(counts, list) else None


def _report(features: list[Feature]) -> Json | None:
    report: Json = {}
    for index, feature in enumerate(features):
        tokens = _tokens(feature.metadata) or 0
        entry: Json = {"modality": feature.modality, "item_indices": []}
        entry |= {"metadata": feature.metadata, "peer_host": "127.0.0.1", "peer_port": 5601}
        entry |= {"size_bytes": tokens * 2048 * 2, "shape": [tokens, 2048]}
        entry = report.setdefault(feature.mm_hash, entry)
        entry["item_indices"].append(index)
    return report or None


def _lost(role: str, features: list[Feature], body: Json, fresh: bool) -> bool:
    references = [feature for feature in features if feature.reference]
    if any(_breaks_worker(feature.metadata) for feature in references):
        return True
    if role == "decode":
        return _kv_lost(body.get("kv_transfer_params") or {}, bool(references), fresh)
    handles = body.get("ec_transfer_params") or {}
    return any(_embedding_lost(feature, handles) for feature in references)


def _breaks_worker(metadata: Json) -> bool:
    grid = _grid(metadata)
    return grid is not None and not (len(grid) == 3 and _counts(grid))


def _embedding_lost(feature: Feature, handles: Json) -> bool:
    handle = handles.get(feature.mm_hash)
    if not isinstance(handle, dict) or "peer_host" not in handle:
        return True
    shape, tokens = handle.get("shape"), _tokens(feature.metadata)
    return isinstance(shape, list) and tokens is not None and shape[:1] != [tokens]


def _kv_lost(handle: Json, has_references: bool, fresh: bool) -> bool:
    if not handle.get("do_remote_prefill"):
        return has_references
    names = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
    complete = isinstance(handle.get("remote_block_ids"), list)
    return not (fresh and complete and all(handle.get(name) is not None for name in names))


# Answers


@dataclass(frozen=True)
class Reply:
    """An answer before it is written down, whole or as a stream."""

    id: str
    model: str
    fingerprint: str
    created: int
    choices: int
    prompt_tokens: int
    pieces: list[str]
    finish_reason: str
    stop_reason: str | None
    kv: Json | None
    ec: Json | None
    stream: bool
    include_usage: bool
    lost: bool

    def usage(self) -> Json:
        made = self.choices * len(self.pieces)
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + made,
            "completion_tokens": made,
        }


def _sentence(features: list[Feature], words: str) -> str:
    groups = Counter(feature.modality for feature in features)
    media = " and ".join(
        f"{count} {modality}{'s' * (count > 1)} ({_labels(features, modality)})"
        for modality, count in groups.items()
    )
    return f"I was given {media or 'no media'} and the words: {words[:200]}. 这是模拟的回答 🟥🙂。"


def _labels(features: list[Feature], modality: str) -> str:
    return ", ".join(_label(each.metadata) for each in features if each.modality == modality)


def _label(metadata: Json) -> str:
    for key, value in metadata.items():
        if isinstance(value, list):
            name = "grid" if key.endswith("_grid_thw") else key
            return f"{name} {'x'.join(map(str, value))}"
    return "tensor"


def _speak(text: str, chunks: int, body: Json) -> tuple[list[str], str, str | None]:
    """The pieces of a text, one token each, with finish_reason and stop_reason."""
    text *= math.ceil(chunks / len(text))
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    found = [(text.index(word), word) for word in stops if isinstance(word, str) and word in text]
    end, stop_reason = min(found, default=(len(text), None))
    pieces = _cut(text[:end], chunks)
    limit = _token_limit(body)
    # The end of a text is a token too: a limit just reached has cut it off.
    if limit is not None and limit <= len(pieces):
        return pieces[:limit], "length", None
    return pieces, "stop", stop_reason


def _cut(text: str, chunks: int) -> list[str]:
    count = min(chunks, len(text))
    borders = [len(text) * index // count for index in range(count + 1)] if count else []
    return [text[start:end] for start, end in itertools.pairwise(borders)]


def _whole(reply: Reply) -> Response:
    if reply.lost:
        return Failure(500).response()
    message: Json = {"role": "assistant", "content": "".join(reply.pieces)}
    message |= dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
    choice: Json = {"message": message, "logprobs": None, "finish_reason": reply.finish_reason}
    choice |= {"stop_reason": reply.stop_reason}
    choice |= dict.fromkeys(("token_ids", "routed_experts", "weight_versions"))
    details = dict.fromkeys(("prompt_tokens_details", "completion_tokens_details"))
    prompt = dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "prompt_text"))
    return JSONResponse(
        {
            **_head(reply, "chat.completion"),
            "choices": [{"index": index, **choice} for index in range(reply.choices)],
            "service_tier": None,
            "system_fingerprint": reply.fingerprint,
            "usage": {**reply.usage(), **details},
            **prompt,
            "kv_transfer_params": reply.kv,
            "ec_transfer_params": reply.ec,
            "metrics": None,
        }
    )


def _head(reply: Reply, kind: str) -> Json:
    return {"id": reply.id, "object": kind, "created": reply.created, "model": reply.model}


def _events(reply: Reply) -> Iterator[bytes]:
    for index in range(reply.choices):
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        yield _chunk(reply, [choice], prompt_token_ids=None, prompt_text=None)
    if reply.lost:
        yield b"data: " + _INTERNAL + b"\n\n"
    else:
        yield from _content_events(reply)
    yield b"data: [DONE]\n\n"


def _content_events(reply: Reply) -> Iterator[bytes]:
    for piece in reply.pieces:
        for index in range(reply.choices):
            choice = {"index": index, "delta": {"content": piece}, "logprobs": None}
            choice |= {"finish_reason": None, "token_ids": None}
            yield _chunk(reply, [choice], kv_transfer_params=None)
    # The fingerprint stands on the last chunk only.
    mark = {"system_fingerprint": reply.fingerprint}
    for index in range(reply.choices):
        choice = {"index": index, "delta": {"content": ""}, "logprobs": None}
        choice |= {"finish_reason": reply.finish_reason, "stop_reason": reply.stop_reason}
        choice |= {"token_ids": None, "weight_versions": None}
        last = index == reply.choices - 1 and not reply.include_usage
        yield _chunk(reply, [choice], kv_transfer_params=reply.kv, **(mark if last else {}))
    if reply.include_usage:
        yield _chunk(reply, [], usage=reply.usage(), **mark)


def _chunk(reply: Reply, choices: list[Json], **extra: Any) -> bytes:
    chunk = {**_head(reply, "chat.completion.chunk"), "choices": choices, **extra}
    text = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"


# The engine


class Simulator:
    """
    One engine, an ASGI app.

    ``role`` is encode, prefill, decode or prefill_decode; ``model`` the one
    name it answers to, ``"*"`` for any. An answer takes ``latency`` seconds; in
    a stream the head comes at once, the first event after ``latency``, each
    further one after a twentieth of it. ``chunks`` is the number of content
    chunks, and of tokens, of an answer that nothing cuts short. ``name`` is
    told in ``system_fingerprint``.

    Tests look at ``received`` (newest last) and ``active`` (chat requests
    running now), and put what should go wrong into ``failures``.
    """

    def __init__(
        self,
        role: str,
        *,
        model: str = "epd-demo",
        latency: float = 0.0,
        chunks: int = 8,
        name: str = "",
    ) -> None:
        if role not in ROLES:
            raise ValueError(f"role must be one of {', '.join(ROLES)}, not {role!r}")
        if chunks < 1:
            raise ValueError(f"chunks must be at least 1, not {chunks}")
        self.role = role
        self.model = model
        self.latency = latency
        self.chunks = chunks
        self.name = name
        self.received: deque[Received] = deque(maxlen=64)
        self.failures: deque[Failure] = deque()
        self.active = 0
        self._engine_id = str(uuid.uuid4())
        self._blocks = itertools.count(1)
        # Raw media seen, by modality and mm_hash; KV handles spent.
        self._seen: dict[tuple[str, str], Json] = {}
        self._spent: dict[str, None] = {}

    def __repr__(self) -> str:
        return f"<Simulator {self.role} {self.name!r} [{self.active} active]>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        pages = {
            "/health": Response(),
            "/version": JSONResponse({"version": "0.33.0"}),
            "/v1/models": JSONResponse(self._models()),
        }
        allowed = "POST" if path == _CHAT else "GET"
        if path != _CHAT and path not in pages:
            response: Response = JSONResponse({"detail": "Not Found"}, 404)
        elif scope["method"] != allowed:
            headers = {"allow": allowed}
            response = JSONResponse({"detail": "Method Not Allowed"}, 405, headers)
        elif path == _CHAT:
            return await self._chat(scope, receive, send)
        else:
            response = pages[path]
        return await response(scope, receive, send)

    def _models(self) -> Json:
        model = {"id": self.model, "object": "model", "created": int(time.time())}
        model |= {"owned_by": "vllm", "root": self.model, "parent": None, "max_model_len": 16384}
        return {"object": "list", "data": [model]}

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            raw = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        self.received.append(Received(list(scope["headers"]), raw))
        answer = asyncio.ensure_future(self._answer(raw, scope, receive, send))
        leaving = asyncio.ensure_future(_caller_left(receive))
        try:
            await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        finally:
            answer.cancel()
            leaving.cancel()
            await asyncio.gather(answer, leaving, return_exceptions=True)

    async def _answer(self, raw: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        self.active += 1
        try:
            outcome = self._outcome(Headers(scope=scope), _load(raw))
            if isinstance(outcome, Response):
                await outcome(scope, receive, send)
            elif outcome.stream:
                await self._stream(outcome, send)
            else:
                await asyncio.sleep(self.latency)
                await _whole(outcome)(scope, receive, send)
        finally:
            self.active -= 1

    async def _stream(self, reply: Reply, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        pause = self.latency
        for event in _events(reply):
            await asyncio.sleep(pause)
            await send({"type": "http.response.body", "body": event, "more_body": True})
            pause = self.latency / 20
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _outcome(self, headers: Headers, body: Any) -> Response | Reply:
        # A decode that refuses a request has told prefill to free the blocks.
        fresh = self._spend(body)
        if self.failures:
            return self.failures.popleft().response()
        try:
            _check(headers, body, self.model)
            return self._reply(headers, body, fresh)
        except EngineError as error:
            return error.response()

    def _spend(self, body: Any) -> bool:
        """Whether the KV handle of a body, if it has one, comes for the first time."""
        handle = body.get("kv_transfer_params") if isinstance(body, dict) else None
        if not isinstance(handle, dict) or not handle.get("do_remote_prefill"):
            return True
        name = str(handle.get("remote_request_id"))
        fresh = name not in self._spent
        _remember(self._spent, name, None)
        return fresh

    def _reply(self, headers: Headers, body: Json, fresh: bool) -> Reply:
        items, words = _read_messages(body)
        _check_items(items, self.role)
        features = self._features(items, body)
        sized = (_tokens(feature.metadata) or 1 for feature in features)
        prompt_tokens = 8 + len(words) // 4 + int(sum(sized))
        pieces, finish_reason, stop_reason = self._speech(features, words, body)
        name = _request_id(headers, body)
        return Reply(
            id=name,
            model=body.get("model") or self.model,
            fingerprint=f"epd-simulator-{self.name}",
            created=int(time.time()),
            choices=_choices(body),
            prompt_tokens=prompt_tokens,
            pieces=pieces,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            kv=self._kv_handle(name, body, prompt_tokens) if finish_reason == "length" else None,
            ec=_report(features) if self.role == "encode" else None,
            stream=bool(body.get("stream")),
            include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
            lost=_lost(self.role, features, body, fresh),
        )

    def _features(self, items: list[Item], body: Json) -> list[Feature]:
        counts: Counter[str] = Counter()
        features = []
        for item in items:
            features.append(self._feature(item, counts[item.modality], body))
            counts[item.modality] += 1
        return features

    def _feature(self, item: Item, index: int, body: Json) -> Feature:
        if item.data is None and item.uuid is None:
            name = f"['{item.modality}'][{index}]"
            message = f"multi_modal_data{name} is empty but multi_modal_uuids{name} is missing."
            raise _bad_request(message, "multi_modal_uuids")
        mm_hash = _mm_hash(item, body, self.model)
        if item.embeds and item.data is not None:
            tensor = isinstance(item.data, str) or f"{item.modality}_embeds" in item.data
            metadata = {} if isinstance(item.data, str) else item.data
            return Feature(item.modality, mm_hash, metadata, reference=not tensor)
        known = self._seen.get((item.modality, mm_hash))
        if known is None:
            if item.data is None:
                problem = f"Cache miss for {item.modality} at index {index}"
                raise EngineError(f"{problem} but data is not provided.")
            known = _measure(item.modality, item.data)
            _remember(self._seen, (item.modality, mm_hash), known)
        return Feature(item.modality, mm_hash, known)

    def _speech(
        self, features: list[Feature], words: str, body: Json
    ) -> tuple[list[str], str, str | None]:
        if self.role == "encode":
            return [], "stop", None
        return _speak(_sentence(features, words), self.chunks, body)

    def _kv_handle(self, name: str, body: Json, tokens: int) -> Json | None:
        asked = body.get("kv_transfer_params") or {}
        if self.role != "prefill" or not asked.get("do_remote_decode"):
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[next(self._blocks) for _ in range(math.ceil(tokens / 16))]],
            "remote_engine_id": self._engine_id,
            "remote_request_id": f"{name}-{uuid.uuid4().hex[:8]}",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            **dict.fromkeys(("tp_size", "dcp_size", "pp_size"), 1),
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": None,
            "remote_registration_generation": 1,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }


def _request_id(headers: Headers, body: Json) -> str:
    name = headers.get("x-request-id") or body.get("request_id") or uuid.uuid4().hex
    return f"chatcmpl-{name}"


def _remember(memory: dict[Any, Any], key: Any, value: Any) -> None:
    memory[key] = value
    if len(memory) > _REMEMBERED:
        del memory[next(iter(memory))]


async def _caller_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _lifespan(receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "lifespan.shutdown":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})
