from __future__ import annotations

import asyncio
from types import SimpleNamespace

import httpx
import pytest
import respx

from epd_proxy import Role
from tests.backends import Backends, ask
from tests.driver import call, chat


def health(backends: Backends, **statuses: list[int]) -> None:
    for role, codes in statuses.items():
        for engine, code in zip(getattr(backends, role), codes, strict=True):
            answer = httpx.ConnectError("refused") if code == 0 else httpx.Response(code)
            backends.router.get(engine.url + "/health").mock(side_effect=[answer] * 9)


@pytest.mark.parametrize(
    ("encode", "prefill", "decode", "status", "states"),
    [
        ([200], [200], [200], 200, ["healthy", "healthy", "healthy"]),
        ([503, 200], [200], [0, 200], 200, ["healthy", "healthy", "healthy"]),
        ([], [], [200], 200, ["empty", "empty", "healthy"]),
        ([200], [503], [200], 503, ["healthy", "unhealthy", "healthy"]),
        ([0, 503], [], [200], 503, ["unhealthy", "empty", "healthy"]),
        ([], [], [500], 503, ["empty", "empty", "unhealthy"]),
    ],
)
async def test_health_asks_every_engine_and_is_red_if_a_role_has_none(
    encode: list[int], prefill: list[int], decode: list[int], status: int, states: list[str]
) -> None:
    backends = Backends(encode=len(encode), prefill=len(prefill), decode=len(decode))
    health(backends, encode=encode, prefill=prefill, decode=decode)
    reply = await call(backends.proxy(), "GET", "/health")
    assert reply.status == status
    assert reply.json() == {
        "proxy": "healthy",
        "encode_cluster": states[0],
        "prefill_cluster": states[1],
        "decode_cluster": states[2],
    }


async def test_health_is_red_if_the_last_instance_of_a_role_has_gone() -> None:
    backends = Backends(encode=0)
    proxy = backends.proxy()
    proxy.registry.remove(proxy.registry.ready(Role.DECODE)[0])
    assert (await call(proxy, "GET", "/health")).status == 503


