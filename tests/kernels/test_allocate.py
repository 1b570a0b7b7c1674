"""Tensors by their description: what is joined shares one memory and takes no byte more; rows, copies on the host."""

from __future__ import annotations

import pytest
import torch

from dflash_local.kernels.allocate import UNIT, Tensors
from dflash_local.kernels.gather_rows import gather_rows
from dflash_local.kernels.pinned import on_host
from dflash_local.layout.buffer import Buffer

CPU = torch.device("cpu")
BUFFERS = (
    Buffer("codes", (64, 32), "int32", "target weights"),
    Buffer("scales", (64, 8), "bfloat16", "target weights", zeroed=True),
    Buffer("counters", (3,), "int32", "buffers", zeroed=True),
    Buffer("table", (16, 64), "bfloat16", "embedding in host memory"),
)


@pytest.mark.parametrize("joined", [False, True])
def test_tensors_are_what_their_buffers_say(joined: bool) -> None:
    tensors = Tensors(BUFFERS, CPU, joined)
    for buffer in BUFFERS:
        found = tensors[buffer.name]
        assert (tuple(found.shape), found.nbytes) == (buffer.shape, buffer.nbytes)
        assert found.dtype == getattr(torch, buffer.dtype) and found.is_contiguous()
        assert not buffer.zeroed or not found.any()
    tensors["codes"].fill_(-1)
    assert not tensors["scales"].any() and not tensors["counters"].any()


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


def test_gathered_rows_are_the_tables() -> None:
    table, ids = torch.randn(50, 24), torch.tensor([3, 3, 49, 0])
    out = torch.empty(4, 24)
    assert gather_rows(table, ids, out) is out and torch.equal(out, table[ids])


def test_a_copy_on_the_host_is_a_copy() -> None:
    tensor = torch.randn(3, 4)
    copy = on_host(tensor)
    tensor.zero_()
    assert copy.any() and not copy.is_pinned()
