"""
One call to one engine: its address, its headers, and what its failure means.

httpx is known here and in ``pool``, and to no stage. The transport is called directly, so there is
no cookie jar between callers, no proxy from the environment, no redirect and no header of a
client's own.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Protocol, Self

import httpx

from epd_proxy.config import Config, flag_name
from epd_proxy.connection import Limits
from epd_proxy.errors import (
    ConfigError,
    EngineError,
    Exhausted,
    RawHeaders,
    Redo,
    RequestError,
    Unreachable,
    UpstreamError,
    UpstreamTimeout,
)
from epd_proxy.payload import Buffer, size_of
from epd_proxy.pool import ConnectionPool, Origin
from epd_proxy.registry import Instance, Role

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
_ERROR_HEADERS = frozenset({b"retry-after", b"www-authenticate"})
_LONGEST_ERROR = 64 << 10
_LENGTH = frozenset({b"content-length"})
# At the beginning of a name, in a block of headers.
_ROUTING = re.compile(rb"^x-(?:data-parallel|encoder|prefiller)-", re.MULTILINE)


def default_transport(config: Config) -> httpx.AsyncBaseTransport:
    return ConnectionPool(
        keep_alive=config.keep_alive, max_connections=config.max_connections or None
    )


class Forwarding:
    """Which of the callers' headers reach the engines, by the configuration."""

    def __init__(self, config: Config) -> None:
        dropped = set(_NOT_FORWARDED)
        if config.upstream_api_key or config.api_key or config.api_key_file:
            # Where the proxy checks keys, the caller's stops here.
            dropped.add(b"authorization")
        if config.ec_consumer_dp_size > 1:
            # The proxy chooses the replica.
            dropped.add(b"x-data-parallel-rank")
        self.dropped = frozenset(dropped)
        self.routing = None if config.trust_transfer_params else _ROUTING
        key = config.upstream_api_key
        self.own = [(b"authorization", f"Bearer {key}".encode())] if key else []


class Forwarded:
    """
    The caller's end-to-end headers, which every stage gets.

    ``fields`` for any transport, ``block`` as they stand on the wire; ``encodings`` is what the
    caller accepts, which is decode's to know. Raises RequestError (400) if one of them would end
    where another line begins, which some hosts let through.
    """

    __slots__ = ("block", "encodings", "fields")

    def __init__(self, headers: RawHeaders, forwarding: Forwarding) -> None:
        known = dict(headers)
        dropped = forwarding.dropped
        if b"connection" in known:
            dropped |= _listed_in(headers)
        fields = [field for field in headers if field[0] not in dropped]
        if forwarding.own:
            fields += forwarding.own
        self.encodings = known.get(b"accept-encoding", b"")
        self.fields = fields
        self.block = b"".join([b"%b: %b\r\n" % field for field in fields])
        if forwarding.routing and forwarding.routing.search(self.block):
            self.fields = [field for field in fields if not forwarding.routing.match(field[0])]
            self.block = b"".join([b"%b: %b\r\n" % field for field in self.fields])
        lines = self.block + self.encodings
        if not lines.count(b"\r") == lines.count(b"\n") == len(self.fields) or b"\0" in lines:
            raise RequestError("a header holds a line break")


def relayed_headers(headers: RawHeaders, known: Mapping[bytes, bytes]) -> RawHeaders:
    """
    The headers of an engine's answer that are for the caller; the request id is ours.

    ``known``: the same by name.
    """
    dropped = _NOT_RELAYED
    if b"connection" in known:
        dropped |= _listed_in(headers)
    if b"transfer-encoding" in known:
        # It overrides a length, RFC 9112, section 6.3.
        dropped |= _LENGTH
    return [field for field in headers if field[0] not in dropped]


def _listed_in(headers: RawHeaders) -> set[bytes]:
    """What the ``connection`` headers name: it ends here, as they do."""
    return {
        option.strip().lower()
        for name, value in headers
        if name == b"connection"
        for option in value.split(b",")
    }


class Buffers(httpx.AsyncByteStream):
    """A request body in pieces, none of which is joined or copied."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = buffers

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for buffer in self.buffers:
            yield buffer  # type: ignore[misc]  # transports take any bytes-like object


class Body(Protocol):
    """An answer's body on its way; ``Incoming`` is one."""

    @property
    def is_complete(self) -> bool:
        """Whether there is no more to come than what ``take`` has, and nothing to close."""
        ...

    def take(self) -> bytes:
        """What has come and was not read yet; perhaps nothing."""
        ...

    def more(self) -> Awaitable[None]:
        """To await until something has come, or the end. May be cancelled without loss."""
        ...

    async def aclose(self) -> None: ...