async def test_an_engine_that_does_not_answer_in_time_is_not_healthy() -> None:
    backends = Backends(encode=0)

    async def hang(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    backends.router.get("http://d0:8000/health").mock(side_effect=hang)
    reply = await call(backends.proxy(probe_timeout=0.01), "GET", "/health")
    assert reply.status == 503


async def test_live_asks_nobody() -> None:
    reply = await call(Backends().proxy(), "GET", "/live")
    assert (reply.status, reply.json()) == (200, {"proxy": "healthy"})


async def test_models_of_a_single_decode_server_are_its_own_words() -> None:
    backends = Backends()
    body = b'{"object": "list",\n "data": []}'
    backends.router.get("http://d0:8000/v1/models").respond(
        200, content=body, headers={"content-type": "application/json"}
    )
    reply = await call(backends.proxy(), "GET", "/v1/models", headers={"authorization": "Bearer k"})
    assert (reply.status, reply.body) == (200, body)
    (asked,) = [each.request for route in backends.router.routes for each in route.calls]
    assert asked.headers["authorization"] == "Bearer k"


async def test_models_of_several_are_put_together_and_kept_for_a_moment() -> None:
    backends = Backends(decode=3)
    cards = ([{"id": "a", "n": 0}], [{"id": "b"}, {"id": "a", "n": 1}])
    for engine, data in zip(backends.decode, cards, strict=False):
        backends.router.get(engine.url + "/v1/models").respond(200, json={"data": data})
    backends.router.get("http://d2:8000/v1/models").respond(200, text="?")
    proxy = backends.proxy()
    for _ in range(2):
        reply = await call(proxy, "GET", "/v1/models")
        assert reply.status == 200
        assert reply.json() == {"object": "list", "data": [{"id": "b"}, {"id": "a", "n": 0}]}
    asked = [each.request for route in backends.router.routes for each in route.calls]
    assert len(asked) == 3


async def test_models_are_kept_for_a_moment_for_callers_who_say_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("epd_proxy.admin.time", clock)
    backends = Backends(decode=2)
    routes = [
        backends.router.get(engine.url + "/v1/models").respond(200, json={"data": [{"id": "a"}]})
        for engine in backends.decode
    ]
    proxy = backends.proxy()
    for number in range(150):
        headers = {"authorization": f"Bearer {number}"}
        for _ in range(2):
            assert (await call(proxy, "GET", "/v1/models", headers=headers)).status == 200
    assert [route.call_count for route in routes] == [150, 150]
    now[0] += 1.1
    await call(proxy, "GET", "/v1/models", headers=headers)
    assert [route.call_count for route in routes] == [151, 151]


@pytest.mark.parametrize(("status", "expected"), [(401, 401), (404, 404), (500, 500)])
async def test_models_that_no_decode_server_tells_are_what_the_first_said(
    status: int, expected: int
) -> None:
    backends = Backends(decode=2)
    refusal = {"error": {"message": "no", "code": status}}
    backends.router.get("http://d0:8000/v1/models").respond(status, json=refusal)
    backends.router.get("http://d1:8000/v1/models").mock(side_effect=httpx.ConnectError("no"))
    reply = await call(backends.proxy(), "GET", "/v1/models")
    assert (reply.status, reply.json()) == (expected, refusal)


async def test_models_of_a_server_that_drains_are_not_told() -> None:
    backends = Backends(decode=2)
    backends.router.get("http://d0:8000/v1/models").respond(200, json={"data": [{"id": "a"}]})
    backends.router.get("http://d1:8000/v1/models").respond(200, json={"data": [{"id": "b"}]})
    proxy = backends.proxy()
    proxy.registry.drain("api", {"http://d0:8000"})
    reply = await call(proxy, "GET", "/v1/models")
    assert reply.json() == {"data": [{"id": "b"}]}


async def test_questions_about_models_do_not_shift_the_turns_of_answers() -> None:
    backends = Backends(decode=2)
    for engine in backends.decode:
        backends.router.get(engine.url + "/v1/models").respond(200)
    proxy = backends.proxy()
    for _ in range(4):
        await call(proxy, "GET", "/v1/models")
        await chat(proxy, ask({"type": "text", "text": "hi"}))
    assert [len(engine.requests) for engine in backends.decode] == [2, 2]


async def test_models_without_a_decode_server_is_a_503_and_an_unreachable_one_a_502() -> None:
    backends = Backends()
    proxy = backends.proxy()
    backends.router.get("http://d0:8000/v1/models").mock(side_effect=httpx.ConnectError("no"))
    assert (await call(proxy, "GET", "/v1/models")).status == 502
    proxy.registry.remove(proxy.registry.ready(Role.DECODE)[0])
    reply = await call(proxy, "GET", "/v1/models")
    assert (reply.status, reply.error["type"]) == (503, "overloaded_error")


KEY = {"x-api-key": "secret"}


def profilers(backends: Backends, path: str, **answers: httpx.Response) -> dict[str, respx.Route]:
    """What the first engine of each role answers to a profiling call."""
    return {
        role: backends.router.post(f"http://{role[0]}0:8000{path}").mock(return_value=answer)
        for role, answer in answers.items()
    }


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
async def test_profiling_goes_to_one_instance_of_each_role(path: str) -> None:
    backends = Backends(encode=2, prefill=1, decode=2)
    routes = profilers(
        backends,
        path,
        encode=httpx.Response(200),
        prefill=httpx.Response(404, json={"detail": "Not Found"}),
        decode=httpx.Response(200, json={"message": "ok"}),
    )
    proxy = backends.proxy(admin_api_key="secret", profile_api_key="bearer")
    headers = {**KEY, "authorization": "Bearer mine", "cookie": "a=1"}
    for _ in range(2):
        reply = await call(proxy, "POST", path, b'{"num_steps" : 5}', headers)
        assert reply.status == 200
        assert reply.json() == {"encode": {}, "prefill": None, "decode": {"message": "ok"}}
    for route in routes.values():
        assert route.call_count == 2
        request = route.calls[0].request
        assert request.content == b'{"num_steps" : 5}'
        assert request.headers["authorization"] == "Bearer bearer"
        assert "cookie" not in request.headers
        assert "x-api-key" not in request.headers


async def test_a_role_that_is_not_there_is_null_in_the_answer() -> None:
    backends = Backends(encode=0)
    profilers(backends, "/start_profile", decode=httpx.Response(200, text="started"))
    reply = await call(backends.proxy(admin_api_key="secret"), "POST", "/start_profile", b"", KEY)
    assert reply.json() == {"encode": None, "prefill": None, "decode": {}}


async def test_a_role_whose_instances_are_all_out_is_a_503() -> None:
    backends = Backends(prefill=1)
    proxy = backends.proxy(admin_api_key="secret")
    proxy.registry.remove(proxy.registry.ready(Role.PREFILL)[0])
    reply = await call(proxy, "POST", "/start_profile", b"", KEY)
    assert (reply.status, reply.error["stage"]) == (503, "prefill")


async def test_in_an_open_fleet_a_role_that_nobody_has_joined_is_null_in_the_answer() -> None:
    backends = Backends(encode=0)
    profilers(backends, "/start_profile", decode=httpx.Response(200, json={"message": "ok"}))
    proxy = backends.proxy(admin_api_key="secret", dynamic_registration=True)
    reply = await call(proxy, "POST", "/start_profile", b"", KEY)
    assert (reply.status, reply.json()) == (
        200,
        {"encode": None, "prefill": None, "decode": {"message": "ok"}},
    )


async def test_a_fleet_without_profilers_is_a_503() -> None:
    backends = Backends()
    missing = httpx.Response(404)
    profilers(backends, "/start_profile", encode=missing, decode=missing)
    reply = await call(backends.proxy(admin_api_key="secret"), "POST", "/start_profile", b"", KEY)
    assert reply.status == 503


@pytest.mark.parametrize(("status", "expected"), [(409, 409), (500, 502)])
async def test_an_engine_that_refuses_to_profile_is_told(status: int, expected: int) -> None:
    backends = Backends()
    refusal = httpx.Response(status, json={"error": {"message": "already running"}})
    routes = profilers(
        backends, "/start_profile", encode=refusal, decode=httpx.Response(200, json={})
    )
    reply = await call(backends.proxy(admin_api_key="secret"), "POST", "/start_profile", b"", KEY)
    assert reply.status == expected
    assert routes["decode"].call_count == 1


@pytest.mark.parametrize("headers", [{}, {"x-api-key": ""}, {"x-api-key": "secreT"}])
async def test_profiling_without_the_right_key_is_a_403(headers: dict[str, str]) -> None:
    proxy = Backends().proxy(admin_api_key="secret")
    reply = await call(proxy, "POST", "/stop_profile", b"{}", headers)
    assert (reply.status, reply.error["type"]) == (403, "authentication_error")


async def test_profiling_is_not_there_where_no_key_is_set() -> None:
    proxy = Backends().proxy(admin_api_key="")
    reply = await call(proxy, "POST", "/start_profile", b"{}", {"x-api-key": ""})
    assert (reply.status, reply.error["type"]) == (404, "not_found_error")
