"""Where NVRTC lies, the compiler of kernels in CUDA C++: in NVIDIA's wheels, with torch, or in a toolkit.

Imports no torch, so that a plan knows it too.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

LIBRARY_NAMES = ("libnvrtc.so.*", "nvrtc64_*.dll")
MAJOR_IN_NAME = re.compile(r"libnvrtc\.so\.(\d+)|nvrtc64_(\d+)\d_")


def installed() -> Iterator[Path]:
    """Find NVRTC in the folders of NVIDIA's wheels, and in torch's own."""
    folders = [
        folder
        for place in _package("nvidia")
        for inner in ("lib", "bin", "bin/x86_64")
        for folder in place.glob(f"*/{inner}")
    ]
    for folder in (*folders, *(place / "lib" for place in _package("torch"))):
        for name in LIBRARY_NAMES:
            yield from folder.glob(name)


def _package(name: str) -> list[Path]:
    spec = find_spec(name)
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []


def major_of(name: str) -> str | None:
    """Tell the CUDA that a library is of; None for its alternative build, which has more in its name."""
    found = MAJOR_IN_NAME.match(name) if "alt" not in name and "builtins" not in name else None
    return (found[1] or found[2]) if found else None


def toolkit_library(major: str) -> str:
    """Return what a toolkit of that CUDA calls it."""
    return f"nvrtc64_{major}0_0.dll" if sys.platform == "win32" else f"libnvrtc.so.{major}"


def is_there(cuda: int | None) -> bool:
    """Return False where there is none of that CUDA, torch's; of any where it is not known."""
    if cuda is None:
        return any(True for _ in installed())
    if any(major_of(path.name) == str(cuda) for path in installed()):
        return True
    with suppress(OSError):
        ctypes.CDLL(toolkit_library(str(cuda)))
        return True
    return False
