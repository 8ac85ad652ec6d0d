"""
What does it cost to read a body, and to write it again with one part replaced?

    python -m perf.bench_parse [-n ROUNDS] [--json]

For bodies of one image and of text alone, microseconds of CPU for

* ``json``     ``json.loads``, the change, ``json.dumps``: what vLLM's example proxy does
* ``msgspec``  the same with msgspec's generic decoder and encoder
* ``payload``  ``epd_proxy.payload``: cut, parse the skeleton, put buffers together

Each round runs all three one after another, and the table shows the median of each and the median
over the rounds of its ratio to ``json``. Only the ratios mean anything: microseconds are of this
machine, at this moment.
"""

from __future__ import annotations

import argparse
import base64
import json
import platform
import random
import statistics
import time
from collections.abc import Callable

import msgspec

from epd_proxy.media import Messages, Place
from epd_proxy.payload import Payload, size_of

IMAGES = {"1 KB image": 1 << 10, "200 KB image": 200 << 10, "1 MB image": 1 << 20}
TEXTS = {"1 KB text": 1 << 10, "100 KB text": 100 << 10}
REFERENCE = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 28, 28]}, "uuid": "u"}
PLACE = Place(1, 0)


def body_of(part: dict[str, object]) -> bytes:
    messages = [
        {"role": "system", "content": "You are helpful."},
        {"role": "user", "content": [part, {"type": "text", "text": "What is this? 描述图片"}]},
    ]
    request = {"model": "m", "messages": messages, "max_tokens": 64, "temperature": 0.0}
    return json.dumps(request, ensure_ascii=False).encode()


def bodies() -> dict[str, bytes]:
    rng = random.Random(42)
    found = {}
    for name, size in IMAGES.items():
        data = base64.b64encode(rng.randbytes(size * 3 // 4)).decode()
        url = {"url": f"data:image/jpeg;base64,{data}"}
        found[name] = body_of({"type": "image_url", "image_url": url})
    for name, size in TEXTS.items():
        words = ('the "quick" brown fox\n', "jumps over ", "懒狗 ")
        text = "".join(rng.choices(words, k=size // 10))[:size]
        found[name] = body_of({"type": "text", "text": text})
    return found


def with_json(body: bytes) -> int:
    tree = json.loads(body)
    tree["messages"][PLACE.message]["content"][PLACE.part] = REFERENCE
    return len(json.dumps(tree).encode())


def with_msgspec(body: bytes) -> int:
    tree = msgspec.json.decode(body)
    tree["messages"][PLACE.message]["content"][PLACE.part] = REFERENCE
    return len(msgspec.json.encode(tree))


def with_payload(body: bytes) -> int:
    payload = Payload(body)
    messages = Messages(payload).with_parts({PLACE: REFERENCE})
    return size_of(payload.with_fields({"messages": messages}))


SUBJECTS: dict[str, Callable[[bytes], int]] = {
    "json": with_json,
    "msgspec": with_msgspec,
    "payload": with_payload,
}


def measure(body: bytes, rounds: int) -> dict[str, list[float]]:
    """Microseconds of CPU of every subject in every round."""
    times: dict[str, list[float]] = {name: [] for name in SUBJECTS}
    for number in range(rounds + 1):
        for name, work in SUBJECTS.items():
            repeats = max(1, 200_000 // len(body))
            start = time.process_time_ns()
            for _ in range(repeats):
                work(body)
            if number:  # the first round warms up
                times[name].append((time.process_time_ns() - start) / repeats / 1e3)
    return times


def summary(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    rows = {}
    for name, values in times.items():
        ratios = [mine / base for mine, base in zip(values, times["json"], strict=True)]
        rows[name] = {"us": statistics.median(values), "ratio": statistics.median(ratios)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.bench_parse")
    parser.add_argument("-n", "--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="results as JSON")
    options = parser.parse_args()
    results = {name: summary(measure(body, options.rounds)) for name, body in bodies().items()}
    if options.json:
        print(json.dumps(results, indent=1))
        return
    print(f"Python {platform.python_version()}, msgspec {msgspec.__version__}, CPU time")
    print(f"{'body':<14}" + "".join(f"{name + ' us':>14}{'ratio':>8}" for name in SUBJECTS))
    for name, row in results.items():
        cells = (f"{one['us']:>14.1f}{one['ratio']:>8.3f}" for one in row.values())
        print(f"{name:<14}" + "".join(cells))


if __name__ == "__main__":
    main()
