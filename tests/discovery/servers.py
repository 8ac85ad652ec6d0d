"""
A real ``redis-server`` that can be killed, and a wire to it that can be cut.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.processes import LIMIT


class RedisServer:
    """On loopback, its data in a directory; what is not saved is lost when it ends."""

    def __init__(self, directory: Path) -> None:
        self._binary = shutil.which("redis-server")
        if not self._binary and "CI" not in os.environ:
            pytest.skip("redis-server is not installed")
        self._directory = directory
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        words = f"--port {self.port} --bind 127.0.0.1 --dir {self._directory} --appendonly no"
        self._process = subprocess.Popen(
            [self._binary or "redis-server", *words.split(), "--save", ""],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "Ready to accept connections" in line:
                return
        raise AssertionError("redis-server did not start")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(LIMIT)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


class Wire:
    """A port that leads to another, and can be cut and joined."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._ends: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def join(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for end in self._ends:
            end.transport.abort()
        await self._server.wait_closed()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        ends = {writer, back}
        self._ends |= ends
        await asyncio.gather(_copy(reader, back), _copy(there, writer))
        self._ends -= ends


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
