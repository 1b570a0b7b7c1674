"""What kernels in CUDA C++ are compiled with."""

from __future__ import annotations

import pytest

from dflash_local.errors import MissingDependencyError
from dflash_local.kernels import nvrtc


@pytest.fixture(scope="module")
def compiler() -> nvrtc.Nvrtc:
    """NVRTC; tests that ask for it are skipped where it is not installed."""
    try:
        return nvrtc.nvrtc()
    except MissingDependencyError as error:
        pytest.skip(f"{error.message}; {error.hint}")
