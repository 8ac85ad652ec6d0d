"""
Features: what items become inside an engine.

An item is known by its mm_hash: the uuid if the client gave one, else the content, and a hash of
more than that as soon as options change what the processor makes of it. Encoder and consumer
come to the same mm_hash, or the embedding is not found.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from epd_proxy.simulator.body import Json
from epd_proxy.simulator.embeds import are_counts
from epd_proxy.simulator.errors import EngineError, bad_request
from epd_proxy.simulator.media import measure
from epd_proxy.simulator.memory import Memory
from epd_proxy.simulator.parts import Item


@dataclass(frozen=True)
class Feature:
    modality: str
    mm_hash: str
    metadata: Json
    # True if the embedding must come from somewhere else.
    reference: bool = False

    def grid(self) -> list[Any] | None:
        for key in ("image_grid_thw", "video_grid_thw"):
            grid = self.metadata.get(key)
            if isinstance(grid, list):
                return grid
        return None

    def tokens(self) -> int | None:
        """How long the embedding must be; None if the metadata does not say."""
        grid = self.grid()
        if grid is not None:
            return math.prod(grid) // 4 if are_counts(grid) else None
        counts = self.metadata.get("audio_num_tokens")
        return counts[0] if isinstance(counts, list) else None


class Processor:
    """Makes features of items. Raw media it has seen need not be sent again."""

    def __init__(self) -> None:
        # Metadata by modality and mm_hash.
        self._seen: Memory[tuple[str, str], Json] = Memory()

    def features(self, items: list[Item], body: Json, model: str) -> list[Feature]:
        counts: Counter[str] = Counter()
        features = []
        for item in items:
            index = counts[item.modality]
            if item.data is None and item.uuid is None:
                raise _nothing_given(item.modality, index)
            features.append(self._feature(item, index, _mm_hash(item, body, model)))
            counts[item.modality] += 1
        return features

    def _feature(self, item: Item, index: int, mm_hash: str) -> Feature:
        if item.embeds and item.data is not None:
            return _from_embeds(item, mm_hash)
        known = self._seen.get((item.modality, mm_hash))
        if known is None:
            if item.data is None:
                problem = f"Cache miss for {item.modality} at index {index}"
                raise EngineError(f"{problem} but data is not provided.")
            known = measure(item.modality, item.data)
            self._seen[item.modality, mm_hash] = known
        return Feature(item.modality, mm_hash, known)


def _nothing_given(modality: str, index: int) -> EngineError:
    name = f"['{modality}'][{index}]"
    message = f"multi_modal_data{name} is empty but multi_modal_uuids{name} is missing."
    return bad_request(message, "multi_modal_uuids")


def _from_embeds(item: Item, mm_hash: str) -> Feature:
    if isinstance(item.data, str):
        return Feature(item.modality, mm_hash, {})
    has_tensor = f"{item.modality}_embeds" in item.data
    return Feature(item.modality, mm_hash, item.data, reference=not has_tensor)


def _mm_hash(item: Item, body: Json, model: str) -> str:
    identity = item.uuid if item.uuid is not None else _content_key(item)
    options = (
        body.get("mm_processor_kwargs"),
        (body.get("media_io_kwargs") or {}).get(item.modality),
    )
    if not any(options):
        return identity
    named = _dump([model, item.modality, identity, *options])
    return hashlib.sha256(named.encode()).hexdigest()


def _content_key(item: Item) -> str:
    raw = item.data if isinstance(item.data, bytes) else _dump(item.data).encode()
    # Not the bare hash: no proxy can guess it from the URL.
    return "content-" + hashlib.sha256(item.modality.encode() + raw).hexdigest()


def _dump(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
