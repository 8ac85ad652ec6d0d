"""
vLLM's own front-end, in processes, and what it says it understood.

An oracle is vLLM 0.33.0 down to the hand-over to the engine core, on a port of its own. It prints
one verdict for each chat request: the validated fields, the prompt, the items with key, position
and data, the sampling and transfer parameters, and the answer it gave.
"""

from __future__ import annotations

import json
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import httpx

from tests.processes import LIMIT

Verdict: TypeAlias = dict[str, Any]

START_LIMIT = 240
"""Seconds for vLLM to be imported four times at once, on a slow machine."""

VERDICT_LIMIT = 5
"""Seconds from an answer to its verdict, which is written at once."""

ROLES = ("encode", "pd", "prefill", "decode")

HANDLE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[12, 13, 9223372036854775807], []],
    "remote_engine_id": "6d1f0c7e-8a55-4a4e-9a39-0d6f4ecb54f1",
    "remote_request_id": "chatcmpl-r1-0c77d2a1",
    "remote_host": "10.0.0.31",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 41,
    "remote_blocks_expiry_time": None,
    "remote_registration_generation": 1,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 0,
    "a_key_of_the_future": {'é/\\"🌍': [18446744073709551615, -1, 0.1, None, {}, ""]},
}
"""What every prefill oracle answers: NIXL's handle, and what NIXL may come to."""


class Oracle:
    """One front-end. Its verdicts come in the order of the requests that it has answered."""

    def __init__(self, directory: Path, model: str, role: str, address: tuple[str, int]) -> None:
        host, port = address
        self.role = role
        self.url = f"http://{host}:{port}"
        words = ["--model", model, "--role", role, "--serve", str(port), "--answer"]
        words.append("--vllm-arg=--trust-request-mm-kwargs")
        if role == "prefill":
            words += ["--reply-kv", json.dumps(HANDLE)]
        self._process = subprocess.Popen(
            [directory / "oracle", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._verdicts: queue.Queue[Verdict | None] = queue.Queue()
        self._complaints = b""
        self._readers = [
            threading.Thread(target=self._read_verdicts),
            threading.Thread(target=self._read_complaints),
        ]
        for reader in self._readers:
            reader.start()

    def _read_verdicts(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._verdicts.put(json.loads(line))
        self._verdicts.put(None)

    def _read_complaints(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._complaints = (self._complaints + line)[-4000:]

    def wait_until_ready(self) -> None:
        give_up = time.monotonic() + START_LIMIT
        while not self._is_ready():
            ended = self._process.poll() is not None
            if ended or time.monotonic() > give_up:
                complaints = self._complaints.decode(errors="replace")
                raise AssertionError(f"the {self.role} oracle did not start:\n{complaints}")
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(self.url + "/health", trust_env=False, timeout=LIMIT).is_success
        except httpx.TransportError:
            return False

    def take(self, count: int) -> list[Verdict]:
        """The next verdicts, and there must not be more."""
        verdicts = [self._next() for _ in range(count)]
        more = self.drain()
        assert not more, f"{self.role} was asked {len(more)} times more than {count}: {more}"
        return verdicts

    def _next(self) -> Verdict:
        try:
            verdict = self._verdicts.get(timeout=VERDICT_LIMIT)
        except queue.Empty:
            raise AssertionError(f"{self.role} was not asked") from None
        assert verdict is not None, f"the {self.role} oracle ended: {self._complaints!r}"
        return verdict

    def drain(self) -> list[Verdict | None]:
        """Forget what came until now."""
        found = []
        while not self._verdicts.empty():
            found.append(self._verdicts.get())
        return found

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for reader in self._readers:
            reader.join()


@contextmanager
def oracles(directory: Path, model: str) -> Iterator[Mapping[str, Oracle]]:
    """One of each role, ready."""
    with ExitStack() as stack:
        engines = {}
        for role, address in zip(ROLES, _unused_addresses(len(ROLES)), strict=True):
            engines[role] = Oracle(directory, model, role, address)
            stack.callback(engines[role].stop)
        for engine in engines.values():
            engine.wait_until_ready()
        yield engines


def _unused_addresses(count: int) -> Sequence[tuple[str, int]]:
    """All held at once, so that none comes twice."""
    with ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [listener.getsockname() for listener in listeners]
