"""
One call to one engine: its address, its headers, and what its failure means.

httpx is known here and in ``pool``, and to no stage. The transport is called directly, so there is
no cookie jar between callers, no proxy from the environment, no redirect and no header of a
client's own.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Self

import httpx

from epd_proxy.config import Config, flag_name
from epd_proxy.errors import (
    ConfigError,
    EngineRefusal,
    RawHeaders,
    UpstreamError,
    UpstreamTimeout,
)
from epd_proxy.payload import Buffer, size_of
from epd_proxy.pool import ConnectionPool
from epd_proxy.registry import Instance

CHAT_PATH = "/v1/chat/completions"

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_RELAYED = _HOP_BY_HOP | {b"x-request-id"}
# What describes the caller's own message, what names the caller to the proxy alone, and what tells
# an engine to connect somewhere: that is for the proxy to say, or for nobody.
_NOT_FORWARDED = _HOP_BY_HOP | {
    b"accept-encoding",
    b"content-encoding",
    b"content-length",
    b"content-type",
    b"cookie",
    b"expect",
    b"host",
    b"x-request-id",
}
# 5xx that tell the caller more than our 502 would: unsupported, overloaded.
_TELLING = frozenset({501, 503, 529})
_REFUSAL_HEADERS = frozenset({b"content-type", b"retry-after", b"www-authenticate"})
_ROUTING_PREFIXES = (b"x-data-parallel-", b"x-encoder-", b"x-prefiller-")


def default_transport(config: Config) -> httpx.AsyncBaseTransport:
    return ConnectionPool(
        keep_alive=config.keep_alive, max_connections=config.max_connections or None
    )


def forwarded_headers(headers: RawHeaders) -> RawHeaders:
    """The caller's end-to-end headers, which every stage gets."""
    return [
        (name, value)
        for name, value in _without(headers, _NOT_FORWARDED)
        if not name.startswith(_ROUTING_PREFIXES)
    ]


def relayed_headers(headers: RawHeaders) -> RawHeaders:
    """The headers of an engine's answer that are for the caller; the request id is ours."""
    return _without(headers, _NOT_RELAYED)


def _without(headers: RawHeaders, dropped: frozenset[bytes]) -> RawHeaders:
    lowered = [(name.lower(), value) for name, value in headers]
    for name, value in lowered:
        if name == b"connection":
            dropped |= {option.strip().lower() for option in value.split(b",")}
        elif name == b"transfer-encoding":
            # It overrides a length, RFC 9112, section 6.3.
            dropped |= {b"content-length"}
    return [(name, value) for name, value in lowered if name not in dropped]


class Buffers(httpx.AsyncByteStream):
    """A request body in pieces, none of which is joined or copied."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = buffers

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for buffer in self.buffers:
            yield buffer  # type: ignore[misc]  # transports take any bytes-like object


class Answer:
    """
    An engine's answer whose head has arrived. An async context manager, which closes it.

    Closing before the end drops the connection, which is what stops the engine's work.
    """

    __slots__ = ("_stream", "headers", "instance", "status")

    def __init__(
        self,
        instance: Instance,
        status: int,
        headers: RawHeaders,
        stream: httpx.AsyncByteStream,
    ) -> None:
        self.instance = instance
        self.status = status
        self.headers = headers
        self._stream = stream

    async def read(self) -> bytes:
        """The whole body, decompressed. Raises UpstreamError."""
        try:
            content = b"".join([chunk async for chunk in self._stream])
            if any(name.lower() == b"content-encoding" for name, _ in self.headers):
                return httpx.Response(self.status, headers=self.headers, content=content).content
        except httpx.HTTPError as exc:
            raise _failure_of(self.instance, exc) from exc
        return content

    async def pass_to(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Writes the body's bytes as they come, compressed if they are. Raises UpstreamError."""
        try:
            # Not `aiter_raw`, which refuses an answer that a mock has made out of bytes.
            async for chunk in self._stream:
                await write(chunk)
        except httpx.HTTPError as exc:
            raise _failure_of(self.instance, exc) from exc

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


