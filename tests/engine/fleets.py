"""
The proxy, a process, in front of oracles, and what every stage saw of a request.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from epd_proxy.servers import serving
from tests.driver import CHAT
from tests.engine.oracles import Oracle, Verdict
from tests.processes import LIMIT, listening

TOPOLOGIES = {
    "E+PD": {"encode": "encode", "decode": "pd"},
    "E+P+D": {"encode": "encode", "prefill": "prefill", "decode": "decode"},
}
"""For each stage, the role of its oracle."""

MODEL = "oracle"
"""What every oracle calls itself."""

WISHES: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_completion_tokens": 7,
    "max_tokens": 5,
    "min_tokens": 2,
    "n": 2,
    "temperature": 0.7,
    "priority": 4,
}
"""What is for decode alone, and what is for all."""

MEDIA = {"image_url", "video_url", "audio_url", "input_audio"}


class Seen(NamedTuple):
    """What the stages made of one request, and what the caller got."""

    answer: httpx.Response
    encode: list[Verdict]
    prefill: list[Verdict]
    decode: list[Verdict]

    @property
    def consumer(self) -> Verdict:
        """Who the embeddings are for."""
        (verdict,) = self.prefill or self.decode
        return verdict

    @property
    def decoder(self) -> Verdict:
        (verdict,) = self.decode
        return verdict

    @property
    def report(self) -> dict[str, Any]:
        """All that the encoders reported."""
        reports = (verdict["engine"]["encoder_report"] for verdict in self.encode)
        return {key: entry for report in reports for key, entry in report.items()}


@dataclass(frozen=True)
class Fleet:
    engines: Mapping[str, Oracle]
    stages: Mapping[str, str]
    url: str = ""
    """The proxy's."""

    @property
    def has_prefill(self) -> bool:
        return "prefill" in self.stages

    @contextmanager
    def behind(self, *flags: str, **others: str) -> Iterator[Fleet]:
        """The same engines behind another proxy; ``others`` stand in for a stage's oracle."""
        urls = {stage: self.engines[role].url for stage, role in self.stages.items()} | others
        addresses = [word for stage, url in urls.items() for word in (f"--{stage}", url)]
        with listening("serve", *addresses, *flags) as url:
            yield replace(self, url=url)

    def ask(self, body: Mapping[str, Any], **counts: int) -> Seen:
        """Through the proxy."""
        self.forget()
        answer = _post(self.url, body)
        try:
            return Seen(answer, **self.verdicts(body["messages"], **counts))
        except AssertionError as exc:
            exc.add_note(f"The caller got {answer.status_code}: {answer.text[:1000]}")
            raise

    async def ask_with_encoder(
        self, entry_of: Callable[[dict[str, Any]], dict[str, Any]], body: Mapping[str, Any]
    ) -> Seen:
        """With an encoder of ours, which reports what ``entry_of`` makes of a part."""
        async with serving(scripted_encoder(entry_of), "127.0.0.1", 0) as encoder:
            with self.behind(encode=encoder) as other:
                return await asyncio.to_thread(other.ask, body, encode=0)

    def forget(self) -> None:
        """What an earlier test may have left."""
        for engine in self.engines.values():
            engine.drain()

    def verdicts(self, messages: Any, **counts: int) -> dict[str, list[Verdict]]:
        """Of each stage, which must have been called as often as the media call for."""
        expected = {"encode": _encode_calls(messages), "prefill": 1, "decode": 1, **counts}
        return {
            stage: self.engines[self.stages[stage]].take(count) if stage in self.stages else []
            for stage, count in expected.items()
        }

    def ask_directly(self, body: Mapping[str, Any]) -> Verdict:
        """
        Without the proxy: what a server that does everything itself makes of it.

        Media that have names get others: a server that has met a name both with media and as a
        reference may mix them up.
        """
        self.forget()
        _post(self.engines["pd"].url, {**body, "messages": _renamed(body["messages"])})
        (verdict,) = self.engines["pd"].take(1)
        return verdict


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    """A body of messages; of content parts, one message of the user."""
    if "role" not in messages[0]:
        messages = ({"role": "user", "content": list(messages)},)
    return {"model": MODEL, "messages": list(messages), **fields}


def media_of(messages: Any) -> list[dict[str, Any]]:
    contents = (message["content"] for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part for part in parts if MEDIA & part.keys()]


def _renamed(messages: Any) -> Any:
    renamed = copy.deepcopy(messages)
    for part in media_of(renamed):
        if "uuid" in part:
            part["uuid"] = f"{part['uuid']} itself"
    return renamed


def _encode_calls(messages: Any) -> int:
    """Images share a call, every other item has its own."""
    images = ["image_url" in part for part in media_of(messages)]
    return any(images) + images.count(False)


def _post(url: str, body: Mapping[str, Any]) -> httpx.Response:
    return httpx.post(url + CHAT, json=body, trust_env=False, timeout=LIMIT)


def scripted_encoder(entry_of: Callable[[dict[str, Any]], dict[str, Any]]) -> ASGIApp:
    """An encoder that reports of each part what ``entry_of`` says, under the part's uuid."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = json.loads(await Request(scope, receive).body())
        parts = body["messages"][0]["content"]
        report = {
            part["uuid"]: {"item_indices": [index], **entry_of(part)}
            for index, part in enumerate(parts)
        }
        choice = {"index": 0, "message": {"role": "assistant"}, "finish_reason": "stop"}
        reply = {"choices": [choice], "ec_transfer_params": report}
        await JSONResponse(reply)(scope, receive, send)

    return answer
