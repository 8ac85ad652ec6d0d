"""
The prefill stage: the prompt to a prefill server, a handle on its KV cache back.
"""

from __future__ import annotations

import msgspec

from epd_proxy.calls import Calls
from epd_proxy.chat import Chat
from epd_proxy.errors import UpstreamError
from epd_proxy.payload import NO_JSON, Json, is_object, to_json
from epd_proxy.references import References
from epd_proxy.registry import Role

# vLLM's NIXL connector, ``vllm/distributed/kv_transfer/kv_connector/v1/nixl/``.
_ASK_FOR_HANDLE = to_json(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
)


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_ANSWER = msgspec.json.Decoder(_PrefillAnswer)


async def prefill(calls: Calls, chat: Chat, references: References) -> bytes | None:
    """
    ``kv_transfer_params`` for decode, verbatim; None if the server returned none.

    Raises UpstreamError (502) if there is none although the body holds references: decode cannot
    rebuild what they stand for.
    """
    instance = calls.pick(Role.PREFILL)
    body = chat.body(
        _one_token(chat) | {"ec_transfer_params": references.transfer}, references.parts
    )
    with instance.in_use():
        content = await calls.ask(instance, "p", body)
    try:
        handle = _ANSWER.decode(content).kv_transfer_params
        is_handle = is_object(handle) and msgspec.json.decode(handle) != {}
    except NO_JSON as exc:
        reason = "answered with what is no chat completion"
        raise UpstreamError(Role.PREFILL, instance.url, reason, cause=str(exc)) from exc
    if is_handle:
        return bytes(handle)
    if references.stand_for_media:
        raise UpstreamError(Role.PREFILL, instance.url, "returned no handle on its KV cache")
    return None


def _one_token(chat: Chat) -> dict[str, Json | None]:
    """The fields of a request that ends with its first token, whatever the caller asked for."""
    fields: dict[str, Json | None] = {
        "stream": b"false",
        "stream_options": None,
        "max_tokens": b"1",
        "min_tokens": None,
        "request_id": None,
        "kv_transfer_params": _ASK_FOR_HANDLE,
    }
    fields |= {name: b"1" for name in ("max_completion_tokens", "n") if name in chat.payload.tree}
    return fields
