"""
How processes begin, hear signals, and end.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from epd_proxy import Config, EPDProxy, workers
from epd_proxy.intake import IntakeProtocol
from epd_proxy.workers import Service
from tests.backends import Backends, ask
from tests.driver import call, chat

LIMIT = 20
"""Seconds after which a test has hung."""
TEXT = {"type": "text", "text": "hello"}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts the handlers of signals back, and keeps those from ending the tests that come late."""
    before = {sig: signal.getsignal(sig) for sig in SIGNALS}
    yield
    for sig, handler in before.items():
        signal.signal(sig, handler)


@pytest.fixture
def collector() -> Iterator[None]:
    """Puts the settings of the garbage collector back."""
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def service(**more: Any) -> Service:
    options = {"host": "127.0.0.1", "port": 0, "log_config": None}
    return Service(Config(decode="http://127.0.0.1:1", probe_interval=0), options, **more)


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("epd_proxy.workers.time", clock)
    return clock


def server_of(proxy: EPDProxy, delay: float = 0.0, **more: Any) -> workers._Server:
    settings = service().settings(proxy)
    settings.load()
    return workers._Server(settings, proxy, delay, **{"ends": workers._ENDS, **more})


# One process


def test_the_server_says_nothing_of_its_own_and_tells_the_proxy_when_it_starts() -> None:
    settings = service().settings(None)
    assert settings.http is IntakeProtocol
    assert settings.lifespan == "on"
    assert not any((settings.server_header, settings.date_header, settings.proxy_headers))


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_turns_health_red_and_lets_nothing_new_in(sig: int) -> None:
    backends = Backends(encode=0)
    backends.router.get("http://d0:8000/health").respond(200)
    proxy = backends.proxy()
    server = server_of(proxy)
    assert (await call(proxy, "GET", "/health")).status == 200
    server.handle_exit(sig, None)
    assert (server.should_exit, server.force_exit) == (True, False)
    reply = await call(proxy, "GET", "/health")
    assert (reply.status, reply.json()["proxy"]) == (503, "shutting down")
    assert (await call(proxy, "GET", "/live")).status == 200
    # What is in the door already is served.
    assert (await chat(proxy, ask(TEXT))).status == 200
    assert await server.on_tick(1)


async def test_for_as_long_as_the_delay_requests_are_taken_while_health_is_red(
    clock: Clock,
) -> None:
    backends = Backends(encode=0)
    backends.router.get("http://d0:8000/health").respond(200)
    proxy = backends.proxy()
    server = server_of(proxy, delay=5)
    await call(proxy, "GET", "/live")
    assert not await server.on_tick(1)
    server.handle_exit(signal.SIGTERM, None)
    assert (await call(proxy, "GET", "/health")).status == 503
    assert (await chat(proxy, ask(TEXT))).status == 200
    clock.now += 4.9
    assert not await server.on_tick(1)
    clock.now += 0.2
    assert await server.on_tick(1)
    assert not server.force_exit


@pytest.mark.parametrize("delay", [0, 5])
async def test_a_second_signal_ends_it_at_once(delay: float) -> None:
    server = server_of(Backends().proxy(), delay)
    server.handle_exit(signal.SIGINT, None)
    server.handle_exit(signal.SIGTERM, None)
    assert (server.should_exit, server.force_exit) == (True, True)
    assert await server.on_tick(1)


@pytest.mark.usefixtures("handlers")
async def test_sighup_reads_the_file_again_once(tmp_path: Path) -> None:
    read: list[Path] = []

    def reader(path: Path) -> Config:
        read.append(path)
        return Config(decode="http://new")

    path = tmp_path / "proxy.toml"
    async with EPDProxy(config=Config(decode="http://old"), file=(path, reader)) as proxy:
        server = server_of(proxy)
        read.clear()
        with server.capture_signals():
            signal.raise_signal(signal.SIGHUP)
            assert read == []
            for tick in range(3):
                assert not await server.on_tick(tick)
        assert read == [path]
        assert [one.url for one in proxy.registry.instances()] == ["http://new"]


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_heard_while_it_serves_and_not_raised_again(sig: signal.Signals) -> None:
    heard: list[int] = []
    for each in SIGNALS:
        signal.signal(each, lambda sig, frame: heard.append(sig))
    before = [signal.getsignal(each) for each in SIGNALS]
    server = server_of(EPDProxy(config=Config(decode="http://d")))
    with suppress(ZeroDivisionError), server.capture_signals():
        signal.raise_signal(sig)
        assert server.should_exit
        raise ZeroDivisionError
    assert heard == []
    assert [signal.getsignal(each) for each in SIGNALS] == before