class Pulled:
    """A ``Body`` out of what other transports give."""

    def __init__(self, stream: httpx.AsyncByteStream) -> None:
        self.is_complete = False
        self._stream = stream
        # Not `aiter_raw`, which refuses an answer that a mock has made out of bytes.
        self._pieces = aiter(stream)
        self._piece = b""
        self._pending: asyncio.Future[bytes] | None = None

    def take(self) -> bytes:
        piece, self._piece = self._piece, b""
        return piece

    async def more(self) -> None:
        if self._pending is None:
            self._pending = asyncio.ensure_future(anext(self._pieces, b""))
        # A stream that is cancelled while it is asked has no more to say.
        self._piece = await asyncio.shield(self._pending)
        self._pending = None
        if not self._piece:
            await self._stream.aclose()
            self.is_complete = True

    async def aclose(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.wait([self._pending])
        await self._stream.aclose()


class Answer:
    """
    An engine's answer whose head has arrived. An async context manager, which closes it.

    ``headers`` have names in lower case. Closing before the end drops the connection, which is
    what stops the engine's work.
    """

    __slots__ = ("_body", "headers", "instance", "known", "status")

    def __init__(self, instance: Instance, status: int, headers: RawHeaders, body: Body) -> None:
        self.instance = instance
        self.status = status
        self.headers = headers
        self.known = dict(headers)
        """The headers by name, the last of each."""
        self._body = body

    @property
    def is_encoded(self) -> bool:
        """Whether the body is compressed."""
        return b"content-encoding" in self.known

    async def pull(self) -> bytes:
        """What comes next of the body, as it comes; empty at the end. Raises UpstreamError."""
        body = self._body
        try:
            while not (piece := body.take()) and not body.is_complete:
                await body.more()
        except httpx.HTTPError as exc:
            raise _failure_of(self.instance, exc) from exc
        return piece

    async def read(self) -> bytes:
        """The whole body, decompressed. Raises UpstreamError."""
        content = await self.raw()
        return self._plain(content) if self.is_encoded else content

    async def raw(self) -> bytes:
        """The whole body as it comes. Raises UpstreamError."""
        body = self._body
        # It came with the head, if it is small.
        pieces = [body.take()]
        while not body.is_complete:
            pieces.append(await self.pull())
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def begin(self, limit: int) -> tuple[bytes, bool]:
        """
        The body if it has at most ``limit`` bytes, else its beginning, and whether it is whole.

        Where it breaks off counts as its end.
        """
        content = b""
        try:
            while piece := await self.pull():
                content += piece
                if len(content) > limit:
                    break
            else:
                return self._plain(content) if self.is_encoded else content, True
        except UpstreamError:
            pass
        # Half of what is compressed says nothing.
        return b"" if self.is_encoded else content, False

    def _plain(self, content: bytes) -> bytes:
        try:
            return httpx.Response(self.status, headers=self.headers, content=content).content
        except httpx.DecodingError as exc:
            raise _failure_of(self.instance, exc) from exc

    async def pass_to(self, write: Callable[[bytes, bool], Awaitable[None]]) -> None:
        """
        Writes the body's bytes as they come, compressed if they are. Raises UpstreamError.

        The second argument says whether more follows.
        """
        body = self._body
        is_complete = False
        while not is_complete:
            piece = body.take()
            # With the last bytes it is known that they are the last.
            is_complete = body.is_complete
            if piece or is_complete:
                await write(piece, not is_complete)
                continue
            try:
                await body.more()
            except httpx.HTTPError as exc:
                raise _failure_of(self.instance, exc) from exc

    @property
    def is_whole(self) -> bool:
        """Whether it has come to its end; else it has to be closed."""
        return self._body.is_complete

    async def aclose(self) -> None:
        if not self._body.is_complete:
            await self._body.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


def accepted(answer: Answer) -> Awaitable[bytes]:
    """
    To await the body of an encode or prefill server's 200.

    Raises EngineError for what the caller has to know, 4xx above all, and UpstreamError.
    """
    return answer.read() if answer.status == 200 else _refused(answer)


async def _refused(answer: Answer) -> bytes:
    raise await error_of(answer)


async def error_of(answer: Answer) -> UpstreamError:
    """
    What an answer that is no success becomes.

    Decode has the last word, so its errors are the caller's; of the other stages' those that say
    more than our 502 would. Redirects are followed by nobody.
    """
    instance, status = answer.instance, answer.status
    redo = redo_after(instance.role, status)
    if status < 400 or (status >= 500 and instance.role != Role.DECODE and status not in _TELLING):
        return UpstreamError(instance, f"answered with status {status}", redo=redo)
    headers = [field for field in answer.headers if field[0] in _ERROR_HEADERS]
    content, is_whole = await answer.begin(_LONGEST_ERROR)
    return EngineError(instance, status, content, headers=headers, is_whole=is_whole, redo=redo)


def redo_after(role: Role, status: int) -> Redo:
    """4xx and what is meant for good never; 503, where others may have room, only elsewhere."""
    if status == 503:
        return Redo.ELSEWHERE
    if status < 500 or status in _TELLING or (role == Role.DECODE and status != 500):
        return Redo.NEVER
    return Redo.ANYWHERE


class Upstream:
    """Calls engines over an httpx transport."""

    def __init__(self, transport: httpx.AsyncBaseTransport, config: Config) -> None:
        self._transport = transport
        self._pool = transport if isinstance(transport, ConnectionPool) else None
        self._targets: dict[str, tuple[Origin, bytes]] = {}
        self.forwarding = Forwarding(config)
        self._limits = {
            Role.ENCODE: _limits(config, config.encode_timeout, config.encode_timeout),
            Role.PREFILL: _limits(config, config.prefill_timeout, config.prefill_timeout),
            Role.DECODE: _limits(config, config.first_byte_timeout, config.idle_timeout),
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
        pool = self._pool
        if pool is None:
            own = [(b"x-request-id", request_id.encode()), *(extra or ())]
            return await self.post(instance, CHAT_PATH, [*forwarded.fields, *own], body)
        # The short way into our own: httpx's objects are a tenth of a text request's cost.
        origin, lines = self._targets.get(instance.url) or self._aim(pool, instance)
        head = b"%b%b%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (
            lines,
            forwarded.block,
            b"".join([b"%b: %b\r\n" % field for field in extra]) if extra else b"",
            request_id.encode(),
            size_of(body),
        )
        try:
            incoming = await pool.send(
                origin, head, body, self._limits[instance.role], is_gone=instance.is_gone
            )
        except httpx.HTTPError as exc:
            raise _failure_of(instance, exc) from exc
        return Answer(instance, incoming.status, incoming.fields, incoming)

    def _aim(self, pool: ConnectionPool, instance: Instance) -> tuple[Origin, bytes]:
        """Where chat calls to an instance go, and how their heads begin."""
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
            extensions={"timeout": _timeouts(self._limits[instance.role])},
        )
        try:
            if instance.is_gone():
                raise httpx.ConnectError("the instance has been removed")
            response = await self._transport.handle_async_request(request)
        except httpx.HTTPError as exc:
            raise _failure_of(instance, exc) from exc
        assert isinstance(response.stream, httpx.AsyncByteStream)
        fields = [(name.lower(), value) for name, value in response.headers.raw]
        return Answer(instance, response.status_code, fields, Pulled(response.stream))


