"""
What callers send: chat requests with images that are the same in every run.
"""

from __future__ import annotations

import base64
import json
import random
from typing import Any, NamedTuple

KB = 1 << 10
MB = 1 << 20


class Shape(NamedTuple):
    images: int = 0
    size: int = 0
    """Bytes of base64 of each image."""
    stream: bool = False


UNARY = {
    "text": Shape(),
    "1 KB": Shape(1, KB),
    "200 KB": Shape(1, 200 * KB),
    "1 MB": Shape(1, MB),
    "4 x 200 KB": Shape(4, 200 * KB),
    "16 x 100 KB": Shape(16, 100 * KB),
}
STREAM = Shape(stream=True)


def request_of(shape: Shape) -> dict[str, Any]:
    """With what a proxy must pass on untouched: escapes, other scripts, unknown fields."""
    rng = random.Random(shape.images * 1_000_003 + shape.size)
    words = {"type": "text", "text": 'What is "this"?\n这是什么? ' + "Look closely. " * 14}
    parts: list[dict[str, Any]] = [words]
    for _ in range(shape.images):
        data = base64.b64encode(rng.randbytes(shape.size * 3 // 4)).decode()
        parts.append({"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}})
    return {
        "model": "m",
        "messages": [
            {"role": "system", "content": "You see well."},
            {"role": "user", "content": parts},
        ],
        "max_tokens": 64,
        "temperature": 0.0,
        "stream": shape.stream,
        "vllm_xargs": {"of": ["nobody's", None, 1.5], "é": True},
    }


def body_of(shape: Shape) -> bytes:
    return json.dumps(request_of(shape), ensure_ascii=False).encode()
