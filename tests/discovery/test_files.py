from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from epd_proxy.discovery import FileSource
from epd_proxy.registry import Kind, Spec
from tests.discovery.hearing import Ear, started
from tests.test_admission import LeapingLoop

A, B, C = "http://a:1", "http://b:2", "http://c:3"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Time passes at once: only the order of events counts."""
    return "asyncio", {"loop_factory": LeapingLoop}


def read(path: Path) -> Sequence[Spec]:
    return [Spec(Kind.DECODE, url) for url in json.loads(path.read_text())]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.json"
    write(path, A)
    return path


def write(path: Path, *urls: str) -> None:
    put(path, json.dumps(urls))


def put(path: Path, text: str) -> None:
    path.write_text(text)


def remove(path: Path) -> None:
    path.unlink()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_the_file_has_been_told_when_start_returns(path: Path) -> None:
    ear = Ear()

    async with started(source := FileSource(path, read, ear)):
        assert ear.fleets == [[Spec(Kind.DECODE, A)]]
        assert source.problem == ""


async def test_a_changed_file_is_read_within_two_seconds(path: Path) -> None:
    ear = Ear()

    async with started(FileSource(path, read, ear)):
        write(path, A, B)
        await asyncio.sleep(2)

        assert ear.urls == [A, B]


async def test_a_file_that_says_the_same_again_is_not_told_again(path: Path) -> None:
    ear = Ear()

    async with started(FileSource(path, read, ear)):
        put(path, f' ["{A}"] ')
        await asyncio.sleep(5)

        assert len(ear.fleets) == 1


async def test_a_config_map_that_swaps_its_symlink_is_read(tmp_path: Path) -> None:
    # As the kubelet does it: file -> ..data/file, ..data -> a directory for each version.
    for version, urls in (("..1", [A]), ("..2", [B])):
        (tmp_path / version).mkdir()
        write(tmp_path / version / "fleet.json", *urls)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "fleet.json").symlink_to("..data/fleet.json")
    ear = Ear()

    async with started(FileSource(tmp_path / "fleet.json", read, ear)):
        (tmp_path / "..next").symlink_to("..2")
        (tmp_path / "..next").rename(tmp_path / "..data")
        await asyncio.sleep(2)

        assert ear.fleets == [[Spec(Kind.DECODE, A)], [Spec(Kind.DECODE, B)]]


async def test_a_file_that_another_is_renamed_over_is_read(path: Path) -> None:
    ear = Ear()

    async with started(FileSource(path, read, ear)):
        write(path.with_suffix(".new"), B)
        path.with_suffix(".new").rename(path)
        await asyncio.sleep(2)

        assert ear.urls == [B]


async def test_a_file_is_not_read_while_it_is_being_written(path: Path) -> None:
    ear = Ear()
    seen = []

    def note(path: Path) -> Sequence[Spec]:
        seen.append(path.read_text())
        return read(path)

    async with started(source := FileSource(path, note, ear, settle=0.2)):
        whole = json.dumps([A, B, C])
        for end in range(1, len(whole) + 1):
            put(path, whole[:end])
            await asyncio.sleep(0.15)
        await asyncio.sleep(1.2)

        assert seen == [json.dumps([A]), whole]
        assert ear.urls == [A, B, C]
        assert source.problem == ""


async def test_a_bad_file_is_refused_once_with_its_reason_and_the_old_fleet_stays(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ear = Ear()

    async with started(source := FileSource(path, read, ear)):
        put(path, "[")
        await asyncio.sleep(10)

        assert ear.urls == [A]
        assert "cannot be used: Expecting value" in source.problem
        (line,) = warnings(caplog)
        assert f"file {path}: cannot be used: Expecting value" in line


async def test_the_next_bad_version_is_told_even_if_it_is_bad_in_the_same_way(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(FileSource(path, read, Ear())):
        put(path, "{")
        await asyncio.sleep(2)
        put(path, "{ ")
        await asyncio.sleep(2)

        assert len(warnings(caplog)) == 2


async def test_a_good_file_ends_the_trouble_of_a_bad_one(path: Path) -> None:
    ear = Ear()

    async with started(source := FileSource(path, read, ear)):
        put(path, "[")
        await asyncio.sleep(2)
        write(path, B)
        await asyncio.sleep(2)

        assert ear.urls == [B]
        assert source.problem == ""


async def test_a_file_that_is_gone_leaves_the_fleet_until_it_is_back(path: Path) -> None:
    ear = Ear()

    async with started(source := FileSource(path, read, ear)):
        remove(path)
        await asyncio.sleep(2)
        assert "No such file" in source.problem
        assert ear.urls == [A]

        write(path, A, B)
        await asyncio.sleep(2)
        assert source.problem == ""
        assert ear.urls == [A, B]


async def test_a_file_that_is_bad_at_the_start_is_waited_for(path: Path) -> None:
    ear = Ear()
    remove(path)

    async with started(source := FileSource(path, read, ear)):
        assert "No such file" in source.problem
        assert ear.fleets == []

        write(path, A)
        await asyncio.sleep(2)
        assert ear.urls == [A]


async def test_reload_reads_at_once(path: Path) -> None:
    ear = Ear()

    async with started(source := FileSource(path, read, ear)):
        write(path, B)
        source.reload()

        assert ear.urls == [B]


async def test_reload_says_again_what_is_wrong(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(source := FileSource(path, read, Ear())):
        put(path, "[")
        source.reload()
        source.reload()

        assert len(warnings(caplog)) == 2


async def test_a_fleet_that_was_refused_is_told_again_until_it_is_taken(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ear = Ear()
    ear.refusal = ValueError("prefill_decode beside prefill")

    async with started(source := FileSource(path, read, ear)):
        await asyncio.sleep(5)
        assert source.problem == "the fleet was refused: prefill_decode beside prefill"
        assert len(warnings(caplog)) == 1

        # What it could not be beside is gone from another source.
        ear.refusal = None
        await asyncio.sleep(1.1)
        assert ear.urls == [A]
        assert source.problem == ""


async def test_a_refused_fleet_is_forgotten_when_the_file_turns_bad(path: Path) -> None:
    ear = Ear()

    async with started(FileSource(path, read, ear)):
        ear.refusal = ValueError("no")
        write(path, B)
        await asyncio.sleep(2)
        put(path, "[")
        await asyncio.sleep(2)
        ear.refusal = None
        await asyncio.sleep(2)

        assert ear.urls == [A]


async def test_a_bug_does_not_end_the_watching(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ear = Ear()

    async with started(source := FileSource(path, read, ear)):
        ear.refusal = RuntimeError("a bug")
        write(path, B)
        await asyncio.sleep(3)
        assert "watching failed: RuntimeError('a bug')" in source.problem
        assert any(record.exc_info for record in caplog.records)

        ear.refusal = None
        await asyncio.sleep(3)
        assert ear.urls == [B]
        assert source.problem == ""


async def test_nothing_is_read_after_aclose(path: Path) -> None:
    ear = Ear()

    async with started(FileSource(path, read, ear)):
        pass
    write(path, B)
    await asyncio.sleep(5)

    assert ear.urls == [A]


async def test_a_source_may_be_started_again(path: Path) -> None:
    ear = Ear()
    source = FileSource(path, read, ear)

    async with started(source):
        pass
    write(path, B)
    async with started(source):
        assert ear.urls == [B]
