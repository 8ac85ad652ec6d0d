"""
The other proxies, fetched when they are needed into a folder outside of the repository.

    python -m perf.peers [--peers DIR]      fetches all of them

* vLLM's example proxy, one file out of the source distribution of each version wanted
* a Python for it, with what it imports
* vllm-router, in a Python of its own

Everything comes from the package index, by pip. What is there already is not fetched again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROUTER_VERSION = "0.1.17"
VLLM_VERSIONS = ("0.33.0", "0.29.0")

_PROXY = "examples/disaggregated/disaggregated_encoder/disagg_epd_proxy.py"
_IMPORTED = ["aiohttp", "fastapi", "httptools", "msgspec", "pybase64", "uvicorn", "uvloop"]
_PATIENCE = 600.0


class NotFetched(Exception):
    """A peer is not there, and why."""


def default_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "epd-proxy-perf"


class Peers:
    """Paths of peers, each fetched when first asked for. Raises NotFetched."""

    def __init__(self, folder: Path, *, offline: bool = False) -> None:
        self._folder = folder.resolve()
        self._offline = offline

    def vllm_proxy(self, version: str) -> Path:
        path = self._folder / f"vllm-{version}" / Path(_PROXY).name
        if not path.exists():
            self._announce(f"vLLM {version}'s proxy")
            self._fetch_vllm_proxy(version, path)
        return path

    def python(self) -> Path:
        return self._python("python", _IMPORTED, Path("uvicorn"))

    def router(self) -> Path:
        router = Path("vllm-router")
        python = self._python("router", [f"vllm-router=={ROUTER_VERSION}"], router)
        return python.with_name("vllm-router")

    def _announce(self, what: str) -> None:
        if self._offline:
            raise NotFetched("it is not fetched yet")
        print(f"fetching {what} into {self._folder}", file=sys.stderr, flush=True)

    def _fetch_vllm_proxy(self, version: str, path: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
            # pip unpacks the distribution, then asks it for its metadata, for which it wants a
            # compiler and torch. That failure is expected; the unpacked files stay.
            words = ["--no-clean", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
            tail = _pip(
                Path(sys.executable),
                ["download", *words, "--dest", scratch, f"vllm=={version}"],
                env={"TMPDIR": scratch},
                check=False,
            )
            found = next(Path(scratch).glob(f"*/*/{_PROXY}"), None)
            if found is None:
                raise NotFetched(f"pip brought no {_PROXY}: {tail}")
            path.parent.mkdir(exist_ok=True)
            # In one step, so that no half of it is ever taken for the whole.
            partial = shutil.copy(found, path.with_suffix(".partial"))
            Path(partial).rename(path)

    def _python(self, name: str, packages: Sequence[str], last: Path) -> Path:
        """A virtual environment that is complete once ``last`` is among its programs."""
        folder = self._folder / name
        python = folder / "bin" / "python"
        if not (folder / "bin" / last).exists():
            self._announce(" ".join(packages))
            venv.create(folder, with_pip=True, clear=True)
            try:
                _pip(python, ["install", *packages])
            except NotFetched:
                shutil.rmtree(folder)
                raise
        return python


def _pip(
    python: Path, words: Sequence[str], *, env: dict[str, str] | None = None, check: bool = True
) -> str:
    """Runs pip; the last line of what it said. Raises NotFetched if it failed."""
    try:
        done = subprocess.run(
            [python, "-m", "pip", "--disable-pip-version-check", *words],
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NotFetched(f"pip took more than {_PATIENCE:.0f} s") from None
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    errors = [line for line in lines if "ERROR" in line] or lines[-1:] or ["it said nothing"]
    if check and done.returncode:
        raise NotFetched(f"pip: {errors[0].strip()}")
    return errors[0].strip()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers",
        type=Path,
        default=default_folder(),
        metavar="DIR",
        help="where the other proxies are, or go (default: %(default)s)",
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.peers")
    add_options(parser)
    peers = Peers(parser.parse_args().peers)
    try:
        print(peers.python())
        print(peers.router())
        for version in VLLM_VERSIONS:
            print(peers.vllm_proxy(version))
    except NotFetched as exc:
        print(exc)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
