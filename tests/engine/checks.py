"""
What must hold of a request, whatever its media are, against what the same request gives when it
goes to one server that does everything itself (the control).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tests.engine.fleets import MEDIA, Seen, media_of
from tests.engine.oracles import HANDLE, Verdict

ASKED_OF_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
SHARED_FIELDS = {"mm_processor_kwargs", "media_io_kwargs", "priority", "session_id"}
TRANSFERS = {"kv_transfer_params", "ec_transfer_params"}


def check(seen: Seen, control: Verdict, body: Mapping[str, Any]) -> None:
    """Everything below, for a request whose media were all replaced by references."""
    check_accepted(seen, control)
    check_answer(seen, body)
    check_encode(seen, body)
    check_prefill(seen, control)
    check_decode(seen, control)
    check_keys(seen, body)
    for verdict in (*seen.prefill, *seen.decode):
        check_same_prompt(verdict, control)
        check_metadata_alone(verdict, seen.report)


def check_accepted(seen: Seen, control: Verdict) -> None:
    verdicts = [control, *seen.encode, *seen.prefill, *seen.decode]
    assert [verdict.get("error") for verdict in verdicts] == [None] * len(verdicts)
    assert all(verdict["accepted"] for verdict in verdicts)


def check_answer(seen: Seen, body: Mapping[str, Any]) -> None:
    """The caller got what decode said."""
    assert seen.answer.status_code == 200
    if body.get("stream"):
        assert seen.answer.headers["content-type"].startswith("text/event-stream")
        assert seen.answer.text == seen.decoder["answer"]
        assert seen.answer.text.endswith("data: [DONE]\n\n")
    else:
        assert seen.answer.headers["content-type"] == "application/json"
        assert seen.answer.json() == seen.decoder["answer"]


def check_encode(seen: Seen, body: Mapping[str, Any]) -> None:
    """Encoders are told which media and how to read them, and nothing else."""
    expected = {name: body[name] for name in ("model", *SHARED_FIELDS) if name in body}
    for verdict in seen.encode:
        assert verdict["request"]["set"] == {**expected, "stream": False}
        assert verdict["request"]["unknown_fields"] == []


def check_prefill(seen: Seen, control: Verdict) -> None:
    """Prefill writes one token and keeps its KV cache; all else is as the caller says."""
    for verdict in seen.prefill:
        given = verdict["request"]["set"]
        expected = dict(control["request"]["set"])
        for name in ("stream_options", "min_tokens"):
            expected.pop(name, None)
        for name in {"n", "max_completion_tokens"} & expected.keys():
            expected[name] = 1
        transfers = {"kv_transfer_params": ASKED_OF_PREFILL} | _embeddings(seen)
        assert given == {**expected, "stream": False, "max_tokens": 1, **transfers}
        assert verdict["engine"]["sampling"]["max_tokens"] == 1
        assert verdict["engine"]["kv_transfer_params"] == ASKED_OF_PREFILL
        assert verdict["engine"]["ec_transfer_params"] == (seen.report or None)


def check_decode(seen: Seen, control: Verdict) -> None:
    """Decode gets the caller's own wishes, and prefill's handle as it came."""
    verdict = seen.decoder
    transfers = {"kv_transfer_params": HANDLE} if seen.prefill else _embeddings(seen)
    assert verdict["request"]["set"] == control["request"]["set"] | transfers
    assert _sampling(verdict) == _sampling(control)
    for name in TRANSFERS:
        assert verdict["engine"][name] == transfers.get(name)
    for name in ("priority", "cache_salt"):
        assert verdict["engine"][name] == control["engine"][name]


def _embeddings(seen: Seen) -> dict[str, Any]:
    return {"ec_transfer_params": seen.report} if seen.report else {}


def _sampling(verdict: Verdict) -> dict[str, Any]:
    """Without the vehicle of the transfer parameters."""
    sampling = verdict["engine"]["sampling"]
    return {name: value for name, value in sampling.items() if name != "extra_args"}


def check_keys(seen: Seen, body: Mapping[str, Any]) -> None:
    """All stages go by the same keys, and these are the ones that vLLM's proxy gives."""
    found = [identifiers(verdict) for verdict in (*seen.prefill, *seen.decode)]
    assert found == [found[0]] * len(found)
    assert set(found[0]) == seen.report.keys()
    if not SHARED_FIELDS & body.keys() - {"priority"}:
        assert found[0] == content_keys(body)


def identifiers(verdict: Verdict) -> list[str]:
    return [item["identifier"] for item in verdict["engine"]["items"]]


def content_keys(body: Mapping[str, Any]) -> list[str]:
    return [_content_key(part) for part in media_of(body["messages"])]


def _content_key(part: dict[str, Any]) -> str:
    if uuid := part.get("uuid"):
        return str(uuid)
    if "input_audio" in part:
        content = json.dumps(part, sort_keys=True)
    else:
        (payload,) = (part[name] for name in MEDIA & part.keys())
        content = payload if isinstance(payload, str) else payload["url"]
    return hashlib.sha256(content.encode()).hexdigest()


def check_same_prompt(verdict: Verdict, control: Verdict) -> None:
    """As many placeholders, at the same places, in the same words."""
    assert verdict["prompt"] == control["prompt"]
    assert _places(verdict) == _places(control)


def _places(verdict: Verdict) -> list[tuple[str, int, int]]:
    items = verdict["engine"]["items"]
    return [(item["modality"], item["offset"], item["length"]) for item in items]


def check_metadata_alone(verdict: Verdict, report: Mapping[str, Any]) -> None:
    """No pixels and no sound: of every item what its encoder reported."""
    assert {each["form"] for each in verdict["parsed"]} <= {"dict"}
    for item in verdict["engine"]["items"]:
        metadata = report[item["identifier"]]["metadata"]
        data = {name: _numbers(value) for name, value in item["data"].items()}
        # The processor's own note, not the body's.
        data.pop("use_audio_in_video", None)
        assert data == {name: _flat(value) for name, value in metadata.items()}


def _numbers(value: Any) -> list[Any]:
    return _flat(value["values"] if isinstance(value, dict) else value)


def _flat(value: Any) -> list[Any]:
    return [each for part in value for each in _flat(part)] if isinstance(value, list) else [value]


def check_same_positions(seen: Seen, control: Verdict) -> None:
    """What the worker computes first comes out as if it had the media itself."""
    expected = control["engine"].get("worker_positions")
    assert expected is None or expected["ok"]
    for verdict in (*seen.prefill, *seen.decode):
        assert verdict["engine"].get("worker_positions") == expected


def check_media_itself(verdict: Verdict, control: Verdict) -> None:
    """The media as the caller sent them, read as the control reads them."""
    assert {each["form"] for each in verdict["parsed"]} <= {"raw"}
    check_same_prompt(verdict, control)
    for item, expected in zip(verdict["engine"]["items"], control["engine"]["items"], strict=True):
        assert item["data"] == expected["data"]
