"""
Engines behind the proxy without sockets: a respx router behind ``httpx.MockTransport``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import respx

from epd_proxy import Config, EPDProxy
from tests.driver import CHAT

SAMPLES = Path(__file__).parent / "samples"


def sample(name: str) -> bytes:
    return (SAMPLES / name).read_bytes()


def json_sample(name: str) -> Any:
    return json.loads(sample(name))


class Engine:
    """One mocked engine: what it answers to chat requests, and what it received."""

    def __init__(self, router: respx.Router, url: str) -> None:
        self.url = url
        self.route = router.post(url + CHAT)

    def answers(self, *answers: httpx.Response | Exception | type[Exception]) -> Engine:
        """One after another; the last one again and again."""
        rest = list(answers)

        def answer(request: httpx.Request) -> httpx.Response:
            found = rest.pop(0) if len(rest) > 1 else rest[0]
            if isinstance(found, httpx.Response):
                return found
            raise found

        self.route.mock(side_effect=answer)
        return self

    @property
    def requests(self) -> list[httpx.Request]:
        return [call.request for call in self.route.calls]

    @property
    def raw(self) -> list[bytes]:
        return [request.content for request in self.requests]

    @property
    def bodies(self) -> list[Any]:
        return [json.loads(content) for content in self.raw]


class Backends:
    """A fleet of mocked engines, all of which answer well unless told otherwise."""

    def __init__(self, *, encode: int = 1, prefill: int = 0, decode: int = 1) -> None:
        self.router = respx.Router(assert_all_called=False)
        self.encode = [self._engine("e", n).answers(report(None)) for n in range(encode)]
        self.prefill = [self._engine("p", n).answers(prefilled()) for n in range(prefill)]
        self.decode = [self._engine("d", n).answers(decoded()) for n in range(decode)]

    def _engine(self, role: str, number: int) -> Engine:
        return Engine(self.router, f"http://{role}{number}:8000")

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self.router.async_handler)

    def proxy(self, **options: Any) -> EPDProxy:
        fleet = {
            role: [engine.url for engine in getattr(self, role)]
            for role in ("encode", "prefill", "decode")
        }
        return EPDProxy(config=Config(**{**fleet, **options}), transport=self.transport)


def report(params: Any, **more: Any) -> httpx.Response:
    """An encoder's answer with these ``ec_transfer_params``."""
    choices = [{"index": 0, "message": {"content": ""}, "finish_reason": "stop"}]
    return httpx.Response(200, json={"choices": choices, "ec_transfer_params": params, **more})


def prefilled() -> httpx.Response:
    return httpx.Response(200, content=sample("prefill-answer.json"))


def decoded(status: int = 200) -> httpx.Response:
    """Decode's answer, or its way to say that it failed."""
    if status == 200:
        return httpx.Response(200, json=json_sample("decode-answer.json"))
    error = {"message": "Internal server error", "type": "InternalServerError", "code": status}
    return httpx.Response(status, json={"error": error})


def streamed(name: str = "decode-stream.sse") -> httpx.Response:
    headers = {"content-type": "text/event-stream; charset=utf-8"}
    return httpx.Response(200, content=sample(name), headers=headers)


def image(url: str = "data:image/png;base64,AAAA", **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def ask(*parts: Any, **fields: Any) -> dict[str, Any]:
    """A chat request of one user message."""
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **fields}
