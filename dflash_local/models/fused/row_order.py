"""Rows of a loaded weight in another order, whatever its format: its codes move with their scales."""

from __future__ import annotations

import torch

from dflash_local.errors import CheckpointError
from dflash_local.kernels.fragment_packing import FragmentWeight
from dflash_local.kernels.quantized_weight import Fp4Weight, Fp8Weight, IntWeight
from dflash_local.models.fused.formats import Weight


def reorder_rows(weight: Weight, order: torch.Tensor, name: str) -> None:
    """Row i of a weight [N, K] becomes what row ``order[i]`` was, in place; beside it a copy of its codes is held.

    Args:
        order: [N] int64. name: of its module, for messages.

    Raises:
        CheckpointError: rows that share a scale would come to lie in blocks of different scales.
        TypeError: it is packed for kernels already.
    """
    if isinstance(weight, torch.Tensor):
        _move(weight, order)
        return
    if isinstance(weight, FragmentWeight):
        raise TypeError(f"{name}: packed rows keep their order")
    block = weight.block[0] if isinstance(weight, Fp8Weight) else 1
    from_blocks = order // block
    scales = from_blocks[::block]
    if not torch.equal(scales.repeat_interleave(block)[: len(order)], from_blocks):
        raise CheckpointError(
            f"{name}: its rows go by key heads, which the blocks of {block} rows of its fp8 weights cross",
            "use --engine reference, or a variant with a scale for each row or group",
        )
    _move(weight.codes, order)
    _move(weight.scales, scales)
    beside = weight.zeros if isinstance(weight, IntWeight) else None
    beside = weight.row_scales if isinstance(weight, Fp4Weight) else beside
    if beside is not None:
        _move(beside, order)


def _move(rows: torch.Tensor, order: torch.Tensor) -> None:
    """As bytes where they are of one: not every version of torch takes rows of float8 by their numbers."""
    plain = rows.view(torch.uint8) if rows.element_size() == 1 else rows
    plain.copy_(plain[order.to(rows.device)])
