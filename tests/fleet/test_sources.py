"""
Fleets from a file that is read again, and from a name.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.faults.fleet import request
from tests.fleet.engines import Living, living
from tests.fleet.proxies import Line, Served, all_say, line, serve, until

WITHIN = 3.0
"""Seconds in which a file that has changed is read again."""
TEXT = request(images=0)


def toml(engines: Iterable[Living]) -> str:
    return "\n".join(f'[[decode]]\nurl = "{engine.url}"\n' for engine in engines)


async def served_by(one: Line, engines: Sequence[Living]) -> set[Living]:
    """Who takes the next requests, twice as many as there are engines."""
    before = [len(engine.calls) for engine in engines]
    for _ in range(2 * len(engines)):
        assert await one.chat(TEXT) == 200
    return {e for e, calls in zip(engines, before, strict=True) if len(e.calls) > calls}


@asynccontextmanager
async def served_from(path: Path) -> AsyncIterator[tuple[Served, Line]]:
    async with serve("--config", str(path)) as proxy, line(proxy.url) as one:
        yield proxy, one


async def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    a, b, c = every = [Living("decode") for _ in range(3)]
    path = tmp_path / "fleet.toml"
    async with living(*every):
        path.write_text(toml([a, b]))
        async with served_from(path) as (_, one):
            assert await served_by(one, every) == {a, b}
            path.write_text(toml([b, c]))
            await all_say([one], c.url, "live", within=WITHIN)
            assert await one.state(a.url) == ""
            a.seal()
            assert await served_by(one, every) == {b, c}
            assert a.late == []


async def test_a_file_behind_a_symlink_that_is_swapped_is_read_again(tmp_path: Path) -> None:
    """As Kubernetes writes a ConfigMap."""
    a, b = every = [Living("decode") for _ in range(2)]
    async with living(*every):
        for name, engine in (("..1", a), ("..2", b)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "fleet.toml").write_text(toml([engine]))
        data, path = tmp_path / "..data", tmp_path / "fleet.toml"
        data.symlink_to("..1")
        path.symlink_to("..data/fleet.toml")
        async with served_from(path) as (_, one):
            assert await served_by(one, every) == {a}
            (tmp_path / "..new").symlink_to("..2")
            (tmp_path / "..new").replace(data)
            await all_say([one], b.url, "live", within=WITHIN)
            assert await one.state(a.url) == ""
            assert await served_by(one, every) == {b}


async def test_a_hangup_signal_reads_the_file_again_though_it_looks_the_same(
    tmp_path: Path,
) -> None:
    a, b = every = [Living("decode") for _ in range(2)]
    path = tmp_path / "fleet.toml"
    async with living(*every):
        path.write_text(toml([a]))
        before = path.stat()
        async with serve("--config", str(path), workers=2) as proxy, proxy.lines() as lines:
            path.write_text(toml([b]))
            # Nobody who only looks at it would see that; ports have five digits.
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            assert path.stat().st_size == before.st_size
            proxy.process.signal(signal.SIGHUP)
            await all_say(lines, b.url, "live", within=WITHIN)
            for one in lines:
                assert await served_by(one, every) == {b}


async def test_a_bad_file_is_refused_with_the_reason_and_the_old_fleet_stays(
    tmp_path: Path,
) -> None:
    a, b = every = [Living("decode") for _ in range(2)]
    path = tmp_path / "fleet.toml"
    async with living(*every):
        path.write_text(toml([a]))
        async with served_from(path) as (proxy, one):
            for text, reason in (
                ("[[decode]\n", "Expected"),
                ('[[decode]]\nurl = "ftp://there"\n', "ftp://there.*must start with http://"),
                ("decode = []\n", "at least one decode server is needed"),
                (f'{toml([b])}\n[[encode]]\nurl = "{b.url}"\n', "is given as --.* already"),
                (f'{toml([b])}colour = "red"\n', "colour"),
            ):
                path.write_text(text)
                proxy.process.signal(signal.SIGHUP)
                await proxy.printed(rf"{path}: cannot be used: .*{reason}.*going on with")
                assert await served_by(one, every) == {a}
                status, health = await one.ask("GET", "/health")
                assert (status, [*health["sources"]]) == (200, ["file"])
            path.unlink()
            await proxy.printed(rf"{path}: cannot be used: .*No such file")
            assert await served_by(one, every) == {a}

            path.write_text(toml([a, b]))

            async def both_serve() -> bool:
                return await served_by(one, every) == {a, b}

            await until(both_serve, within=WITHIN)
            assert "sources" not in (await one.ask("GET", "/health"))[1]


async def test_a_name_stands_for_an_engine() -> None:
    engine = Living("decode")
    async with living(engine):
        words = ["--decode", engine.url.replace("http://127.0.0.1", "dns+http://localhost")]
        async with serve(*words) as proxy, line(proxy.url) as one:
            assert await served_by(one, [engine]) == {engine}
            assert await one.state(engine.url) == "live"
