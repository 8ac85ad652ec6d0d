"""
What does no proxy get around?

    python -m perf.floor PORT ENCODE PREFILL|none DECODE

On blocking sockets, without a parser, an event loop or JSON, for one caller at a time: the kernel
takes the request in once, its images are hashed once, the kernel hands it to an encoder once; then
a small request to prefill and to decode each, and decode's bytes to the caller. Addresses are URLs,
of which the first of a comma list counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import sys
from urllib.parse import urlsplit

_LARGEST = 128 << 20
_READ = 1 << 20
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: engine\r\ncontent-length: %d\r\n\r\n"
_SMALL = b'{"messages":[{"role":"user","content":"%b"}]}' % (b"x" * 750)
_LEG = _HEAD % len(_SMALL) + _SMALL


def dial(addresses: str) -> socket.socket:
    url = urlsplit(addresses.split(",")[0])
    sock = socket.create_connection((url.hostname or "", url.port or 80))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class Reader:
    """Messages of a socket, each into the same buffer."""

    def __init__(self, sock: socket.socket, buffer: memoryview) -> None:
        self._sock = sock
        self._buffer = buffer

    def _more(self, have: int, limit: int) -> int:
        count = self._sock.recv_into(self._buffer[have : min(limit, have + _READ)])
        if not count:
            raise ConnectionResetError
        return have + count

    def read(self) -> tuple[memoryview, memoryview]:
        """The message, and its body alone. Raises ConnectionResetError at the end."""
        have, start = 0, 3
        while start < 4:
            have = self._more(have, len(self._buffer))
            head = bytes(self._buffer[: min(have, 8192)])
            start = head.find(b"\r\n\r\n") + 4
        length = _LENGTH.search(head, 0, start)
        end = start + (int(length[1]) if length else 0)
        while have < end:
            have = self._more(have, end)
        return self._buffer[:end], self._buffer[start:end]


class Floor:
    def __init__(self, encode: str, prefill: str, decode: str) -> None:
        self._large = memoryview(bytearray(_LARGEST))
        small = memoryview(bytearray(64 << 10))
        self._encoder = dial(encode)
        self._report = Reader(self._encoder, small)
        later = [dial(address) for address in (prefill, decode) if address != "none"]
        self._legs = [(sock, Reader(sock, small)) for sock in later]

    def serve(self, caller: socket.socket) -> None:
        """All requests of one connection. Raises ConnectionError when the caller leaves."""
        reader = Reader(caller, self._large)
        while True:
            message, body = reader.read()
            if message[0] == ord("G"):
                caller.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                continue
            if len(body) > 1024:
                self._encode(body)
            for sock, answer in self._legs:
                sock.sendall(_LEG)
                message, _ = answer.read()
            caller.sendall(message)

    def _encode(self, body: memoryview) -> None:
        hashlib.sha256(body).digest()
        self._encoder.sendall(_HEAD % len(body))
        self._encoder.sendall(body)
        self._report.read()


def main(port: str, encode: str, prefill: str, decode: str) -> None:
    floor = Floor(encode, prefill, decode)
    with socket.create_server(("127.0.0.1", int(port))) as listener:
        while True:
            caller, _ = listener.accept()
            with caller, contextlib.suppress(ConnectionError):
                floor.serve(caller)


if __name__ == "__main__":
    main(*sys.argv[1:5])