def ask_and_then(listener: socket.socket, act: Callable[[], None]) -> threading.Thread:
    """Once the server has answered, ``act``."""

    def run() -> None:
        with socket.create_connection(listener.getsockname(), timeout=LIMIT) as connection:
            connection.sendall(b"GET /live HTTP/1.1\r\nhost: h\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        act()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.usefixtures("handlers", "collector")
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_good_end(sig: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = ask_and_then(listener, lambda: os.kill(os.getpid(), sig))
        assert service().run(listener) == 0
        thread.join(LIMIT)


class Started:
    """In uvicorn's place: as if it had run and ended."""

    started = True
    given: Any = None
    ran_with: Any = None

    def __init__(self, *args: Any) -> None:
        Started.given = args

    def run(self, sockets: list[socket.socket] | None) -> None:
        Started.ran_with = sockets


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_Server", Started)
    monkeypatch.setattr(workers, "_calm_collector", lambda: None)
    monkeypatch.setattr(workers, "keep_memory", lambda: None)


@pytest.mark.usefixtures("no_server")
@pytest.mark.parametrize(("started", "status"), [(True, 0), (False, 3)])
def test_a_server_that_did_not_start_is_a_bad_end(
    started: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Started, "started", started)
    assert workers.run(service(delay=4.0), 1) == status
    _, proxy, delay, ends = Started.given
    assert (delay, tuple(ends)) == (4.0, (signal.SIGTERM, signal.SIGINT))
    assert [one.url for one in proxy.registry.instances()] == ["http://127.0.0.1:1"]
    assert Started.ran_with is None


def signalled(ends: Any) -> workers._Server:
    """A server that has heard both, that of the terminal first."""
    server = server_of(EPDProxy(config=Config(decode="http://d")), ends=ends)
    with server.capture_signals():
        signal.raise_signal(signal.SIGINT)
        assert not server.should_exit
        signal.raise_signal(signal.SIGTERM)
    return server


@pytest.mark.usefixtures("handlers")
def test_a_worker_serves_on_the_listener_and_leaves_the_terminals_signal_to_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "_calm_collector", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as listener, monkeypatch.context() as patched:
        patched.setattr(workers, "_Server", Started)
        with pytest.raises(SystemExit) as caught:
            workers._work(service(), listener)
        assert caught.value.code == 0
        assert Started.ran_with == [listener]
    server = signalled(ends=Started.given[3])
    assert (server.should_exit, server.force_exit) == (True, False)


@pytest.mark.usefixtures("collector")
def test_the_collector_leaves_modules_alone_and_looks_less_often() -> None:
    workers._calm_collector()
    assert gc.get_freeze_count() > 10_000
    assert gc.get_threshold()[0] == 50_000
    assert gc.isenabled()


# Several processes


class Ghost:
    """A process that is not one."""

    def __init__(self, parent: Parent, args: Any) -> None:
        self._parent = parent
        self.args = args
        self.pid: int | None = None
        self.exitcode: int | None = None
        self.signals: list[int] = []
        self.sentinel, self._life = os.pipe()
        self.ends_by: list[int] = [signal.SIGTERM]

    def start(self) -> None:
        self.pid = 1000 + len(self._parent.ghosts)
        self._parent.ghosts.append(self)
        self._parent.on_start(self)

    def is_alive(self) -> bool:
        return self.exitcode is None

    def end(self, exitcode: int) -> None:
        self.exitcode = exitcode
        os.close(self._life)

    def get(self, sig: int) -> None:
        self.signals.append(sig)
        if sig in self.ends_by and self.is_alive():
            self.end(0)

    def terminate(self) -> None:
        self.get(signal.SIGTERM)


Step = signal.Signals | Callable[[], object]


class Parent:
    """The world in which workers are started."""

    def __init__(self) -> None:
        self.ghosts: list[Ghost] = []
        self.on_start: Callable[[Ghost], None] = lambda ghost: None
        self.while_it_waits: list[Step] = []
        """What happens next, one with each turn, when all that had to be started are."""
        self.listener = socket.create_server(("127.0.0.1", 0))
        self._address = self.listener.getsockname()

    def get_context(self, method: str) -> Any:
        assert method == "spawn"
        return SimpleNamespace(Process=self.process)

    def process(self, target: Any, args: Any) -> Ghost:
        assert target is workers._work
        return Ghost(self, args)

    def kill(self, pid: int, sig: int) -> None:
        (ghost,) = [one for one in self.ghosts if one.pid == pid]
        ghost.get(sig)

    def wait(self, sentinels: Sequence[int], timeout: float) -> None:
        if not self.while_it_waits:
            assert wait(sentinels, LIMIT)
            return
        step = self.while_it_waits.pop(0)
        if isinstance(step, signal.Signals):
            signal.raise_signal(step)
        else:
            step()

    def run(self, count: int, *steps: Step, delay: float = 0.0) -> int:
        self.while_it_waits += steps
        found = workers._Workers(service(delay=delay), self.listener, count).run()
        assert not any(ghost.is_alive() for ghost in self.ghosts)
        return found

    def refuses(self) -> bool:
        """Whether nobody listens, not even the kernel for somebody who might come."""
        with socket.socket() as one:
            return one.connect_ex(self._address) != 0

    def when(self, number: int, act: Callable[[Ghost], None]) -> None:
        """``act`` when so many have been started."""
        before = self.on_start

        def on_start(ghost: Ghost) -> None:
            before(ghost)
            if len(self.ghosts) == number:
                act(ghost)

        self.on_start = on_start

    def ends_by(self, *signals: int) -> None:
        """What ends those that run."""
        for ghost in self.ghosts:
            ghost.ends_by = [*signals]

    def close(self) -> None:
        self.listener.close()
        for ghost in self.ghosts:
            os.close(ghost.sentinel)


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch, handlers: None) -> Iterator[Parent]:
    parent = Parent()
    monkeypatch.setattr("epd_proxy.workers.multiprocessing", parent)
    monkeypatch.setattr("epd_proxy.workers.os", parent)
    monkeypatch.setattr("epd_proxy.workers.wait", parent.wait)
    yield parent
    parent.close()


TERM, INT, HUP = SIGNALS


@pytest.mark.parametrize("sig", [TERM, INT])
def test_so_many_are_started_on_one_listener_and_end_when_the_parent_is_told_to(
    sig: signal.Signals, parent: Parent
) -> None:
    assert parent.run(3, sig) == 0
    assert [ghost.signals for ghost in parent.ghosts] == [[TERM]] * 3
    assert {ghost.args[1] for ghost in parent.ghosts} == {parent.listener}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_signal_that_comes_while_one_is_started_ends_that_one_too(
    number: int, parent: Parent
) -> None:
    parent.when(number, lambda ghost: signal.raise_signal(TERM))
    assert parent.run(3) == 0
    assert [ghost.signals for ghost in parent.ghosts] == [[TERM]] * number


@pytest.mark.parametrize("exitcode", [0, 1, -9])
def test_one_that_dies_is_replaced(exitcode: int, parent: Parent) -> None:
    def end_them(ghost: Ghost) -> None:
        parent.while_it_waits = [TERM]

    parent.when(3, end_them)
    assert parent.run(2, lambda: parent.ghosts[1].end(exitcode)) == 0
    assert [ghost.signals for ghost in parent.ghosts] == [[TERM], [], [TERM]]


def test_one_that_cannot_start_ends_all_of_them_with_its_status(parent: Parent) -> None:
    assert parent.run(3, lambda: parent.ghosts[1].end(3)) == 3
    assert [ghost.signals for ghost in parent.ghosts] == [[TERM], [], [TERM]]


def test_one_that_dies_while_they_end_is_not_replaced(parent: Parent) -> None:
    def stay() -> None:
        parent.ghosts[0].ends_by = []

    assert parent.run(2, stay, TERM, lambda: parent.ghosts[0].end(1)) == 0
    assert len(parent.ghosts) == 2


def test_a_second_signal_reaches_them_all(parent: Parent) -> None:
    assert parent.run(2, parent.ends_by, TERM, lambda: parent.ends_by(TERM), INT) == 0
    assert [ghost.signals for ghost in parent.ghosts] == [[TERM] * 2] * 2


def test_sighup_is_passed_on_and_ends_nobody(parent: Parent) -> None:
    assert parent.run(2, HUP, TERM) == 0
    assert [ghost.signals for ghost in parent.ghosts] == [[HUP, TERM]] * 2


def test_one_that_has_ended_already_gets_no_signal(parent: Parent) -> None:
    def end_and_tell() -> None:
        parent.ghosts[0].end(0)
        signal.raise_signal(TERM)

    assert parent.run(2, end_and_tell) == 0
    assert [ghost.signals for ghost in parent.ghosts] == [[], [TERM]]


def test_what_no_worker_will_take_is_refused_and_does_not_lie_in_a_line(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("epd_proxy.workers.time", clock)
    refused: list[bool] = []

    def look(seconds: float = 0.0) -> None:
        refused.append(parent.refuses())
        clock.now += seconds

    def end() -> None:
        for ghost in parent.ghosts:
            ghost.end(0)

    steps: list[Step] = [parent.ends_by, TERM, look, lambda: look(5), look, end]
    assert parent.run(2, *steps, delay=5) == 0
    assert refused == [False, False, True]


def test_with_several_the_listener_is_bound_once_before_the_first_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []

    class Noted:
        def __init__(self, *args: Any) -> None:
            given.extend(args)

        def run(self) -> int:
            return 7

    monkeypatch.setattr(workers, "_Workers", Noted)
    one = service()
    assert workers.run(one, 4) == 7
    same, listener, count = given
    assert (same, count) == (one, 4)
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_uvicorn_has_what_is_changed_here() -> None:
    """Names of its own that ``_Server`` and ``_Workers`` stand on."""
    for name in ("capture_signals", "handle_exit", "on_tick", "run"):
        assert callable(getattr(uvicorn.Server, name))
    assert asyncio.iscoroutinefunction(uvicorn.Server.on_tick)
    assert callable(uvicorn.Config.bind_socket)
