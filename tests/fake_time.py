"""
Time that leaps: the event loop's, and with it the registry's.
"""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace

import pytest

from epd_proxy.health import RoleHealth
from tests.test_admission import LeapingLoop

LEAPING = "asyncio", {"loop_factory": LeapingLoop}
"""What a fixture ``anyio_backend`` returns where time leaps."""


def now() -> float:
    """Seconds of the registry, which count from elsewhere than those of the loop."""
    return 5000 + asyncio.get_running_loop().time()


def leaping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever registry is made from now on goes by the time of the loop."""
    monkeypatch.setattr("epd_proxy.registry.RoleHealth", partial(RoleHealth, clock=now))
    monkeypatch.setattr("epd_proxy.registry.time", SimpleNamespace(monotonic=now))
