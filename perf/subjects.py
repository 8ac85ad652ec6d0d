"""
Who is measured, and how each is started.

A command is a list of words with places: ``{port}`` and ``{spare}``, a port for metrics and the
like; ``{encode}``, ``{prefill}`` and ``{decode}``, comma lists of addresses or ``none``. A word
that is ``{prefill*}`` stands for ``--prefill URL`` once for each address.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from perf.peers import NotFetched, Peers

OURS = "epd-proxy"
BASELINE = "vllm-quiet"
ROUTER = "vllm-router"
FLOOR = "floor"
DIRECT = "direct"

_HERE = Path(__file__).resolve().parent
_FLEET = ("--encode", "{encode}", "--prefill", "{prefill}", "--decode", "{decode}")


class Subject(NamedTuple):
    name: str
    words: tuple[str, ...] = ()
    """None: no proxy at all, callers talk to a decode engine."""
    encodes: bool = True
    """Whether it knows encoders. If not, images mean that the whole body goes everywhere."""
    old_reports: bool = False
    """Whether it speaks the protocol from before vLLM 0.33."""
    width: int | None = None
    """How many connections it can take, where that is limited."""

    @property
    def is_bare(self) -> bool:
        """Does no proxy's work, so there is nothing to check."""
        return self.name in (FLOOR, DIRECT)

    def command(self, port: int, spare: int, urls: Mapping[str, Sequence[str]]) -> list[str]:
        lists = {role: ",".join(found) or "none" for role, found in urls.items()}
        command: list[str] = []
        for word in self.words:
            if word.endswith("*}"):
                role = word[1:-2]
                command += [part for url in urls[role] for part in (f"--{role}", url)]
            else:
                command.append(word.format(port=port, spare=spare, **lists))
        return command


def _ours(_peers: Peers) -> Subject:
    words = (sys.executable, "-m", "epd_proxy", "serve", "--port", "{port}")
    return Subject(OURS, (*words, "--log-level", "warning", *_FLEET))


def _over_httpx(_peers: Peers) -> Subject:
    words = (sys.executable, "-m", "perf.bare_httpx", "--port", "{port}", *_FLEET)
    return Subject("epd-httpx", words)


def _vllm(name: str, version: str, *, quiet: bool) -> Callable[[Peers], Subject]:
    def make(peers: Peers) -> Subject:
        script = (str(_HERE / "silent.py"),) if quiet else ()
        words = (str(peers.python()), *script, str(peers.vllm_proxy(version)))
        flags = tuple(f"{w}-servers-urls" if w.startswith("--") else w for w in _FLEET)
        words = (*words, "--host", "127.0.0.1", "--port", "{port}", *flags)
        return Subject(name, words, old_reports=version < "0.33")

    return make


def _router(peers: Peers) -> Subject:
    words = (
        str(peers.router()),
        *("--host", "127.0.0.1", "--port", "{port}", "--prometheus-port", "{spare}"),
        *("--vllm-pd-disaggregation", "--policy", "round_robin", "--log-level", "warning"),
        *("{prefill*}", "{decode*}"),
    )
    return Subject(ROUTER, words, encodes=False)


def _floor(_peers: Peers) -> Subject:
    words = (sys.executable, "-m", "perf.floor", "{port}", "{encode}", "{prefill}", "{decode}")
    return Subject(FLOOR, words, width=1)


_MAKERS: dict[str, Callable[[Peers], Subject]] = {
    OURS: _ours,
    "epd-httpx": _over_httpx,
    "vllm": _vllm("vllm", "0.33.0", quiet=False),
    BASELINE: _vllm(BASELINE, "0.33.0", quiet=True),
    "vllm-0.29": _vllm("vllm-0.29", "0.29.0", quiet=True),
    ROUTER: _router,
    FLOOR: _floor,
}
NAMES = tuple(_MAKERS)
QUICK = (OURS, BASELINE, ROUTER, FLOOR)


def chosen(names: Sequence[str], peers: Peers) -> tuple[list[Subject], dict[str, str]]:
    """The subjects of these names, and why others of them are left out."""
    found, left_out = [], {}
    for name in names:
        try:
            found.append(_MAKERS[name](peers))
        except NotFetched as exc:
            left_out[name] = str(exc)
    return found, left_out
