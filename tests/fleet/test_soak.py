"""
``python -m perf.soak``, which looks for what stays behind.
"""

from __future__ import annotations

import sys

import pytest

from perf import soak
from tests.fleet.proxies import UNMEASURED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the soak reads /proc")


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in UNMEASURED.items():
        monkeypatch.setenv(name, value)


def test_after_mixed_endings_memory_and_sockets_are_what_they_were(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = soak.main(["--seconds", "12"])
    printed = capsys.readouterr().out
    print(printed)  # noqa: T201 - the figures, and what is wrong
    assert status == 0, printed
    # Enough was going on for this to mean something.
    for ending in ("200, cut", "400", "404", "408", "500", "502", "503", "504"):
        assert f"{ending} " in printed


def test_memory_that_has_grown_is_told_by_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(soak, "MARGIN", -(1 << 40))
    assert soak.main(["--seconds", "1"]) == 1
    assert "WRONG: that is more than" in capsys.readouterr().out
