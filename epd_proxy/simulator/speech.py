"""
What an engine says: which media it was given, and which words. A piece of text is a token.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from epd_proxy.simulator.body import Json, token_limit
from epd_proxy.simulator.features import Feature


@dataclass(frozen=True)
class Speech:
    pieces: list[str]
    finish_reason: str = "stop"
    stop_reason: str | None = None


def speak(features: list[Feature], words: str, chunks: int, body: Json) -> Speech:
    text = _sentence(features, words)
    text *= math.ceil(chunks / len(text))
    text, stop_reason = _until_stop_word(text, body)
    pieces = _cut(text, chunks)
    limit = token_limit(body)
    # The end of a text is a token too: a limit just reached has cut it off.
    if limit is not None and limit <= len(pieces):
        return Speech(pieces[:limit], "length")
    return Speech(pieces, "stop", stop_reason)


def _sentence(features: list[Feature], words: str) -> str:
    groups = Counter(feature.modality for feature in features)
    media = " and ".join(
        f"{count} {modality}{'s' if count > 1 else ''} ({_labels(features, modality)})"
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


def _until_stop_word(text: str, body: Json) -> tuple[str, str | None]:
    """The text before the first stop word, and that word."""
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    found = [(text.index(word), word) for word in stops if isinstance(word, str) and word in text]
    if not found:
        return text, None
    end, word = min(found)
    return text[:end], word


def _cut(text: str, chunks: int) -> list[str]:
    count = min(chunks, len(text))
    return [
        text[len(text) * index // count : len(text) * (index + 1) // count]
        for index in range(count)
    ]
