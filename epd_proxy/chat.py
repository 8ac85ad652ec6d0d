"""
A chat request as the stages see it: its media, and the body that each engine gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain

import msgspec

from epd_proxy.config import Config
from epd_proxy.errors import RequestError
from epd_proxy.media import (
    EMBEDS,
    MODALITY,
    Item,
    Messages,
    Naming,
    Part,
    Place,
    check_sources,
    find_parts,
    items_of,
)
from epd_proxy.payload import Buffer, Json, Payload, fields_of, to_json

# They name hosts that engines connect to.
_TRANSFER_PARAMS = frozenset({"kv_transfer_params", "ec_transfer_params"})


class Chat:
    """
    One request's body, parsed.

    ``media``: the parts to encode. ``embedded``: modalities of which the caller sent references
    instead. Raises RequestError (400), naming the place.
    """

    def __init__(self, body: bytes, config: Config) -> None:
        self.payload = payload = Payload(body)
        self.tree = tree = payload.tree
        model = tree.get("model")
        self.model = payload.text(model) if isinstance(model, str) else ""
        """Empty if the caller named none."""
        self.media: Sequence[Part] = ()
        self.embedded: AbstractSet[str] = frozenset()
        if parts := find_parts(payload):
            self._sort(parts, config)
        self._unwanted: AbstractSet[str] = frozenset()
        self._cleaned: Mapping[str, Json] = {}
        if not config.trust_transfer_params:
            self._refuse_transfer_params()
        self._messages: Messages | None = None

    def _sort(self, parts: Sequence[Part], config: Config) -> None:
        self.media = [part for part in parts if part.kind in MODALITY]
        references = [part for part in parts if part.kind not in MODALITY]
        if references and not config.trust_embeds:
            raise _untrusted(references[0])
        check_sources(self.payload, self.media, config)
        self.embedded = frozenset(chain.from_iterable(map(_embedded, references)))

    def _refuse_transfer_params(self) -> None:
        tree = self.tree
        if given := tree.keys() & _TRANSFER_PARAMS:
            self._unwanted = {name for name in given if tree[name] is not None}
        xargs = tree.get("vllm_xargs")
        # vLLM merges these into the dictionary that carries the top-level ones.
        if isinstance(xargs, dict) and not xargs.keys().isdisjoint(_TRANSFER_PARAMS):
            fields = fields_of(self.payload.fields["vllm_xargs"])
            self._cleaned = {
                "vllm_xargs": {
                    name: value for name, value in fields.items() if name not in _TRANSFER_PARAMS
                }
            }

    @property
    def with_sound(self) -> bool:
        """Whether a video's sound track is to become a feature of its own."""
        options = self.tree.get("mm_processor_kwargs")
        return isinstance(options, dict) and bool(options.get("use_audio_in_video"))

    @property
    def uses_beam_search(self) -> bool:
        return bool(self.tree.get("use_beam_search"))

    @property
    def messages(self) -> Messages:
        if self._messages is None:
            self._messages = Messages(self.payload)
        return self._messages

    async def items(self, naming: Naming, owner: str | None = None) -> list[Item]:
        """The media under its content keys. Raises RequestError (400)."""
        return await items_of(self.payload, self.messages, self.media, naming, owner)

    def with_parts(self, parts: Mapping[Place, Json]) -> dict[str, Json]:
        """The change of fields that puts these parts into the messages, written once."""
        if not parts:
            return {}
        return {"messages": msgspec.Raw(to_json(self.messages.with_parts(parts)))}

    def body(
        self, changes: Mapping[str, Json], without: AbstractSet[str] = frozenset()
    ) -> list[Buffer]:
        """
        The caller's body with other fields, or without some, for prefill or decode.

        What the caller must not say to engines is gone from it. Where nothing changes, the bytes
        that came.
        """
        if self._cleaned:
            changes = {**self._cleaned, **changes}
        if self._unwanted:
            without |= self._unwanted
        return self.payload.with_fields(changes, without)


def _embedded(part: Part) -> list[str]:
    # A video brings its sound along.
    kinds = {part.kind, "audio_embeds"} if part.kind == "video_embeds" else {part.kind}
    return [EMBEDS[kind] for kind in kinds if kind in EMBEDS and kind in part.tree]


def _untrusted(part: Part) -> RequestError:
    return RequestError(
        f"{part.place}: {part.kind} parts are not accepted here; send the media itself",
        param=str(part.place),
    )
