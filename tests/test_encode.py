from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from typing import Any

import httpx
import pytest

from epd_proxy import Role
from tests.backends import Backends, ask, image, report
from tests.driver import chat

GRID = {"image_grid_thw": [1, 4, 4]}


def reports(request: httpx.Request) -> httpx.Response:
    """What vLLM reports for any call: an entry for each uuid."""
    entries: dict[str, Any] = {}
    for index, part in enumerate(json.loads(request.content)["messages"][0]["content"]):
        entry = {"modality": part["type"].partition("_")[0], "metadata": GRID, "item_indices": []}
        entries.setdefault(part["uuid"], entry)["item_indices"].append(index)
    return report(entries)


def fleet(count: int) -> Backends:
    backends = Backends(encode=count)
    for engine in backends.encode:
        engine.route.mock(side_effect=reports)
    return backends


def pictures(count: int) -> list[dict[str, Any]]:
    return [image(f"http://media/{n}.png") for n in range(count)]


def urls(body: Any) -> list[str]:
    return [part["image_url"]["url"] for part in body["messages"][0]["content"]]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("mix", [[1], [3, 1], [4, 2, 1]])
async def test_items_are_spread_evenly_and_the_rotation_goes_on_across_requests(
    count: int, mix: list[int]
) -> None:
    backends = fleet(count)
    proxy = backends.proxy()
    for items in mix * 4:
        assert (await chat(proxy, ask(*pictures(items)))).status == 200
    served = [sum(len(urls(body)) for body in engine.bodies) for engine in backends.encode]
    assert sum(served) == sum(mix) * 4
    assert max(served) - min(served) <= 1


async def test_images_for_one_encoder_share_a_call() -> None:
    backends = fleet(2)
    await chat(backends.proxy(), ask(*pictures(6)))
    assert [[len(urls(body)) for body in engine.bodies] for engine in backends.encode] == [[3], [3]]


@pytest.mark.parametrize(("size", "calls"), [(0, [5]), (1, [1] * 5), (2, [2, 2, 1]), (9, [5])])
async def test_a_call_holds_no_more_images_than_the_batch_size(size: int, calls: list[int]) -> None:
    backends = fleet(1)
    await chat(backends.proxy(encoder_batch_size=size), ask(*pictures(5)))
    assert sorted(len(urls(body)) for body in backends.encode[0].bodies) == sorted(calls)


async def test_every_audio_and_video_is_a_call_of_its_own() -> None:
    backends = fleet(1)
    audio = {"type": "audio_url", "audio_url": {"url": "http://media/a.wav"}}
    video = {"type": "video_url", "video_url": {"url": "http://media/v.mp4"}}
    await chat(backends.proxy(), ask(image(), audio, video, audio, image("http://media/b.png")))
    contents = [body["messages"][0]["content"] for body in backends.encode[0].bodies]
    assert Counter(tuple(part["type"] for part in content) for content in contents) == {
        ("image_url", "image_url"): 1,
        ("audio_url",): 2,
        ("video_url",): 1,
    }


async def test_an_encode_call_holds_the_media_and_what_has_a_say_in_its_key() -> None:
    backends = fleet(1)
    shared = {
        "mm_processor_kwargs": {"max_pixels": 1},
        "media_io_kwargs": {"image": {}},
        "priority": -3,
        "session_id": "s",
    }
    await chat(backends.proxy(), ask(image(), max_tokens=9, tools=[], stream=True, **shared))
    (body,) = backends.encode[0].bodies
    assert body.keys() == {"model", "messages", "stream", *shared}
    assert body["stream"] is False
    assert {name: body[name] for name in shared} == shared
    assert [message["role"] for message in body["messages"]] == ["user"]


async def test_a_request_without_model_makes_an_encode_call_without() -> None:
    backends = fleet(1)
    body = ask(image())
    del body["model"]
    assert (await chat(backends.proxy(), body)).status == 200
    assert "model" not in backends.encode[0].bodies[0]


