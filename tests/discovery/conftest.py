from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.discovery.servers import RedisServer


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def server(running: RedisServer) -> RedisServer:
    """One that runs, and holds nothing."""
    with redis.Redis(port=running.port) as client:
        client.flushall()
    return running


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[RedisServer]:
    """One that may be killed; not started yet."""
    server = RedisServer(tmp_path)
    yield server
    server.kill()
