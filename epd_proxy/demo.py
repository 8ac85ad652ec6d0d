"""
``epd-proxy demo``: a whole fleet on loopback, without a GPU, and one request through it.

Everything runs in one event loop: two encode, one prefill and two decode simulators, each on a
port of its own, and the proxy before them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import signal
import struct
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from epd_proxy.app import EPDProxy
from epd_proxy.asgi import Step
from epd_proxy.config import Config
from epd_proxy.servers import serving
from epd_proxy.simulator import Simulator
from epd_proxy.upstream import CHAT_PATH

FLEET = {"encode": 2, "prefill": 1, "decode": 2}
MODEL = "epd-demo"
_LATENCY = {"encode": 0.03, "prefill": 0.02, "decode": 0.05}

_SNIPPETS = """
Try it:

  curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'

  pip install openai
  python - <<'END'
  from openai import OpenAI

  client = OpenAI(base_url="{url}/v1", api_key="none")
  picture = "{picture}"
  stream = client.chat.completions.create(
      model="{model}",
      stream=True,
      messages=[{{"role": "user", "content": [
          {{"type": "image_url", "image_url": {{"url": picture}}}},
          {{"type": "text", "text": "What do you see?"}},
      ]}}],
  )
  for chunk in stream:
      print(chunk.choices[0].delta.content or "", end="", flush=True)
  print()
  END

Ctrl-C ends it.
"""


def main(host: str, port: int, once: bool) -> None:
    """Run the proxy and five simulated engines, and show a request going through them."""
    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
        asyncio.run(_main(host, port, once=once))


async def _main(host: str, port: int, *, once: bool) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with fleet() as urls:
        config = Config(encode=urls["encode"], prefill=urls["prefill"], decode=urls["decode"])
        witness = Witness(EPDProxy(config=config))
        async with serving(witness, host, port) as url:
            _show_fleet(url, urls)
            await _ask(url)
            _show_steps(witness.steps, urls)
            if not once:
                picture = data_url(picture_png(2, 2))
                body = json.dumps(chat_body(picture, stream=True))
                print(_SNIPPETS.format(url=url, body=body, picture=picture, model=MODEL))
                await asyncio.Event().wait()


class Witness:
    """A middleware that keeps what the proxy noted of its last chat request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.steps: list[Step] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == CHAT_PATH:
            self.steps = scope["epd_proxy.trace"] = []
        await self._app(scope, receive, send)


@asynccontextmanager
async def fleet() -> AsyncIterator[Mapping[str, Sequence[str]]]:
    """The simulators, running: their addresses by role."""
    async with AsyncExitStack() as stack:
        urls: dict[str, list[str]] = {}
        for role, count in FLEET.items():
            for number in range(1, count + 1):
                engine = Simulator(
                    role, model=MODEL, latency=_LATENCY[role], name=f"{role}-{number}"
                )
                url = await stack.enter_async_context(serving(engine, "127.0.0.1", 0))
                urls.setdefault(role, []).append(url)
        yield urls


async def _ask(url: str) -> None:
    body = chat_body(data_url(picture_png(112, 84)), stream=True)
    print(
        f"\nPOST {CHAT_PATH}, a 112x84 picture and {body['messages'][0]['content'][1]['text']!r}:\n"
    )
    async with (
        httpx.AsyncClient(trust_env=False, timeout=30) as client,
        client.stream("POST", url + CHAT_PATH, json=body) as response,
    ):
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                delta = json.loads(line[6:])["choices"][0]["delta"]
                print(delta.get("content") or "", end="", flush=True)
    print("\n")


def chat_body(picture: str, *, stream: bool) -> dict[str, Any]:
    """A chat request about a picture."""
    content = [
        {"type": "image_url", "image_url": {"url": picture}},
        {"type": "text", "text": "What do you see?"},
    ]
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "stream": stream, "messages": messages}


def data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def picture_png(width: int, height: int) -> bytes:
    """A real PNG: a colour gradient."""
    rows = b"".join(
        b"\0" + bytes(v for x in range(width) for v in (255 * x // width, 255 * y // height, 96))
        for y in range(height)
    )
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def _show_fleet(url: str, urls: Mapping[str, Sequence[str]]) -> None:
    print(f"epd-proxy at {url}")
    for role, addresses in urls.items():
        print(f"  {role:<8} {'  '.join(addresses)}")


def _show_steps(steps: Sequence[Step], urls: Mapping[str, Sequence[str]]) -> None:
    print(f"{'stage':<9} {'instance':<11} {'address':<24} {'status':>6} {'ms':>8}")
    for step in steps:
        instance = f"{step.stage}-{urls[step.stage].index(step.url) + 1}"
        milliseconds = f"{step.seconds * 1e3:.1f}"
        print(f"{step.stage:<9} {instance:<11} {step.url:<24} {step.status:>6} {milliseconds:>8}")
