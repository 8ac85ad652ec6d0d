"""
Runs a proxy script with its logs off, its source untouched.

    python silent.py SCRIPT [ARGUMENT ...]

vLLM's example proxy logs several lines for each request, and has uvicorn's access log on. Here only
warnings are logged. It runs in an environment of the script's, so it imports nothing of ours.

Before 0.30 the script makes tensors with torch, which is some gigabytes. Where torch is not
installed a stand-in for the two calls does: the numbers in a zip file, as torch.save writes them,
and cheaper than that, which favours the script.
"""

from __future__ import annotations

import importlib.util
import logging
import runpy
import struct
import sys
import types
import zipfile
from typing import Any, BinaryIO

import uvicorn


def _save(tensor: tuple[str, list[float]], file: BinaryIO) -> None:
    kind, values = tensor
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", kind)
        archive.writestr("archive/data/0", struct.pack(f"<{len(values)}{kind}", *values))


def _tensor(values: list[float], dtype: str | None = None) -> tuple[str, list[float]]:
    return dtype or "q", values


def _stand_in_for_torch() -> types.ModuleType:
    torch: Any = types.ModuleType("torch")
    torch.float64, torch.tensor, torch.save = "d", _tensor, _save
    module: types.ModuleType = torch
    return module


def _without_logs(run: Any) -> Any:
    def quietly(app: Any, **options: Any) -> None:
        run(app, **{**options, "access_log": False, "log_level": "warning"})

    return quietly


def main() -> None:
    # The script's own `basicConfig` does nothing after this one.
    logging.basicConfig(level=logging.WARNING)
    uvicorn.run = _without_logs(uvicorn.run)
    if importlib.util.find_spec("torch") is None:
        sys.modules["torch"] = _stand_in_for_torch()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
