"""
Does a proxy do its work? One request, and what every engine and the caller got of it.

Whatever is measured is checked first: a proxy that drops an image is fast.
"""

from __future__ import annotations

import base64
import struct
from typing import Any

from perf.bodies import Shape, body_of, request_of
from perf.engines import DECODED, KV_HANDLE, STAMP, grid_of, streamed
from perf.fleet import Engines, Failed, Running

Request = dict[str, Any]


def check(one: Running, engines: Engines, shape: Shape, *, chunks: int = 8) -> None:
    """Raises Failed, which says what is wrong."""
    subject = one.subject
    engines.reset(keep=True, chunks=chunks, old_reports=subject.old_reports)
    status, answer = one.post(body_of(shape))
    _, kept = engines.report()
    engines.reset()
    _need(status == 200, f"answered with status {status}: {answer[:200]!r}")
    _check_answer(answer, shape, chunks)
    _need(len(kept["decode"]) == 1, f"decode was called {len(kept['decode'])} times")
    sent, decode = request_of(shape), kept["decode"][0]
    consumer = decode
    if engines.urls["prefill"]:
        _need(len(kept["prefill"]) == 1, f"prefill was called {len(kept['prefill'])} times")
        consumer = kept["prefill"][0]
        _check_prefill(consumer, decode, encodes=subject.encodes)
    expected: list[Any] = sent["messages"]
    if subject.encodes:
        uuids = _check_encoders(kept["encode"], sent)
        expected = _rewritten(sent, uuids, old=subject.old_reports)
        if not subject.old_reports:
            handles = consumer.get("ec_transfer_params") or {}
            _need(uuids.keys() <= handles.keys(), "the handles of embeddings are missing")
    _need(consumer["messages"] == expected, "the messages that prefill got are not right")
    _need(decode["messages"] == expected, "the messages that decode got are not right")
    for name, value in sent.items():
        if name != "messages":
            _need(decode.get(name) == value, f"what decode got as {name} is not what was sent")


def _need(holds: bool, reason: str) -> None:
    if not holds:
        raise Failed(reason)


def _check_answer(answer: bytes, shape: Shape, chunks: int) -> None:
    expected = streamed(chunks) if shape.stream else DECODED
    got = STAMP.sub(b'"at":"%020d"' % 0, answer)
    _need(got == expected, "the caller did not get decode's bytes")


def _check_prefill(prefill: Request, decode: Request, *, encodes: bool) -> None:
    cut = prefill.get("max_tokens") == 1 and not prefill.get("stream")
    _need(cut, "prefill was not asked for one token")
    if encodes:
        asked = prefill.get("kv_transfer_params") or {}
        _need(asked.get("do_remote_decode") is True, "prefill was not told that decode is remote")
    handle = decode.get("kv_transfer_params") or {}
    _need(handle == KV_HANDLE, "decode did not get prefill's handle")


def _images(requests: list[Request]) -> list[Request]:
    contents = [m["content"] for r in requests for m in r["messages"]]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part for part in parts if part["type"] == "image_url"]


def _check_encoders(got: list[Request], sent: Request) -> dict[str, str]:
    """The URL of each image by the uuid that it was encoded under."""
    encoded = {part["image_url"]["url"]: part.get("uuid", "") for part in _images(got)}
    wanted = sorted(part["image_url"]["url"] for part in _images([sent]))
    once = sorted(part["image_url"]["url"] for part in _images(got)) == wanted
    _need(once, "the encoders did not get each image once and whole")
    _need(all(encoded.values()), "an encoder was told no uuid")
    return {uuid: url for url, uuid in encoded.items()}


def _rewritten(sent: Request, uuids: dict[str, str], *, old: bool) -> list[Any]:
    """The messages as prefill and decode should get them."""
    by_url = {url: uuid for uuid, url in uuids.items()}

    def rewrite(part: Request) -> Request:
        if part["type"] != "image_url":
            return part
        url = part["image_url"]["url"]
        grid = grid_of(url.encode())
        metadata = {"image_grid_thw": _Tensor(grid) if old else grid}
        return {"type": "image_embeds", "image_embeds": metadata, "uuid": by_url[url]}

    messages: list[Any] = [dict(message) for message in sent["messages"]]
    for message in messages:
        if isinstance(message["content"], list):
            message["content"] = [rewrite(part) for part in message["content"]]
    return messages


class _Tensor:
    """Equal to the base64 of any file that holds these numbers, as a saved tensor does."""

    def __init__(self, values: list[int]) -> None:
        self._raw = struct.pack(f"<{len(values)}q", *values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self._raw in base64.b64decode(other)

    __hash__ = None  # type: ignore[assignment]
