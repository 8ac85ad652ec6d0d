"""
Callers on raw sockets, who see every byte, tell a whole answer from a cut one, and leave at will.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import h11

from tests.driver import CHAT

Leaving = Literal["fin", "rst", "half-close"]
LEAVINGS: tuple[Leaving, ...] = ("fin", "rst", "half-close")


@dataclass(frozen=True)
class Answer:
    """What a caller got, to the end of the answer or of the connection."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    is_whole: bool
    raw: bytes
    """Every byte, head included."""
    seconds: float
    """From the request to here."""

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    @property
    def is_json(self) -> bool:
        kind = self.header("content-type") or ""
        return kind.partition(";")[0] == "application/json"

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


class Caller:
    """One connection to the proxy, with one request on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._parser = h11.Connection(h11.CLIENT)
        self._parser.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
        self._parser.send(h11.EndOfMessage())
        self._began = asyncio.get_running_loop().time()
        self.status = 0
        """0 until the answer's head is there."""
        self.headers: list[tuple[str, str]] = []
        self.body = bytearray()
        self.raw = bytearray()
        self.is_whole = False
        self.is_over = False

    @classmethod
    async def connect(cls, url: str, *, receive_buffer: int | None = None) -> Self:
        address = urlsplit(url)
        sock = socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (address.hostname, address.port))
        # A small limit: who stops reading shall hold the proxy back, not fill a buffer here.
        return cls(*await asyncio.open_connection(sock=sock, limit=4096))

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def ask(
        self, body: bytes = b"", headers: Mapping[str, str] | None = None, *, line: str = ""
    ) -> None:
        """Sends a request, a chat request unless its line is given."""
        fields = {"host": "proxy", "content-length": str(len(body)), **(headers or {})}
        start = [line or f"POST {CHAT} HTTP/1.1"]
        lines = [*start, *(f"{name}: {value}" for name, value in fields.items()), "", ""]
        await self.send("\r\n".join(lines).encode() + body)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Reads until something holds, or nothing more comes."""
        while not self.is_over and not holds():
            await self._more()

    async def head(self) -> int:
        """The status, once the head is there; 0 if none came."""
        await self.until(lambda: self.status > 0)
        return self.status

    async def answer(self) -> Answer:
        """All that comes."""
        await self.until(lambda: False)
        seconds = asyncio.get_running_loop().time() - self._began
        return Answer(
            self.status, self.headers, bytes(self.body), self.is_whole, bytes(self.raw), seconds
        )

    async def _more(self) -> None:
        try:
            data = await self._reader.read(65536)
        except ConnectionError:
            self.is_over = True
            return
        self.raw += data
        self._parser.receive_data(data)
        try:
            self._parse()
        except h11.RemoteProtocolError:
            # It ended in the middle.
            self.is_over = True

    def _parse(self) -> None:
        while (found := self._parser.next_event()) is not h11.NEED_DATA:
            if isinstance(found, h11.Response):
                self.status = found.status_code
                self.headers = [(name.decode(), value.decode()) for name, value in found.headers]
            elif isinstance(found, h11.Data):
                self.body += found.data
            elif isinstance(found, h11.EndOfMessage | h11.ConnectionClosed):
                self.is_whole = isinstance(found, h11.EndOfMessage)
                self.is_over = True
                return

    def leave(self, how: Leaving) -> None:
        """A half-closed connection stays open on this side until the end of the test."""
        if how == "half-close":
            self._writer.write_eof()
        elif how == "fin":
            self._writer.close()
        else:
            sock = self._writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.transport.abort()
        await asyncio.sleep(0)
