from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.processes import listening, running


@pytest.fixture(scope="session")
def demo_url() -> Iterator[str]:
    """The demo's fleet: two encoders, one prefill and two decode simulators behind a proxy."""
    with running("demo", "--port", "0") as process:
        url = process.wait_for(r"^epd-proxy at (\S+)")[1]
        process.wait_for("Ctrl-C ends it")
        yield url


@pytest.fixture(scope="session")
def engines() -> Iterator[dict[str, str]]:
    """One simulated engine of each role, each a process of its own."""
    roles = ("encode", "prefill", "decode", "prefill_decode")
    with (
        listening("simulate", "--role", roles[0]) as encode,
        listening("simulate", "--role", roles[1]) as prefill,
        listening("simulate", "--role", roles[2]) as decode,
        listening("simulate", "--role", roles[3]) as fused,
    ):
        yield dict(zip(roles, (encode, prefill, decode, fused), strict=True))
