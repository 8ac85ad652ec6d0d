"""
Embeds, what a client sends in place of raw media, checked as vLLM reads them.

    {"image_grid_thw": [1, 4, 4]}       metadata; the embedding is elsewhere
    {"image_embeds": "<base64>", ...}   tensors, each a file that torch or numpy reads
    "<base64>"                          one such tensor
    None                                "you have it"
"""

from __future__ import annotations

import math
from typing import Any

from epd_proxy.simulator.body import Json
from epd_proxy.simulator.errors import EngineError, bug
from epd_proxy.simulator.media import from_base64

MODALITIES = ("image", "video", "audio")

# The keys that may be JSON arrays in place of tensors.
_METADATA = {
    "image": ("image_grid_thw",),
    "video": ("video_grid_thw", "second_per_grid_ts"),
    "audio": ("audio_num_tokens", "audio_feature_lengths"),
}
# A zip or a pickle.
_TORCH = (b"PK\x03\x04", b"\x80\x02")
_NUMPY = b"\x93NUMPY"


def check_embeds(modality: str, payloads: list[Any]) -> None:
    """All embeds of one modality in a request: they are to look alike."""
    _check_forms([type(payload) for payload in payloads])
    for payload in payloads:
        if isinstance(payload, str):
            _check_tensor(modality, payload)
        elif payload is not None:
            _check_metadata(modality, payload)
    if len({frozenset(each) for each in payloads if isinstance(each, dict)}) > 1:
        raise EngineError("All dictionaries in the list of embeddings must have the same keys.")


def are_counts(values: list[Any]) -> bool:
    """Whether these are positive integers, as in every grid that makes sense."""
    return all(type(value) is int and value > 0 for value in values)


def _check_forms(forms: list[type]) -> None:
    if len(set(forms)) <= 1:
        return
    if forms[0] is dict and type(None) in forms:
        raise bug("'NoneType' object has no attribute 'items'")
    raise EngineError(str(forms[0]), "NotImplementedError", 501)


def _check_metadata(modality: str, payload: Json) -> None:
    for key, value in payload.items():
        if isinstance(value, str):
            _check_tensor(modality, value)
        elif isinstance(value, list):
            _check_array(modality, key, value)
        else:
            raise bug(f"{type(value).__name__!r} object has no attribute 'ndim'")
    if payload.keys().isdisjoint(_METADATA[modality]):
        raise EngineError(f"The data should contain the fields: {set(_METADATA[modality])}")


def _check_tensor(modality: str, data: str) -> None:
    content = from_base64(data)
    # vLLM reads numpy files for images and videos only.
    readable = _TORCH if modality == "audio" else (*_TORCH, _NUMPY)
    if not content.startswith(readable):
        raise bug("unpack requires a buffer of 4 bytes")


def _check_array(modality: str, key: str, values: list[Any]) -> None:
    if key not in _METADATA[modality]:
        raise EngineError(f"JSON arrays are only supported for metadata: {key}")
    if not all(_is_number(value) for value in values):
        raise EngineError(f"Metadata {key} must be a finite numeric array.")
    if any(isinstance(value, int) and not -(2**63) <= value < 2**63 for value in values):
        raise EngineError(f"Invalid metadata array: {key}")
    if key == "audio_num_tokens" and not (len(values) == 1 and are_counts(values)):
        raise EngineError(f"{key} must contain one positive integer per audio")
    if not values:
        raise bug(f"Expected there to be 1 prompt placeholders for {key}, but found 0")


def _is_number(value: Any) -> bool:
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))
