"""
What engines hand on to each other, and when the one that is to use it finds it lost.

* encode to prefill    ``ec_transfer_params``, by mm_hash where each embedding lies: ``report``
* prefill to decode    ``kv_transfer_params``, where the KV blocks lie: ``KVHandles``
"""

from __future__ import annotations

import itertools
import math
import uuid
from typing import Any

from epd_proxy.simulator.body import Json
from epd_proxy.simulator.embeds import are_counts
from epd_proxy.simulator.features import Feature
from epd_proxy.simulator.memory import Memory

# Of the model that nobody runs: the length of an embedding's vector, in numbers of two bytes.
_HIDDEN_SIZE = 2048
_BLOCK_TOKENS = 16


class KVHandles:
    """The handles one engine hands out, and those it was given. Each can be used once."""

    def __init__(self) -> None:
        self._engine_id = str(uuid.uuid4())
        self._blocks = itertools.count(1)
        # A set in the form of a Memory.
        self._spent: Memory[str, bool] = Memory()

    def spend(self, body: Any) -> bool:
        """Whether the handle of a body, if it has one, comes for the first time."""
        handle = body.get("kv_transfer_params") if isinstance(body, dict) else None
        if not isinstance(handle, dict) or not handle.get("do_remote_prefill"):
            return True
        name = str(handle.get("remote_request_id"))
        fresh = name not in self._spent
        self._spent[name] = True
        return fresh

    def make(self, request_id: str, tokens: int) -> Json:
        count = math.ceil(tokens / _BLOCK_TOKENS)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(itertools.islice(self._blocks, count))],
            "remote_engine_id": self._engine_id,
            "remote_request_id": f"{request_id}-{uuid.uuid4().hex[:8]}",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": None,
            "remote_registration_generation": 1,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }


def report(features: list[Feature]) -> Json | None:
    """An entry for each mm_hash, with every position at which it stands; None without media."""
    entries: Json = {}
    for index, feature in enumerate(features):
        entry = entries.setdefault(feature.mm_hash, _entry(feature))
        entry["item_indices"].append(index)
    return entries or None


def lost(role: str, features: list[Feature], body: Json, fresh: bool) -> bool:
    """Whether the engine goes without what a body refers to; ``fresh`` comes from ``spend``."""
    references = [feature for feature in features if feature.reference]
    if any(_breaks_worker(feature) for feature in references):
        return True
    if role == "decode":
        return _kv_lost(body.get("kv_transfer_params") or {}, bool(references), fresh)
    handles = body.get("ec_transfer_params") or {}
    return any(_embedding_lost(feature, handles) for feature in references)


def _entry(feature: Feature) -> Json:
    tokens = feature.tokens() or 0
    return {
        "modality": feature.modality,
        "item_indices": [],
        "metadata": feature.metadata,
        "peer_host": "127.0.0.1",
        "peer_port": 5601,
        "size_bytes": tokens * _HIDDEN_SIZE * 2,
        "shape": [tokens, _HIDDEN_SIZE],
    }


def _breaks_worker(feature: Feature) -> bool:
    grid = feature.grid()
    return grid is not None and not (len(grid) == 3 and are_counts(grid))


def _embedding_lost(feature: Feature, handles: Json) -> bool:
    handle = handles.get(feature.mm_hash)
    if not isinstance(handle, dict) or "peer_host" not in handle:
        return True
    shape, tokens = handle.get("shape"), feature.tokens()
    return isinstance(shape, list) and tokens is not None and shape[:1] != [tokens]


def _kv_lost(handle: Json, has_references: bool, fresh: bool) -> bool:
    if not handle.get("do_remote_prefill"):
        return has_references
    names = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
    complete = isinstance(handle.get("remote_block_ids"), list)
    return not (fresh and complete and all(handle.get(name) is not None for name in names))
