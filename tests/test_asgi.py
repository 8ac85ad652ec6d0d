from __future__ import annotations

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from epd_proxy.asgi import Exchange, local_path
from epd_proxy.errors import BodyTooLarge
from tests.driver import http_scope


@pytest.mark.parametrize(
    ("path", "root_path", "local"),
    [
        ("/v1/models", "", "/v1/models"),
        ("/api/v1/models", "/api", "/v1/models"),
        ("/api/v1/models", "/api/", "/v1/models"),
        ("/v1/models", "/api", "/v1/models"),
        ("/apiv1", "/api", "/apiv1"),
        ("/v1x", "/v1", "/v1x"),
        ("/api", "/api", "/api"),
        ("/api/", "/api", "/"),
    ],
)
def test_the_mount_prefix_goes_only_at_the_end_of_a_segment(
    path: str, root_path: str, local: str
) -> None:
    assert local_path({"path": path, "root_path": root_path}) == local
    assert local_path({"path": local}) == local


def exchange(*messages: Message, **headers: str) -> Exchange:
    rest = list(messages)

    async def receive() -> Message:
        return rest.pop(0)

    async def send(message: Message) -> None:
        raise AssertionError("nothing is to be sent")

    return Exchange(http_scope("POST", "/", headers), receive, send)


def part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_a_body_in_many_messages_is_read_whole() -> None:
    messages = [*(part(bytes([n])) for n in range(200)), {"type": "http.request"}]
    assert await exchange(*messages).read(200) == bytes(range(200))


async def test_a_declared_length_over_the_limit_is_refused_before_a_byte_is_read() -> None:
    with pytest.raises(BodyTooLarge, match="larger than 10 bytes"):
        await exchange(**{"content-length": "11"}).read(10)


async def test_a_body_is_refused_as_soon_as_it_passes_the_limit() -> None:
    rest = exchange(part(b"12345"), part(b"678901"), part(b"never read"))
    with pytest.raises(BodyTooLarge):
        await rest.read(10)


async def test_a_body_of_just_the_limit_is_read() -> None:
    declared = {"content-length": "10"}
    assert await exchange(part(b"1234567890", more=False), **declared).read(10) == b"1234567890"


async def test_a_caller_who_leaves_in_the_body_is_no_request() -> None:
    with pytest.raises(ClientDisconnect):
        await exchange(part(b"1"), {"type": "http.disconnect"}).read(10)


@pytest.mark.parametrize("given", ["r1", "A.b_c:d-9", "x" * 128])
def test_a_callers_request_id_is_kept(given: str) -> None:
    assert exchange(**{"x-request-id": given}).request_id == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\tb", "é", "a/b", "a\n"])
def test_a_request_id_that_is_not_safe_to_repeat_is_replaced(given: str) -> None:
    made = exchange(**{"x-request-id": given}).request_id
    assert made != given
    assert len(made) == 32
