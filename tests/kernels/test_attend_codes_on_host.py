"""Attention over int8 codes: Hopper's own source, run on the CPU thread by thread, against plain PyTorch."""

from __future__ import annotations

import sys

import pytest
import torch

from dflash_local.kernels import attend_codes
from dflash_local.layout.attention import SPLITS_PER_DOUBLING
from tests.host_cuda import HostKernel, compiler

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or compiler() is None, reason="g++ on Linux stands in for the card"
)
CPU = torch.device("cpu")


def kernel(source: str, heads: int, queries: int, splits_per_doubling: int) -> HostKernel:
    options = attend_codes.compile_options(heads, 1, queries, splits_per_doubling)
    return HostKernel.of(source, [*options, f"-DSHARED_BYTES={attend_codes.shared_bytes(queries)}"])


@pytest.mark.parametrize(("heads", "rows", "fixed"), [(6, 2, True), (4, 12, False), (6, 12, False)])
def test_the_source_computes_what_pytorch_does(heads: int, rows: int, fixed: bool) -> None:
    queries = -(-heads * rows // attend_codes.QUERY_STEP) * attend_codes.QUERY_STEP
    source = attend_codes.SOURCE.read_text(encoding="utf-8")
    found = kernel(source, heads, queries, SPLITS_PER_DOUBLING if fixed else 0)
    for found.seed in (0, 1):
        assert attend_codes._is_right(found, rows, heads, 1, CPU)


def test_a_kernel_is_tried_before_it_is_used() -> None:
    source = attend_codes.SOURCE.read_text(encoding="utf-8")
    for good, bad in (
        ("sums[i] *= 128", "sums[i] *= 127"),
        ("if (any) move_references", "if (false) move_references"),
        ("copy_keys(offset + 2 * STEP, buffer)", "copy_keys(offset + STEP, buffer)"),
        ("0x00800080", "0x00000000"),
    ):
        assert source.count(good) == 1
        assert not attend_codes._is_right(kernel(source.replace(good, bad), 4, 16, 0), 3, 4, 1, CPU)