async def test_each_encode_call_has_an_id_derived_from_the_callers() -> None:
    backends = fleet(2)
    await chat(backends.proxy(), ask(*pictures(4)), {"x-request-id": "r7"})
    ids = [engine.requests[0].headers["x-request-id"] for engine in backends.encode]
    assert all(re.fullmatch(r"r7:[01]:[0-9a-f]{6}", found) for found in ids)
    assert len({found.split(":")[1] for found in ids}) == 2


async def test_the_kth_item_gets_what_was_produced_for_it_however_late_it_comes() -> None:
    backends = Backends(encode=3)
    arrived = asyncio.Event()
    calls: list[str] = []

    async def slow_first(request: httpx.Request) -> httpx.Response:
        calls.append(request.url.host)
        if len(calls) == 3:
            arrived.set()
        elif len(calls) == 1:
            await arrived.wait()
        entries = {}
        for index, part in enumerate(json.loads(request.content)["messages"][0]["content"]):
            number = int(re.findall(r"\d+", part["image_url"]["url"])[0])
            grid = {"image_grid_thw": [1, number, number]}
            entries[part["uuid"]] = {"metadata": grid, "item_indices": [index]}
        return report(dict(reversed(entries.items())))

    for engine in backends.encode:
        engine.route.mock(side_effect=slow_first)
    text = {"type": "text", "text": "and"}
    first, *rest = pictures(7)
    reply = await chat(backends.proxy(), ask(first, text, *rest))
    assert reply.status == 200
    content = backends.decode[0].bodies[0]["messages"][0]["content"]
    grids = [part["image_embeds"]["image_grid_thw"] for part in content if "image_embeds" in part]
    assert grids == [[1, n, n] for n in range(7)]


@pytest.mark.parametrize("status", [500, 422])
async def test_the_first_failed_call_fails_the_request_and_ends_the_others(status: int) -> None:
    backends = Backends(encode=3)
    started = asyncio.Semaphore(0)
    cancelled: list[str] = []

    async def hang(request: httpx.Request) -> httpx.Response:
        started.release()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(request.url.host)
            raise
        raise AssertionError

    async def fail(request: httpx.Request) -> httpx.Response:
        await started.acquire()
        await started.acquire()
        return httpx.Response(status, json={"error": {"message": "no"}})

    for engine, effect in zip(backends.encode, (hang, fail, hang), strict=True):
        engine.route.mock(side_effect=effect)
    proxy = backends.proxy(encode_retries=0)
    reply = await chat(proxy, ask(*pictures(3)))
    assert reply.status == (502 if status == 500 else status)
    assert sorted(cancelled) == ["e0", "e2"]
    assert backends.decode[0].requests == []
    assert [one.load for one in proxy.registry.ready(Role.ENCODE)] == [0, 0, 0]


async def test_items_count_in_an_encoders_load_until_their_call_has_ended() -> None:
    backends = fleet(1)
    seen: list[int] = []
    proxy = backends.proxy(encoder_batch_size=2)
    (instance,) = proxy.registry.ready(Role.ENCODE)

    def note(request: httpx.Request) -> httpx.Response:
        seen.append(instance.load)
        return reports(request)

    backends.encode[0].route.mock(side_effect=note)
    await chat(proxy, ask(*pictures(3)))
    assert seen[0] == sum(len(json.dumps(picture["image_url"])) for picture in pictures(3))
    assert instance.load == 0


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, content=b"<html>"),
        httpx.Response(200, json=[1]),
        httpx.Response(200, content=b'{"choices": [{"finish_reason": "\xff"}]}'),
        httpx.Response(200, content=b'{"ec_transfer_params": {"h": {"item_indices": [1e400]}}}'),
        httpx.Response(200, content=b'{"ec_transfer_params": {"h": {"modality": "\xff"}}}'),
        httpx.Response(200, content=b'{"choices": %b}' % (b"[" * 100_000 + b"]" * 100_000)),
        httpx.Response(204),
        httpx.Response(302, headers={"location": "http://elsewhere"}),
        httpx.Response(500, json={"error": {"message": "secret"}}),
        httpx.Response(502, text="<h1>Bad Gateway</h1>"),
        report(None, choices=[{"finish_reason": "abort"}]),
        report(None, choices=[{"finish_reason": "error"}]),
    ],
)
async def test_an_encoder_that_fails_is_a_502_of_the_encode_stage(answer: httpx.Response) -> None:
    backends = Backends()
    backends.encode[0].answers(answer)
    reply = await chat(backends.proxy(), ask(image()))
    assert reply.status == 502
    assert reply.error["stage"] == "encode"
    assert reply.error["type"] == "upstream_error"
    assert b"e0:8000" not in reply.body
    assert backends.decode[0].requests == []


