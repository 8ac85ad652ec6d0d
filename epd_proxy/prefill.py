"""
The prefill stage: the prompt to a prefill server, a handle on its KV cache back.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from epd_proxy.calls import Calls
from epd_proxy.chat import Chat
from epd_proxy.config import Config
from epd_proxy.errors import Redo, UpstreamError
from epd_proxy.payload import NO_JSON, Json, fields_of, is_object, to_json
from epd_proxy.references import References
from epd_proxy.registry import Instance, Lease, Role

# vLLM's NIXL connector, ``vllm/distributed/kv_transfer/kv_connector/v1/nixl/``.
_ASK_FOR_HANDLE = msgspec.Raw(
    to_json(
        {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    )
)
# A request that ends with its first token, whatever the caller asked for.
_ONE_TOKEN: Mapping[str, Json] = {"stream": False, "max_tokens": 1}
_AS_WELL = frozenset({"max_completion_tokens", "n"})
_LEFT_OUT = frozenset({"stream_options", "min_tokens", "request_id", "ec_transfer_params"})


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_ANSWER = msgspec.json.Decoder(_PrefillAnswer)


class PrefillStage:
    """
    Prefills a request.

    With ``kv_connector`` ``nixl`` decode finds the KV cache by the handle that comes back; with
    ``shared`` it finds it by content, and nothing is asked for.
    """

    def __init__(self, config: Config) -> None:
        self._wants_handle = config.kv_connector == "nixl"
        self._fields: dict[str, Json] = {**_ONE_TOKEN}
        if self._wants_handle:
            self._fields["kv_transfer_params"] = _ASK_FOR_HANDLE
        self._host_from_url = config.kv_remote_host_from_url

    async def __call__(
        self, calls: Calls, chat: Chat, messages: Mapping[str, Json], references: References
    ) -> Json | None:
        """
        ``kv_transfer_params`` for decode, verbatim; None if there is none.

        ``messages``: the field with the references in it. Raises UpstreamError (502) if a handle
        was wanted, none came, and the body holds references: decode cannot rebuild what they stand
        for.
        """
        changes = {**messages, **self._fields}
        for name in chat.tree.keys() & _AS_WELL:
            changes[name] = 1
        if references.transfer is not None:
            changes["ec_transfer_params"] = references.transfer
        body = chat.body(changes, without=_LEFT_OUT)
        with Lease() as lease:
            instance, content = await calls.reach(
                lease.take(calls.pick(Role.PREFILL)), lease, lambda one: calls.ask(one, "p", body)
            )
        if not self._wants_handle:
            return None
        handle = _handle_of(content, instance)
        if handle is None and references.stand_for_media:
            reason = "returned no handle on its KV cache"
            raise UpstreamError(instance, reason, redo=Redo.ANYWHERE)
        if handle is not None and self._host_from_url:
            return _with_host(handle, instance)
        return handle


def _handle_of(content: bytes, instance: Instance) -> msgspec.Raw | None:
    try:
        handle = _ANSWER.decode(content).kv_transfer_params
        is_handle = is_object(handle) and msgspec.json.decode(handle) != {}
    except NO_JSON as exc:
        reason = "answered with what is no chat completion"
        raise UpstreamError(instance, reason, cause=str(exc)) from exc
    return handle if is_handle else None


def _with_host(handle: msgspec.Raw, instance: Instance) -> Json:
    return {**fields_of(handle), "remote_host": urlsplit(instance.url).hostname}
