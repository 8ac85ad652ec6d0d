"""
A model that hears.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.engine.checks import (
    check,
    check_accepted,
    check_decode,
    check_keys,
    check_media_itself,
    check_metadata_alone,
    check_prefill,
    check_same_positions,
    identifiers,
)
from tests.engine.fleets import TOPOLOGIES, WISHES, Fleet, chat
from tests.engine.media import audio_url, input_audio, text
from tests.engine.oracles import Oracle

MODEL = "qwen2_audio"

PROMPTS: dict[str, list[dict[str, Any]]] = {
    "text": [text()],
    "input_audio": [input_audio(16000), text()],
    "audio_url": [audio_url(24000), text()],
    "both": [input_audio(16000), text("and"), audio_url(40000), text()],
    "the same twice": [audio_url(16000), audio_url(24000), text(), audio_url(16000)],
    "a sound that has a name": [{**input_audio(8000), "uuid": "takes/one two"}, text()],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_every_stage_understands_the_sound(fleet: Fleet, prompt: str, stream: bool) -> None:
    body = chat(*PROMPTS[prompt], stream=stream, max_tokens=9)
    seen, control = fleet.ask(body), fleet.ask_directly(body)
    check(seen, control, body)
    check_same_positions(seen, control)


def test_decode_alone_hears_the_callers_wishes(fleet: Fleet) -> None:
    body = chat(*PROMPTS["both"], **WISHES)
    seen, control = fleet.ask(body), fleet.ask_directly(body)
    check(seen, control, body)


@pytest.mark.parametrize("prompt", ["both", "the same twice"])
def test_metadata_may_be_tensors(fleet: Fleet, prompt: str) -> None:
    body = chat(*PROMPTS[prompt])
    with fleet.behind("--metadata-format", "tensor") as other:
        seen, control = other.ask(body), other.ask_directly(body)
    check(seen, control, body)


def test_sounds_may_stay_as_the_caller_sent_them(fleet: Fleet) -> None:
    body = chat(*PROMPTS["both"])
    with fleet.behind("--no-rewrite") as other:
        seen, control = other.ask(body), other.ask_directly(body)
    check_accepted(seen, control)
    check_prefill(seen, control)
    check_decode(seen, control)
    for verdict in (*seen.prefill, *seen.decode):
        assert set(identifiers(verdict)) == seen.report.keys()
        check_media_itself(verdict, control)


def test_a_shared_store_finds_the_kv_cache_by_content(engines: Mapping[str, Oracle]) -> None:
    body = chat(*PROMPTS["both"])
    with Fleet(engines, TOPOLOGIES["E+P+D"]).behind("--kv-connector", "shared") as fleet:
        seen, control = fleet.ask(body), fleet.ask_directly(body)
    check_accepted(seen, control)
    check_keys(seen, body)
    check_metadata_alone(seen.consumer, seen.report)
    check_media_itself(seen.decoder, control)
    assert seen.decoder["engine"]["kv_transfer_params"] is None