@pytest.mark.parametrize("choices", [None, 5, [], [5], [{"finish_reason": 7}], [{}]])
async def test_odd_choices_in_an_encoders_answer_do_no_harm(choices: Any) -> None:
    backends = Backends()
    backends.encode[0].answers(report(None, choices=choices))
    assert (await chat(backends.proxy(), ask(image()))).status == 200


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 501, 503, 529])
async def test_an_encoders_refusal_reaches_the_caller_as_it_is(status: int) -> None:
    body = b'{"error":{"message":"Cache miss for image at index 0"}}'
    headers = {"content-type": "application/json", "retry-after": "7", "server": "e"}
    backends = Backends(prefill=1)
    backends.encode[0].answers(httpx.Response(status, content=body, headers=headers))
    for stream in (False, True):
        reply = await chat(backends.proxy(), ask(image(), stream=stream))
        assert (reply.status, reply.body) == (status, body)
        assert reply.header("content-type") == "application/json"
        assert reply.header("retry-after") == "7"
        assert reply.header("server") is None
    assert backends.prefill[0].requests == []


async def test_a_report_that_cannot_be_matched_is_a_502_that_names_the_items() -> None:
    backends = Backends()
    backends.encode[0].answers(report({"h": {"metadata": GRID}}))
    reply = await chat(backends.proxy(), ask(*pictures(2)))
    assert reply.status == 502
    assert reply.error["stage"] == "encode"
    assert "messages[0].content[0], messages[0].content[1]" in reply.error["message"]


async def test_without_rewriting_encoder_and_decode_see_the_callers_parts_and_no_uuid() -> None:
    backends = Backends()
    entries = {"by-content": {"metadata": GRID, "peer_host": "10.0.0.1", "peer_port": 5601}}
    backends.encode[0].answers(report(entries))
    body = ask(image(), image("http://media/1.png", uuid="mine"))
    assert (await chat(backends.proxy(no_rewrite=True), body)).status == 200
    sent = backends.encode[0].bodies[0]["messages"][0]["content"]
    assert sent == body["messages"][0]["content"]
    assert backends.decode[0].bodies == [{**body, "ec_transfer_params": entries}]


async def test_without_encoders_media_goes_to_decode_as_it_came() -> None:
    backends = Backends(encode=0)
    body = json.dumps(ask(image(), image(uuid=None)), indent=1).encode()
    await chat(backends.proxy(), body)
    assert backends.decode[0].raw == [body]


async def test_media_and_no_encoder_ready_is_a_503_but_text_is_served() -> None:
    backends = Backends(prefill=1)
    proxy = backends.proxy()
    proxy.registry.remove(proxy.registry.ready(Role.ENCODE)[0])
    reply = await chat(proxy, ask(image()))
    assert (reply.status, reply.error["stage"]) == (503, "encode")
    assert reply.error["type"] == "overloaded_error"
    assert (await chat(proxy, ask({"type": "text", "text": "hi"}))).status == 200


async def test_without_a_decode_server_ready_no_encoder_is_troubled() -> None:
    backends = Backends()
    proxy = backends.proxy()
    proxy.registry.remove(proxy.registry.ready(Role.DECODE)[0])
    reply = await chat(proxy, ask(image()))
    assert (reply.status, reply.error["stage"]) == (503, "decode")
    assert backends.encode[0].requests == []
