"""Taking back what a converter did: to values, and to rows of blocks that nobody decoded."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from dflash_local.checkpoint_files.undo import Add, Interleave, LogOfNegated, SwapAxes, Undo, moves_rows_only
from dflash_local.models.gguf_rows import undone


def test_axes_are_swapped_behind_the_start() -> None:
    rows = torch.arange(8)
    assert undone(rows, (SwapAxes(0, 0, outer=1, first=4, second=2, inner=1),)).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert undone(rows, (SwapAxes(0, 2, outer=1, first=3, second=2, inner=1),)).tolist() == [0, 1, 2, 4, 6, 3, 5, 7]
    assert undone(rows, (SwapAxes(0, 0, outer=2, first=2, second=2, inner=1),)).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert undone(rows, (SwapAxes(0, 0, outer=1, first=2, second=2, inner=2),)).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    columns = undone(rows.view(2, 4), (SwapAxes(1, 0, outer=1, first=2, second=2, inner=1),))
    assert columns.tolist() == [[0, 2, 1, 3], [4, 6, 5, 7]]


def test_rows_of_several_kinds_are_interleaved_by_group() -> None:
    """Two groups of one row of the first kind, and of two of the second."""
    assert undone(torch.arange(6), (Interleave(2, (1, 2)),)).tolist() == [0, 2, 3, 1, 4, 5]


@pytest.mark.parametrize(
    "step", [SwapAxes(0, 0, 2, 8, 2, 1), SwapAxes(0, 8, 1, 3, 4, 2), Interleave(4, (2, 2, 4))], ids=type
)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_rows_of_blocks_move_as_rows_of_values_do(step: Undo, kind: str) -> None:
    type_ = gguf.GGMLQuantizationType[kind]
    codes = gguf.quants.quantize(np.random.default_rng(1).standard_normal((32, 64), dtype=np.float32), type_)
    assert moves_rows_only((step,))
    moved = gguf.quants.dequantize(undone(torch.from_numpy(codes), (step,)).numpy(), type_)
    expected = undone(torch.from_numpy(gguf.quants.dequantize(codes, type_)), (step,))
    assert torch.equal(torch.from_numpy(moved), expected)
    assert not torch.equal(expected, torch.from_numpy(gguf.quants.dequantize(codes, type_)))


@pytest.mark.parametrize("step", [SwapAxes(1, 0, 1, 2, 2, 16), Add(-1.0), LogOfNegated()], ids=type)
def test_columns_and_values_are_not_moved_undecoded(step: Undo) -> None:
    assert not moves_rows_only((SwapAxes(0, 0, 1, 2, 2, 1), step))
