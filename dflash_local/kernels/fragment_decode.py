"""Rows of a packed quantised weight as plain numbers, for products with many rows: one pass over the codes.

A prompt's chunk has enough rows to pay for it: the codes are read once, the numbers written and read once more.
"""

from __future__ import annotations

import torch

from dflash_local.kernels.decode_attention import widened
from dflash_local.kernels.fragment_packing import STEP_K, TILE_N, FragmentWeight
from dflash_local.kernels.jit import jit, runs_kernels, tl
from dflash_local.kernels.quantized_weight import INT4_ZERO
from dflash_local.layout.linear import DECODED_SLICE


def decode(weight: FragmentWeight, rows: slice, out: torch.Tensor) -> torch.Tensor:
    """What some rows of a weight stand for, in the dtype of ``out``.

    Args:
        rows: from a tile's first to a tile's last or the weight's. out: [>= n, K] contiguous; its first n are written.
    """
    begin, end, _ = rows.indices(weight.shape[0])
    part = out[: end - begin]
    if not runs_kernels(weight) or weight.shape[1] % STEP_K or (end - begin) % TILE_N:
        return part.copy_(weight.dequantized(rows))
    steps = weight.codes.shape[1]
    _decode_kernel[((end - begin) // TILE_N, steps)](
        *tile_operands(weight), part, begin // TILE_N, steps, weight.scales.shape[-1], **tile_constants(weight),
        num_warps=4,
    )  # fmt: skip
    return part


def linear(x: torch.Tensor, weight: FragmentWeight) -> torch.Tensor:
    """``x @ weight.T`` for many rows, a slice of the weight at a time.

    Args:
        x: [M, K].
    """
    n, k = weight.shape
    step = max(TILE_N, DECODED_SLICE // k // TILE_N * TILE_N)
    out, room = x.new_empty(len(x), n), x.new_empty(min(step, n), k)
    for begin in range(0, n, step):
        rows = slice(begin, min(begin + step, n))
        torch.mm(x, decode(weight, rows, room).t(), out=out[:, rows])
    return out


def tile_operands(weight: FragmentWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and zero points of a weight, as ``decoded_tile`` takes them."""
    words = weight.codes.view(torch.uint8) if weight.format.bits == 8 else weight.codes
    return words, weight.scales, weight.scales if weight.zeros is None else weight.zeros


def tile_constants(weight: FragmentWeight) -> dict[str, int | bool]:
    """What ``decoded_tile`` is compiled for."""
    kind = weight.format
    return {
        "BLOCK_ROWS": kind.block[0],
        "BITS": kind.bits,
        "BLOCK_COLUMNS": kind.block[1],
        "STEP_GROUP": kind.step_group,
        "HAS_ZEROS": weight.zeros is not None,
        "ZERO": INT4_ZERO,
    }


# fmt: off
@jit
def decoded_tile(
    codes, scales, zeros, tile, step, steps, scale_columns, BLOCK_ROWS: tl.constexpr, BITS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, STEP_GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, ZERO: tl.constexpr,
):
    # fmt: on
    """What a tile of 16 features (int64) and a step of 128 columns stand for, [16, 128] in float32.

    Its codes lie together; which of them a number is follows from its place (``fragment_packing``), so every word is
    found by several lanes and leaves memory once.
    """
    row = tl.arange(0, 16)[:, None]
    column = tl.arange(0, 128)[None, :]
    g = row % 8
    h = row // 8
    k32 = column // 32
    t = column % 32 // 8
    half = column % 8 // 4
    pair = column % 4 // 2
    element = column % 2
    if BITS == 4:
        word = (((k32 // 2 * 8 + g) * 4 + t) * 2 + k32 % 2) * 2 + half
        packed = tl.load(codes + (tile * steps + step) * 256 + word)
        value = ((packed >> (4 * (h + 2 * pair) + 16 * element)) & 15).to(tl.float32)
        GROUPS: tl.constexpr = 128 // STEP_GROUP
        wide = step * STEP_GROUP // BLOCK_COLUMNS if STEP_GROUP == 128 else step
        wide_steps = steps * STEP_GROUP // BLOCK_COLUMNS if STEP_GROUP == 128 else steps
        at = (((tile * wide_steps + wide) * 8 + g) * GROUPS + column // STEP_GROUP) * 2 + h
        if HAS_ZEROS:
            value = value - tl.load(zeros + at).to(tl.float32)
        else:
            value = value - ZERO
        value = value * tl.load(scales + at).to(tl.float32)
    else:
        byte = (((((k32 * 8 + g) * 4 + t) * 2 + half) * 2 + pair) * 2 + element) * 2 + 1 - h
        value = widened(tl.load(codes + (tile * steps + step) * 2048 + byte), tl.float32)
        at = (tile * 16 // BLOCK_ROWS) * scale_columns + step * 128 // BLOCK_COLUMNS
        value = value * tl.load(scales + at).to(tl.float32)
    return value


# fmt: off
@jit
def _decode_kernel(
    codes, scales, zeros, out, first_tile, steps, scale_columns, BLOCK_ROWS: tl.constexpr, BITS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, STEP_GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, ZERO: tl.constexpr,
):
    # fmt: on
    # One program: a tile of 16 features by a step of 128 columns.
    tile = (tl.program_id(0) + first_tile).to(tl.int64)
    step = tl.program_id(1)
    value = decoded_tile(
        codes, scales, zeros, tile, step, steps, scale_columns, BLOCK_ROWS, BITS, BLOCK_COLUMNS, STEP_GROUP, HAS_ZEROS,
        ZERO,
    )  # fmt: skip
    row = tl.arange(0, 16)[:, None]
    column = tl.arange(0, 128)[None, :]
    place = (tl.program_id(0).to(tl.int64) * 16 + row) * (steps * 128) + step * 128 + column
    tl.store(out + place, value.to(out.dtype.element_ty))
