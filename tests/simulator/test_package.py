from __future__ import annotations

import re
from pathlib import Path

import pytest

from epd_proxy import simulator

PACKAGE = Path(simulator.__file__).parent
# The table in the docstring, from top to bottom.
MODULES = re.findall(r"^\* (\w+)", simulator.__doc__ or "", re.MULTILINE)


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_the_simulator_stands_on_its_own(path: Path) -> None:
    source = path.read_text().replace("from epd_proxy.simulator.", "")
    assert "epd_proxy" not in source
    assert "from ." not in source


def test_the_map_shows_every_module() -> None:
    assert {"__init__", *MODULES} == {path.stem for path in PACKAGE.glob("*.py")}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_from_those_above_it(name: str) -> None:
    source = (PACKAGE / f"{name}.py").read_text()
    imported = re.findall(r"from epd_proxy\.simulator\.(\w+) import", source)
    assert set(imported) <= set(MODULES[: MODULES.index(name)])


def test_public_names_are_listed_and_exist() -> None:
    assert sorted(simulator.__all__) == ["Failure", "MODALITIES", "ROLES", "Received", "Simulator"]
    assert all(hasattr(simulator, name) for name in simulator.__all__)
