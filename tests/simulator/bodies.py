"""Bodies and parts that the simulator's tests send, and the ways to send them."""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import anyio
import httpx

from epd_proxy.simulator import Simulator

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Json = dict[str, Any]

CHAT = "/v1/chat/completions"
SAMPLES = Path(__file__).parents[1] / "samples"


def png(width: int, height: int) -> bytes:
    """As much of a PNG as anybody looks at."""
    sides = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    return b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + sides


def b64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def data_url(content: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{b64(content)}"


RED = data_url(png(56, 28))
BLUE = data_url(png(28, 84))
CLIP = "https://media.example.com/street.mp4"
GRID = {"image_grid_thw": [1, 4, 4]}
WITH_SOUND = {"use_audio_in_video": True}
TENSOR = b64(b"PK\x03\x04 and the rest of a torch file")
NUMPY = b64(b"\x93NUMPY and the rest")


def text(words: str = "What is it?") -> Json:
    return {"type": "text", "text": words}


def url_part(url: Any = RED, kind: str = "image_url", **more: Any) -> Json:
    return {"type": kind, kind: {"url": url}, **more}


def audio(data: Any, **more: Any) -> Json:
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}, **more}


def reference(payload: Any = GRID, uuid: Any = "u1", modality: str = "image", **more: Any) -> Json:
    kind = f"{modality}_embeds"
    return {"type": kind, kind: payload, "uuid": uuid, **more}


def chat(*parts: Any, **fields: Any) -> Json:
    content = list(parts) or "What is it?"
    return {"model": "epd-demo", "messages": [{"role": "user", "content": content}], **fields}


def handles(*uuids: str, tokens: int = 4) -> Json:
    return {
        uuid: {"peer_host": "10.0.0.11", "peer_port": 5601, "shape": [tokens, 2048]}
        for uuid in uuids
    }


def kv_handle() -> Json:
    return {
        "do_remote_prefill": True,
        "remote_block_ids": [[1]],
        "remote_engine_id": "e",
        "remote_request_id": "chatcmpl-p-1",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
    }


def sample(name: str) -> Any:
    return json.loads((SAMPLES / name).read_bytes())


async def ask(
    engine: Simulator,
    body: Json | bytes,
    path: str = CHAT,
    method: str = "POST",
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **(headers or {})}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(engine), base_url="http://engine"
    ) as client:
        return await client.request(method, path, content=content, headers=headers)


async def assert_refused(engine: Simulator, body: Json, param: str | None, message: str) -> None:
    answer = await ask(engine, {**body, "stream": body.get("stream", False)})

    error = answer.json()["error"]
    assert answer.status_code == 400
    assert message in error["message"]
    assert error == {
        "message": error["message"],
        "type": "BadRequestError",
        "param": param,
        "code": 400,
    }


async def report(engine: Simulator, *parts: Any, **fields: Any) -> Any:
    answer = await ask(engine, chat(*parts, **fields))
    assert answer.status_code == 200, answer.text
    return answer.json()["ec_transfer_params"]


def scope(**changes: Any) -> Json:
    return {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "headers": [(b"content-type", b"application/json"), (b"x-request-id", b"r1")],
        **changes,
    }


async def drive(
    engine: Simulator, body: Json, send: Send, left: Callable[[], Awaitable[None]]
) -> None:
    """One ASGI call by hand; the caller leaves when ``left()`` returns."""
    body_messages = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

    async def receive() -> MutableMapping[str, Any]:
        message = next(body_messages, None)
        if message is None:
            await left()
            return {"type": "http.disconnect"}
        return message

    await engine(scope(), receive, send)


async def stay() -> None:
    await anyio.sleep_forever()


def events(body: bytes) -> list[Any]:
    """The JSON of each event of a stream, and the string "[DONE]"."""
    frames = body.decode().removesuffix("\n\n").split("\n\n")
    data = [frame.removeprefix("data: ") for frame in frames]
    return [each if each == "[DONE]" else json.loads(each) for each in data]
