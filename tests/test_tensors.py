from __future__ import annotations

import base64
import io
import struct
import zipfile
from typing import Any

import pytest

from epd_proxy.tensors import tensor_base64
from tests.backends import Backends, ask, image, report
from tests.driver import chat


def entries(numbers: list[bytes]) -> dict[str, bytes]:
    encoded = tensor_base64(numbers)
    assert encoded is not None
    archive = zipfile.ZipFile(io.BytesIO(base64.b64decode(encoded, validate=True)))
    return {name: archive.read(name) for name in archive.namelist()}


def test_integers_are_an_int64_tensor() -> None:
    found = entries([b"1", b"-2", b"9223372036854775807"])
    assert found.keys() == {"archive/data.pkl", "archive/data/0", "archive/version"}
    assert found["archive/data/0"] == struct.pack("<3q", 1, -2, 9223372036854775807)
    assert b"torch\nLongStorage\n" in found["archive/data.pkl"]
    assert found["archive/version"] == b"3\n"


@pytest.mark.parametrize("number", [b"1.0", b"1e0", b"1E0"])
def test_one_float_makes_a_float64_tensor(number: bytes) -> None:
    found = entries([b"2", number])
    assert found["archive/data/0"] == struct.pack("<2d", 2.0, 1.0)
    assert b"torch\nDoubleStorage\n" in found["archive/data.pkl"]


def test_the_same_numbers_are_the_same_bytes() -> None:
    assert tensor_base64([b"1", b"4"]) == tensor_base64([b"1", b"4"])


@pytest.mark.parametrize("number", [b"9223372036854775808", b"-9223372036854775809", b"1e400"])
def test_a_number_that_does_not_fit_makes_no_tensor(number: bytes) -> None:
    assert tensor_base64([b"1", number]) is None


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        ([b"1", b"28", b"28"], "int64"),
        ([b"-9223372036854775808", b"9223372036854775807"], "int64"),
        ([b"1.0", b"2"], "float64"),
        ([b"7"] * 70_000, "int64"),
    ],
)
def test_torch_itself_reads_it(numbers: list[bytes], dtype: str) -> None:
    torch: Any = pytest.importorskip("torch", reason="torch is not installed")
    encoded = tensor_base64(numbers)
    assert encoded is not None
    tensor = torch.load(io.BytesIO(base64.b64decode(encoded, validate=True)), weights_only=True)
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.tolist() == [float(n) if dtype == "float64" else int(n) for n in numbers]


async def test_references_carry_tensors_where_engines_want_them() -> None:
    backends = Backends()
    backends.encode[0].answers(report({"h": {"metadata": {"image_grid_thw": [[1, 4, 4]]}}}))
    await chat(backends.proxy(metadata_format="tensor"), ask(image()))
    (part,) = backends.decode[0].bodies[0]["messages"][0]["content"]
    tensor = tensor_base64([b"1", b"4", b"4"])
    assert tensor is not None
    assert part["image_embeds"] == {"image_grid_thw": tensor}


async def test_what_fits_no_tensor_stays_raw() -> None:
    backends = Backends()
    backends.encode[0].answers(report({"h": {"metadata": {"x": [9223372036854775808]}}}))
    await chat(backends.proxy(metadata_format="tensor"), ask(image()))
    (part,) = backends.decode[0].bodies[0]["messages"][0]["content"]
    assert part["type"] == "image_url"