async def accepted(answer: Answer) -> bytes:
    """
    The body of a 200.

    Raises EngineRefusal for what the caller has to know, 4xx above all, and UpstreamError.
    """
    content, instance = await answer.read(), answer.instance
    if answer.status == 200:
        return content
    if 400 <= answer.status < 500 or answer.status in _TELLING:
        headers = [pair for pair in answer.headers if pair[0].lower() in _REFUSAL_HEADERS]
        raise EngineRefusal(instance.role, instance.url, answer.status, headers, content)
    raise UpstreamError(instance.role, instance.url, f"answered with status {answer.status}")


class Upstream:
    """Calls engines over an httpx transport."""

    def __init__(self, transport: httpx.AsyncBaseTransport, config: Config) -> None:
        self._transport = transport
        self._timeouts = {
            "connect": config.connect_timeout or None,
            "pool": config.pool_timeout or None,
        }

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def chat(
        self, instance: Instance, headers: RawHeaders, request_id: str, body: Sequence[Buffer]
    ) -> Answer:
        """
        ``POST /v1/chat/completions``, up to the answer's head.

        ``headers`` are the caller's, as forwarded; the call gets ``request_id`` for its own. Raises
        UpstreamError (502), UpstreamTimeout (504).
        """
        headers = [(b"x-request-id", request_id.encode()), *headers]
        return await self._send("POST", instance, CHAT_PATH, headers, body)

    async def post(
        self, instance: Instance, path: str, headers: RawHeaders, body: Sequence[Buffer]
    ) -> Answer:
        """JSON to another path."""
        return await self._send("POST", instance, path, headers, body)

    async def get(self, instance: Instance, path: str, headers: RawHeaders) -> Answer:
        return await self._send("GET", instance, path, headers, None)

    async def _send(
        self,
        method: str,
        instance: Instance,
        path: str,
        headers: RawHeaders,
        body: Sequence[Buffer] | None,
    ) -> Answer:
        url, host = _target(instance.url, path)
        fields = [(b"host", host)]
        if body is not None:
            length = str(size_of(body)).encode()
            fields += (b"content-type", b"application/json"), (b"content-length", length)
        fields += headers
        try:
            return await self._exchange(instance, method, url, fields, body or ())
        except httpx.HTTPError as exc:
            raise _failure_of(instance, exc) from exc

    async def _exchange(
        self,
        instance: Instance,
        method: str,
        url: httpx.URL,
        fields: RawHeaders,
        body: Sequence[Buffer],
    ) -> Answer:
        if isinstance(self._transport, ConnectionPool):
            # The short way into our own: httpx's objects are a tenth of a text request's cost.
            incoming = await self._transport.send(method, url, fields, body, self._timeouts)
            return Answer(instance, incoming.status, incoming.fields, incoming)
        extensions = {"timeout": self._timeouts}
        request = httpx.Request(
            method, url, headers=fields, stream=Buffers(body), extensions=extensions
        )
        response = await self._transport.handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        return Answer(instance, response.status_code, response.headers.raw, response.stream)


def check_address(instance: Instance) -> None:
    """Raises ConfigError if no transport could call the instance."""
    try:
        _target(instance.url, CHAT_PATH)
    except httpx.InvalidURL as exc:
        raise ConfigError(flag_name(instance.role), f"{instance.url!r}: {exc}") from None


@functools.lru_cache(maxsize=1024)
def _target(url: str, path: str) -> tuple[httpx.URL, bytes]:
    target = httpx.URL(url + path)
    return target, b"localhost" if target.scheme == "http+unix" else target.netloc


def _failure_of(instance: Instance, exc: httpx.HTTPError) -> UpstreamError:
    """httpx's exception in our terms."""
    kind, reason = UpstreamError, "broke the connection"
    if isinstance(exc, httpx.ConnectError | httpx.ConnectTimeout):
        reason = "could not be reached"
    elif isinstance(exc, httpx.TimeoutException):
        kind, reason = UpstreamTimeout, "did not answer in time"
    elif isinstance(exc, httpx.DecodingError):
        reason = "sent what cannot be read"
    cause = f"{type(exc).__name__} {exc}".strip()
    return kind(instance.role, instance.url, reason, cause=cause)
