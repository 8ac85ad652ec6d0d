"""
Metadata as tensors, for engines that take no JSON arrays in references (before vLLM 0.33).

They want base64 of what ``torch.save`` writes. This is the smallest container that ``torch.load``
reads with ``weights_only=True``, written without torch: a zip of a pickle that rebuilds one tensor
of one dimension, its elements, and a version.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Sequence

import pybase64

_INT64 = range(-(1 << 63), 1 << 63)


def tensor_base64(numbers: Sequence[bytes]) -> str | None:
    """
    A tensor of numbers given as JSON text: float64 if one of them has a fraction or an exponent,
    else int64. None if one of them does not fit.
    """
    if any(set(number) & set(b".eE") for number in numbers):
        floats = [float(number) for number in numbers]
        if not all(map(math.isfinite, floats)):
            return None
        return _container(b"DoubleStorage", struct.pack(f"<{len(floats)}d", *floats), len(floats))
    integers = [int(number) for number in numbers]
    if not all(number in _INT64 for number in integers):
        return None
    return _container(b"LongStorage", struct.pack(f"<{len(integers)}q", *integers), len(integers))


def _container(storage: bytes, elements: bytes, count: int) -> str:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in (
            ("data.pkl", _pickle(storage, count)),
            ("data/0", elements),
            ("version", b"3\n"),
        ):
            # With a date of its own, the same numbers are the same bytes.
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
    return pybase64.b64encode_as_string(file.getvalue())


def _pickle(storage: bytes, count: int) -> bytes:
    """A call of ``_rebuild_tensor_v2(storage, 0, (count,), (1,), False, OrderedDict())``."""
    size = b"J" + struct.pack("<i", count)
    return b"".join(
        (
            b"\x80\x02",
            b"ctorch._utils\n_rebuild_tensor_v2\n",
            b"(",
            b"(" + _text(b"storage") + b"ctorch\n" + storage + b"\n" + _text(b"0"),
            _text(b"cpu") + size + b"tQ",
            b"K\x00",
            size + b"\x85",
            b"K\x01\x85",
            b"\x89",
            b"ccollections\nOrderedDict\n)R",
            b"tR.",
        )
    )


def _text(text: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text
