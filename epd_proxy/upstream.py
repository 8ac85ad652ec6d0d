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
from epd_proxy.connection import Incoming
from epd_proxy.errors import (
    ConfigError,
    EngineRefusal,
    RawHeaders,
    RequestError,
    UpstreamError,
    UpstreamTimeout,
)
from epd_proxy.payload import Buffer, size_of
from epd_proxy.pool import ConnectionPool, Origin
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


class Forwarded:
    """
    The caller's end-to-end headers, which every stage gets.

    ``fields`` for any transport, ``block`` as they stand on the wire. Raises RequestError (400) if
    one of them would end where another line begins, which some hosts let through.
    """

    __slots__ = ("block", "fields")

    def __init__(self, headers: RawHeaders) -> None:
        self.fields = [
            field
            for field in _without(headers, _NOT_FORWARDED)
            if not field[0].startswith(_ROUTING_PREFIXES)
        ]
        self.block = b"".join([b"%b: %b\r\n" % field for field in self.fields])
        if self.block.count(b"\n") != len(self.fields) or b"\0" in self.block:
            raise RequestError("a header holds a line break")


def relayed_headers(headers: RawHeaders) -> RawHeaders:
    """The headers of an engine's answer that are for the caller; the request id is ours."""
    return _without(headers, _NOT_RELAYED)


def _without(headers: RawHeaders, dropped: frozenset[bytes]) -> RawHeaders:
    for name, value in headers:
        if name == b"connection":
            dropped |= {option.strip().lower() for option in value.split(b",")}
        elif name == b"transfer-encoding":
            # It overrides a length, RFC 9112, section 6.3.
            dropped |= {b"content-length"}
    return [field for field in headers if field[0] not in dropped]


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

    ``headers`` have names in lower case. Closing before the end drops the connection, which is
    what stops the engine's work.
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
        pieces: list[bytes] = []

        async def keep(piece: bytes, more: bool) -> None:
            pieces.append(piece)

        await self.pass_to(keep)
        content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if any(name == b"content-encoding" for name, _ in self.headers):
            try:
                return httpx.Response(self.status, headers=self.headers, content=content).content
            except httpx.DecodingError as exc:
                raise _failure_of(self.instance, exc) from exc
        return content

    async def pass_to(self, write: Callable[[bytes, bool], Awaitable[None]]) -> None:
        """
        Writes the body's bytes as they come, compressed if they are. Raises UpstreamError.

        The second argument says whether more follows.
        """
        stream = self._stream
        try:
            if isinstance(stream, Incoming):
                # Not as an iterator: with the last bytes it is known that they are the last.
                while not stream.is_complete:
                    if piece := stream.take():
                        await write(piece, True)
                    else:
                        await stream.more()
                await write(stream.take(), False)
                return
            # Not `aiter_raw`, which refuses an answer that a mock has made out of bytes.
            async for chunk in stream:
                await write(chunk, True)
        except httpx.HTTPError as exc:
            raise _failure_of(self.instance, exc) from exc
        await write(b"", False)

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
        headers = [pair for pair in answer.headers if pair[0] in _REFUSAL_HEADERS]
        raise EngineRefusal(instance.role, instance.url, answer.status, headers, content)
    raise UpstreamError(instance.role, instance.url, f"answered with status {answer.status}")


class Upstream:
    """Calls engines over an httpx transport."""

    def __init__(self, transport: httpx.AsyncBaseTransport, config: Config) -> None:
        self._transport = transport
        self._targets: dict[str, tuple[Origin, bytes]] = {}
        self._timeouts = {
            "connect": config.connect_timeout or None,
            "pool": config.pool_timeout or None,
        }

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def chat(
        self,
        instance: Instance,
        forwarded: Forwarded,
        request_id: str,
        body: Sequence[Buffer],
        extra: RawHeaders | None = None,
    ) -> Answer:
        """
        ``POST /v1/chat/completions``, up to the answer's head.

        The call gets ``request_id`` for its own. Raises UpstreamError (502), UpstreamTimeout (504).
        """
        pool = self._transport
        if not isinstance(pool, ConnectionPool):
            own = [(b"x-request-id", request_id.encode()), *(extra or ())]
            return await self.post(instance, CHAT_PATH, [*forwarded.fields, *own], body)
        # The short way into our own: httpx's objects are a tenth of a text request's cost.
        origin, lines = self._target(pool, instance)
        more = b"".join([b"%b: %b\r\n" % field for field in extra]) if extra else b""
        head = b"%b%b%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (
            lines,
            forwarded.block,
            more,
            request_id.encode(),
            size_of(body),
        )
        try:
            incoming = await pool.send(origin, head, body, self._timeouts)
        except httpx.HTTPError as exc:
            raise _failure_of(instance, exc) from exc
        return Answer(instance, incoming.status, incoming.fields, incoming)

    def _target(self, pool: ConnectionPool, instance: Instance) -> tuple[Origin, bytes]:
        """Where chat calls to an instance go, and how their heads begin."""
        found = self._targets.get(instance.url)
        if found is None:
            url, host = _address(instance.url, CHAT_PATH)
            lines = b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n" % (
                url.raw_path,
                host,
            )
            found = self._targets[instance.url] = pool.origin(url), lines
        return found

    async def post(
        self, instance: Instance, path: str, headers: RawHeaders, body: Sequence[Buffer]
    ) -> Answer:
        """JSON to any path."""
        own = [
            (b"content-type", b"application/json"),
            (b"content-length", str(size_of(body)).encode()),
        ]
        return await self._send("POST", instance, path, [*own, *headers], body)

    async def get(self, instance: Instance, path: str, headers: RawHeaders) -> Answer:
        return await self._send("GET", instance, path, headers, ())

    async def _send(
        self,
        method: str,
        instance: Instance,
        path: str,
        headers: RawHeaders,
        body: Sequence[Buffer],
    ) -> Answer:
        url, host = _address(instance.url, path)
        request = httpx.Request(
            method,
            url,
            headers=[(b"host", host), *headers],
            stream=Buffers(body),
            extensions={"timeout": self._timeouts},
        )
        try:
            response = await self._transport.handle_async_request(request)
        except httpx.HTTPError as exc:
            raise _failure_of(instance, exc) from exc
        assert isinstance(response.stream, httpx.AsyncByteStream)
        fields = [(name.lower(), value) for name, value in response.headers.raw]
        return Answer(instance, response.status_code, fields, response.stream)


def check_address(instance: Instance) -> None:
    """Raises ConfigError if no transport could call the instance."""
    try:
        _address(instance.url, CHAT_PATH)
    except httpx.InvalidURL as exc:
        raise ConfigError(flag_name(instance.role), f"{instance.url!r}: {exc}") from None


@functools.lru_cache(maxsize=1024)
def _address(url: str, path: str) -> tuple[httpx.URL, bytes]:
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