def _limits(config: Config, head: float, idle: float) -> Limits:
    return Limits(
        connect=config.connect_timeout or None,
        pool=config.pool_timeout or None,
        head=head or None,
        idle=idle or None,
    )


def _timeouts(limits: Limits) -> dict[str, float | None]:
    """For transports that know one limit for head and body."""
    reads = (limits.head, limits.idle)
    read = None if None in reads else max(value for value in reads if value)
    return {"connect": limits.connect, "pool": limits.pool, "write": None, "read": read}


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
    cause = f"{type(exc).__name__} {exc}".strip()
    if isinstance(exc, httpx.PoolTimeout):
        return Exhausted(instance, "has no connection free", cause=cause)
    if isinstance(exc, httpx.ConnectError | httpx.ConnectTimeout):
        return Unreachable(instance, "could not be reached", cause=cause)
    if isinstance(exc, httpx.TimeoutException):
        # A slow decode server may be at work still, and others would be no quicker.
        redo = Redo.NEVER if instance.role == Role.DECODE else Redo.ANYWHERE
        return UpstreamTimeout(instance, "did not answer in time", cause=cause, redo=redo)
    if isinstance(exc, httpx.DecodingError):
        return UpstreamError(instance, "sent what cannot be read", cause=cause)
    return UpstreamError(instance, "broke the connection", cause=cause, redo=Redo.ANYWHERE)
