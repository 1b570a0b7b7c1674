"""What the CUDA driver answers becomes an error of its kind."""

from __future__ import annotations

import ctypes

import pytest
import torch

from dflash_local.kernels import cuda_driver


class Driver:
    """Has a text for every error."""

    def cuGetErrorString(self, result: int, text: object) -> None:
        pointer = ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))  # type: ignore[arg-type]
        pointer[0] = b"out of memory" if result == 2 else b"an illegal memory access was encountered"


def test_a_full_device_is_told_from_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "driver", Driver)
    cuda_driver.check(0)
    with pytest.raises(torch.OutOfMemoryError, match="the CUDA driver: out of memory"):
        cuda_driver.check(2)
    with pytest.raises(RuntimeError, match="illegal memory access") as caught:
        cuda_driver.check(700)
    assert not isinstance(caught.value, torch.OutOfMemoryError)
