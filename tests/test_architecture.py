"""
The shape of the package: who may import whom, and what is public.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import epd_proxy

ROOT = Path(epd_proxy.__file__).parent

# Top to bottom: a module imports only from those above it. The README shows the same table.
ORDER = [
    "errors",
    "config",
    "payload",
    "media",
    "reports",
    "tensors",
    "references",
    "chat",
    "health",
    "registry",
    "selectors",
    "admission",
    "inflate",
    "budget",
    "asgi",
    "intake",
    "connection",
    "pool",
    "upstream",
    "calls",
    "encode",
    "prefill",
    "guard",
    "decode",
    "pipeline",
    "door",
    "probes",
    "discovery",
    "keeper",
    "instances",
    "admin",
    "app",
    "simulator",
    "servers",
    "workers",
    "demo",
    "cli",
]


def imports_of(path: Path) -> set[str]:
    """The package's own modules that a file imports at run time."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide from this test"
            inside = (node.module or "").split(".")
            aliases = [inside[1:2] or [alias.name for alias in node.names]]
        elif isinstance(node, ast.Import):
            aliases = [alias.name.split(".")[1:2] for alias in node.names]
            inside = node.names[0].name.split(".")
        else:
            continue
        if inside[0] == "epd_proxy":
            names |= {name for found in aliases for name in found}
    return names & set(ORDER)


def test_every_module_has_its_place_in_the_order() -> None:
    modules = {path.stem for path in ROOT.glob("*.py")} | {
        path.parent.name for path in ROOT.glob("*/__init__.py")
    }
    assert modules - {"__init__", "__main__"} == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_a_module_imports_only_from_modules_above_it(name: str) -> None:
    paths = [ROOT / f"{name}.py"] if (ROOT / f"{name}.py").exists() else (ROOT / name).glob("*.py")
    allowed = set(ORDER[: ORDER.index(name)]) | {name}
    for path in paths:
        assert imports_of(path) <= allowed


def test_the_simulator_shares_nothing_with_the_proxy() -> None:
    for path in (ROOT / "simulator").glob("*.py"):
        assert imports_of(path) <= {"simulator"}


def test_httpx_is_known_to_the_pool_its_user_and_the_demo_alone() -> None:
    users = {
        path.stem
        for path in ROOT.rglob("*.py")
        # Type checkers may know it everywhere: that is indented.
        if re.search(r"^(import|from) httpx\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert users == {"connection", "pool", "upstream", "demo"}


def test_the_readme_shows_the_modules_in_this_order() -> None:
    readme = (ROOT.parent / "README.md").read_text(encoding="utf-8")
    rows = [line.split("`")[1] for line in readme.splitlines() if line.startswith("| `")]
    assert [row for row in rows if row in ORDER] == ORDER


def test_public_names_are_listed_once_and_exist() -> None:
    public = epd_proxy.__all__
    assert sorted(set(public), key=str.lower) == sorted(public, key=str.lower)
    assert all(hasattr(epd_proxy, name) for name in public)
