from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.engine.fleets import TOPOLOGIES, Fleet
from tests.engine.oracles import Oracle, oracles

HERE = Path(__file__).parent
VARIABLE = "EPD_PROXY_ENGINE"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest) -> Iterator[Mapping[str, Oracle]]:
    """vLLM's front-end in each role, serving the model that the module names."""
    directory = os.environ.get(VARIABLE)
    if not directory:
        pytest.skip(f"{VARIABLE} does not name the directory of vLLM's front-end (see the README)")
    with oracles(Path(directory), request.module.MODEL) as engines:
        yield engines


@pytest.fixture(scope="module", params=TOPOLOGIES)
def fleet(request: pytest.FixtureRequest, engines: Mapping[str, Oracle]) -> Iterator[Fleet]:
    """A proxy in front of them, with and without prefill."""
    with Fleet(engines, TOPOLOGIES[request.param]).behind() as fleet:
        yield fleet
