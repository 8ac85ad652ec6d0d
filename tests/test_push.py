"""
Encoders that push embeddings into the consumer (Mooncake): who is named to whom.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from epd_proxy import Role
from tests.backends import Backends, ask, decoded, image, json_sample, report, sample
from tests.driver import chat

ADDRESS = "tcp://10.0.0.21:19019"
GRID = {"image_grid_thw": [1, 4, 4]}
VIDEO = {"type": "video_url", "video_url": {"url": "http://media/v.mp4"}}


def ids_in(body: Any) -> list[str]:
    return [each["transfer_id"] for each in body["ec_transfer_params"]["ec_items"]]


def reporting(*entries: dict[str, Any]) -> httpx.Response:
    """Entries that claim the positions in their order."""
    return report({f"h{k}": {**entry, "item_indices": [k]} for k, entry in enumerate(entries)})


async def test_the_samples_are_what_encode_and_decode_get() -> None:
    expected = json_sample("encode-body-mooncake.expected.json")
    known = ids_in(expected)
    backends = Backends()
    sent: list[str] = []

    def echo(request: httpx.Request) -> httpx.Response:
        sent[:] = ids_in(json.loads(request.content))
        text = sample("report-mooncake-transfer-ids.json").decode()
        for old, new in zip(known, sent, strict=True):
            text = text.replace(old, new)
        return httpx.Response(200, content=text)

    backends.encode[0].route.mock(side_effect=echo)
    proxy = backends.proxy(ec_consumer_zmq_addrs=ADDRESS)
    await chat(proxy, sample("request-two-images-and-repeat.json"))

    def as_sent(name: str) -> Any:
        text = sample(name).decode()
        for old, new in zip(known, sent, strict=True):
            text = text.replace(old, new)
        return json.loads(text)

    assert len(set(sent)) == 3
    assert backends.encode[0].bodies == [as_sent("encode-body-mooncake.expected.json")]
    assert backends.decode[0].bodies == [as_sent("decode-body-mooncake.expected.json")]


async def test_every_attempt_has_new_transfer_ids() -> None:
    backends = Backends()
    backends.encode[0].answers(reporting({"metadata": GRID}))
    backends.decode[0].answers(decoded(500), decoded())
    await chat(backends.proxy(ec_consumer_zmq_addrs=ADDRESS), ask(image()))
    encoded = [ids_in(body) for body in backends.encode[0].bodies]
    assert [ids_in(body) for body in backends.decode[0].bodies] == encoded
    assert encoded[0] != encoded[1]


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ([{"modality": "video", "metadata": {}}, {"modality": "audio", "metadata": {}}], 2),
        ([{"modality": "video", "metadata": {}}], 1),
    ],
)
async def test_a_video_with_its_sound_is_two_transfers_and_what_came_is_named(
    entries: list[dict[str, Any]], named: int
) -> None:
    backends = Backends()
    backends.encode[0].answers(reporting(*entries))
    body = ask(VIDEO, mm_processor_kwargs={"use_audio_in_video": True})
    assert (await chat(backends.proxy(ec_consumer_zmq_addrs=ADDRESS), body)).status == 200
    sent = ids_in(backends.encode[0].bodies[0])
    assert len(set(sent)) == 2
    items = backends.decode[0].bodies[0]["ec_transfer_params"]["ec_items"]
    hashes = [f"h{k}" for k in range(named)]
    assert items == [
        {"mm_hash": mm_hash, "transfer_id": each}
        for mm_hash, each in zip(hashes, sent, strict=False)
    ]


async def test_raw_media_is_named_to_the_consumer_too() -> None:
    backends = Backends()
    backends.encode[0].answers(reporting({"metadata": {}}))
    await chat(backends.proxy(ec_consumer_zmq_addrs=ADDRESS), ask(image()))
    (body,) = backends.decode[0].bodies
    assert body["messages"][0]["content"][0]["type"] == "image_url"
    assert ids_in(body) == ids_in(backends.encode[0].bodies[0])


@pytest.mark.parametrize("rewrites", [False, True])
@pytest.mark.parametrize("params", [None, {}, {"ec_items": []}])
async def test_a_report_without_entries_is_a_502(params: Any, rewrites: bool) -> None:
    backends = Backends()
    backends.encode[0].answers(report(params))
    proxy = backends.proxy(ec_consumer_zmq_addrs=ADDRESS, no_rewrite=not rewrites)
    reply = await chat(proxy, ask(image()))
    assert (reply.status, reply.error["stage"]) == (502, "encode")
    assert "reported nothing" in reply.error["message"]
    assert backends.decode[0].requests == []


async def test_without_rewriting_a_push_report_must_still_be_matched() -> None:
    backends = Backends()
    backends.encode[0].answers(report({"h": {"metadata": GRID}}))
    proxy = backends.proxy(ec_consumer_zmq_addrs=ADDRESS, no_rewrite=True)
    reply = await chat(proxy, ask(image(), image("http://media/1.png")))
    assert (reply.status, reply.error["stage"]) == (502, "encode")


async def test_one_replica_is_named_to_encode_and_to_the_consumer() -> None:
    backends = Backends(decode=2)
    backends.encode[0].answers(reporting({"metadata": GRID}))
    addresses = ["tcp://0:0", "tcp://0:1", "tcp://1:0", "tcp://1:1"]
    proxy = backends.proxy(ec_consumer_zmq_addrs=addresses, ec_consumer_dp_size=2)
    for _ in range(8):
        await chat(proxy, ask(image()), {"x-data-parallel-rank": "7"})
    pushed = [body["ec_transfer_params"]["consumer_zmq"] for body in backends.encode[0].bodies]
    assert {address: pushed.count(address) for address in addresses} == dict.fromkeys(addresses, 2)
    for number, engine in enumerate(backends.decode):
        ranks = [request.headers["x-data-parallel-rank"] for request in engine.requests]
        own = [address for address in pushed if address.startswith(f"tcp://{number}:")]
        assert [f"tcp://{number}:{rank}" for rank in ranks] == own


async def test_a_retry_keeps_the_replica_while_the_consumer_stays() -> None:
    backends = Backends()
    backends.encode[0].answers(reporting({"metadata": GRID}))
    backends.decode[0].answers(decoded(500))
    proxy = backends.proxy(
        ec_consumer_zmq_addrs=["tcp://0:0", "tcp://0:1"], ec_consumer_dp_size=2, decode_retries=3
    )
    await chat(proxy, ask(image()))
    pushed = [body["ec_transfer_params"]["consumer_zmq"] for body in backends.encode[0].bodies]
    assert len(pushed) == 4
    assert len(set(pushed)) == 1


async def test_a_retry_on_another_consumer_names_that_one() -> None:
    backends = Backends(decode=2)
    backends.encode[0].answers(reporting({"metadata": GRID}))
    for engine in backends.decode:
        engine.answers(decoded(500))
    await chat(backends.proxy(ec_consumer_zmq_addrs=["tcp://0", "tcp://1"]), ask(image()))
    pushed = [body["ec_transfer_params"]["consumer_zmq"] for body in backends.encode[0].bodies]
    assert sorted(pushed) == ["tcp://0", "tcp://1"]


async def test_the_consumer_counts_as_busy_from_the_moment_it_is_named() -> None:
    backends = Backends()
    loads: list[int] = []
    proxy = backends.proxy(ec_consumer_zmq_addrs=ADDRESS)
    (decoder,) = proxy.registry.ready(Role.DECODE)

    def note(request: httpx.Request) -> httpx.Response:
        loads.append(decoder.load)
        return reporting({"metadata": GRID})

    backends.encode[0].route.mock(side_effect=note)
    await chat(proxy, ask(image()))
    assert loads == [1]
    assert decoder.load == 0


@pytest.mark.parametrize("prefill", [0, 1])
async def test_replicas_without_addresses_are_used_in_turn(prefill: int) -> None:
    backends = Backends(prefill=prefill)
    proxy = backends.proxy(ec_consumer_dp_size=3)
    for _ in range(6):
        await chat(proxy, ask({"type": "text", "text": "hi"}))
    ranks = [request.headers["x-data-parallel-rank"] for request in backends.decode[0].requests]
    assert sorted(ranks) == ["0", "0", "1", "1", "2", "2"]
    others = [request for engine in backends.prefill for request in engine.requests]
    assert all("x-data-parallel-rank" not in request.headers for request in others)
