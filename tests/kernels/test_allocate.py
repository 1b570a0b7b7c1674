"""Tensors by their description: what is joined shares one memory and takes no byte more; rows, copies on the host."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

from dflash_local.errors import DoesNotFitError
from dflash_local.kernels.allocate import UNIT, Tensors, pinned_empty
from dflash_local.layout.buffer import Buffer

CPU = torch.device("cpu")
BUFFERS = (
    Buffer("codes", (64, 32), "int32", "target weights"),
    Buffer("scales", (64, 8), "bfloat16", "target weights", zeroed=True),
    Buffer("counters", (3,), "int32", "buffers", zeroed=True),
    Buffer("table", (16, 64), "bfloat16", "embedding in host memory"),
)


def test_joined_tensors_share_a_memory_without_padding() -> None:
    tensors = Tensors(BUFFERS, CPU, joined=True)
    codes, scales, counters, table = tensors.take(BUFFERS)
    storage = codes.untyped_storage()
    assert (
        storage.data_ptr() == scales.untyped_storage().data_ptr() and storage.nbytes() == codes.nbytes + scales.nbytes
    )
    assert scales.storage_offset() * scales.element_size() % UNIT == 0
    for alone in (counters, table):
        assert alone.untyped_storage().nbytes() == alone.nbytes


class Runtime:
    """CUDA's runtime as far as pinning goes; ``seen``: the first byte of the memory when it was given back."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.pinned: dict[int, int] = {}
        self.seen: list[bytes] = []

    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:
        self.pinned[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> None:
        del self.pinned[address]
        self.seen.append(ctypes.string_at(address, 1))


def test_pinned_memory_is_of_its_size_and_let_go_while_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its last view, and before the pages are unmapped."""
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    table = pinned_empty((1000, 3), torch.bfloat16)
    assert list(runtime.pinned.items()) == [(table.data_ptr(), 6000)] and table.shape == (1000, 3)
    row = table.fill_(1.0)[0]
    del table
    gc.collect()
    assert runtime.pinned and row.sum() == 3
    del row
    gc.collect()
    assert not runtime.pinned and runtime.seen == [b"\x80"]


def test_memory_that_cannot_be_pinned_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(code=2))
    with pytest.raises(DoesNotFitError, match="no 0.0 GiB of pinned memory: CUDA error 2") as caught:
        pinned_empty((8,), torch.float32)
    assert "--offload none" in caught.value.hint
