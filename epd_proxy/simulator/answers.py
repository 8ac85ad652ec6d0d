"""
Answers on the wire: a Reply as one JSON object, or as the events of a stream.

The fields, their order and where a null stands are those of vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response

from epd_proxy.simulator.body import Json
from epd_proxy.simulator.errors import INTERNAL_ERROR, Failure
from epd_proxy.simulator.speech import Speech


@dataclass(frozen=True)
class Reply:
    """An answer before it is written down."""

    id: str
    model: str
    fingerprint: str
    created: int
    choices: int
    prompt_tokens: int
    speech: Speech
    kv: Json | None
    ec: Json | None
    stream: bool
    include_usage: bool
    lost: bool

    def head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def usage(self) -> Json:
        made = self.choices * len(self.speech.pieces)
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + made,
            "completion_tokens": made,
        }


def whole(reply: Reply) -> Response:
    if reply.lost:
        return Failure(500).response()
    return JSONResponse(
        {
            **reply.head("chat.completion"),
            "choices": [_whole_choice(reply, index) for index in range(reply.choices)],
            "service_tier": None,
            "system_fingerprint": reply.fingerprint,
            "usage": {
                **reply.usage(),
                "prompt_tokens_details": None,
                "completion_tokens_details": None,
            },
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "prompt_text": None,
            "kv_transfer_params": reply.kv,
            "ec_transfer_params": reply.ec,
            "metrics": None,
        }
    )


def events(reply: Reply) -> Iterator[bytes]:
    for index in range(reply.choices):
        yield _chunk(reply, [_first_choice(index)], prompt_token_ids=None, prompt_text=None)
    if reply.lost:
        yield _event(INTERNAL_ERROR)
    else:
        yield from _content_events(reply)
    yield _event(b"[DONE]")


def _whole_choice(reply: Reply, index: int) -> Json:
    return {
        "index": index,
        "message": {
            "role": "assistant",
            "content": "".join(reply.speech.pieces),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        },
        "logprobs": None,
        "finish_reason": reply.speech.finish_reason,
        "stop_reason": reply.speech.stop_reason,
        "token_ids": None,
        "routed_experts": None,
        "weight_versions": None,
    }


def _content_events(reply: Reply) -> Iterator[bytes]:
    for piece in reply.speech.pieces:
        for index in range(reply.choices):
            yield _chunk(reply, [_piece_choice(index, piece)], kv_transfer_params=None)
    # The fingerprint stands on the last chunk only.
    mark = {"system_fingerprint": reply.fingerprint}
    for index in range(reply.choices):
        is_last = index == reply.choices - 1 and not reply.include_usage
        choice = _last_choice(index, reply.speech)
        yield _chunk(reply, [choice], kv_transfer_params=reply.kv, **(mark if is_last else {}))
    if reply.include_usage:
        yield _chunk(reply, [], usage=reply.usage(), **mark)


def _first_choice(index: int) -> Json:
    delta = {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _piece_choice(index: int, piece: str) -> Json:
    return {
        "index": index,
        "delta": {"content": piece},
        "logprobs": None,
        "finish_reason": None,
        "token_ids": None,
    }


def _last_choice(index: int, speech: Speech) -> Json:
    return {
        "index": index,
        "delta": {"content": ""},
        "logprobs": None,
        "finish_reason": speech.finish_reason,
        "stop_reason": speech.stop_reason,
        "token_ids": None,
        "weight_versions": None,
    }


def _chunk(reply: Reply, choices: list[Json], **extra: Any) -> bytes:
    chunk = {**reply.head("chat.completion.chunk"), "choices": choices, **extra}
    return _event(json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode())


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
