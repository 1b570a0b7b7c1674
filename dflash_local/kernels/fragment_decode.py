"""Rows of a packed quantised weight as plain numbers, for products with many rows: one pass over the codes.

A prompt's chunk has enough rows to pay for it: the codes are read once, the numbers written and read once more.
"""

from __future__ import annotations

from typing import Any

import torch

from dflash_local.kernels import few_row_gemm
from dflash_local.kernels.fragment_packing import HALF_OF_LANES, NIBBLES, TILE_N, FragmentWeight
from dflash_local.kernels.jit import jit, runs_kernels, tl
from dflash_local.layout.linear import DECODED_SLICE

PROGRAM_WORDS = 512  # of codes that a program decodes: 32 bytes for each thread
STEP_RUNS = 128  # of eight columns of two features
NUM_WARPS = 2
GEMM_TILE = 256  # rows of a weight that a tile of torch's product may take: slices of whole tiles leave none half empty


def decode(weight: FragmentWeight, rows: slice, out: torch.Tensor) -> torch.Tensor:
    """What some coded rows of a weight stand for, in the dtype of ``out``.

    Args:
        rows: from a tile's first to a tile's last or the last of all. out: [>= n, K] contiguous; its first n are
            written.
    """
    begin, end, _ = rows.indices(weight.coded_rows)
    part = out[: end - begin]
    if not runs_kernels(weight):
        return part.copy_(weight.dequantized(rows))
    kind, steps = weight.format, weight.codes.shape[1]
    grid = (-(-(end - begin) // TILE_N), -(-steps * kind.step_words // PROGRAM_WORDS))
    _decode_kernel[grid](
        *tile_operands(weight), part, begin // TILE_N, weight.coded_rows, weight.shape[1], steps,
        weight.scales.shape[-1],
        **tile_constants(weight), RUNS=PROGRAM_WORDS // (kind.step_words // STEP_RUNS), num_warps=NUM_WARPS,
    )  # fmt: skip
    return part


def linear(x: torch.Tensor, weight: FragmentWeight) -> torch.Tensor:
    """``x @ weight.T`` for many rows, a slice of the weight at a time.

    Args:
        x: [M, K].
    """
    n, k = weight.coded_rows, weight.shape[1]
    step = slice_rows(n, k)
    out, room = x.new_empty(len(x), weight.shape[0]), x.new_empty(min(step, n), k)
    for begin in range(0, n, step):
        rows = slice(begin, min(begin + step, n))
        torch.mm(x, decode(weight, rows, room).t(), out=out[:, rows])
    few_row_gemm.multiply_tail(x, weight, out)
    return out


def slice_rows(n: int, k: int) -> int:
    """Rows of a weight [N, K] that are decoded at a time, so that slices are of about one size."""
    most = max(TILE_N, DECODED_SLICE // k)
    unit = GEMM_TILE if most >= GEMM_TILE else TILE_N
    most = most // unit * unit
    slices = -(-n // most)
    return -(-n // (slices * unit)) * unit


def tile_operands(weight: FragmentWeight) -> tuple[torch.Tensor, ...]:
    """Codes, scales, zero points and scales of rows of a weight, as ``load_runs`` and ``decoded_runs`` take them."""
    scales = weight.scales.view(torch.uint8) if weight.scales.dtype == torch.float8_e4m3fn else weight.scales
    row_scales = scales if weight.row_scales is None else weight.row_scales
    return weight.codes, scales, scales if weight.zeros is None else weight.zeros, row_scales


def tile_constants(weight: FragmentWeight) -> dict[str, Any]:
    """What ``load_runs`` and ``decoded_runs`` are compiled for."""
    kind = weight.format
    fields = NIBBLES.get(kind.codes, ())
    places = [sum(place << 8 * operand for operand, place in enumerate(field[2])) for field in fields]
    return {
        "CODES": kind.codes,
        "PLACES": places[0] if places else 0,
        "SIGN_PLACES": places[-1] if places else 0,
        "RUN_WORDS": kind.step_words // STEP_RUNS,
        "BLOCK_ROWS": kind.block[0] if kind.block else 0,
        "GROUP_STEPS": kind.group_steps,
        "STEP_GROUP": kind.step_group,
        "BY_HALVES": kind.step_group == HALF_OF_LANES,
        "HAS_ZEROS": kind.zeros,
        "E4M3_SCALES": kind.scales == torch.float8_e4m3fn,
        "HAS_ROW_SCALES": kind.block is None or kind.row_scales,
    }


# fmt: off
@jit
def _decode_kernel(
    codes, scales, zeros, row_scales, out, first_tile, features, in_features, steps, scale_columns,
    CODES: tl.constexpr, PLACES: tl.constexpr, SIGN_PLACES: tl.constexpr, RUN_WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, GROUP_STEPS: tl.constexpr, STEP_GROUP: tl.constexpr, BY_HALVES: tl.constexpr,
    HAS_ZEROS: tl.constexpr, E4M3_SCALES: tl.constexpr, HAS_ROW_SCALES: tl.constexpr, RUNS: tl.constexpr,
):
    # fmt: on
    # One program: RUNS runs, whose codes lie together, of a tile of 16 features. A thread loads a run's words at once
    # and stores 16 bytes of either feature; four neighbours (of four bits: every other one) fill 64 bytes of a row.
    tile = (tl.program_id(0) + first_tile).to(tl.int64)
    packed, g, column = load_runs(codes, tile, tl.program_id(1) * RUNS, steps, RUN_WORDS, RUNS)
    for h in tl.static_range(2):
        values = decoded_runs(
            packed, g, column, scales, zeros, row_scales, tile, features, steps, scale_columns, h, CODES, PLACES,
            SIGN_PLACES, RUN_WORDS, BLOCK_ROWS, GROUP_STEPS, STEP_GROUP, BY_HALVES, HAS_ZEROS, E4M3_SCALES,
            HAS_ROW_SCALES, RUNS,
        )  # fmt: skip
        row = g + 8 * h
        place = (tl.program_id(0).to(tl.int64) * 16 + row) * in_features + column
        stored = (tile * 16 + row < features) & (column < in_features)
        places = place[:, None] + tl.arange(0, 8)[None, :]
        tl.store(out + places, values.to(out.dtype.element_ty), mask=stored[:, None])


@jit
def load_runs(codes, tile, first, steps, RUN_WORDS: tl.constexpr, RUNS: tl.constexpr):
    """Words [RUNS, RUN_WORDS] of some runs of a tile, and g and the first column of each run.

    A run is eight columns of features g and g + 8 (``fragment_packing``). A step of 128 columns has 128 of them.
    """
    run = first + tl.arange(0, RUNS)
    words = run[:, None] * RUN_WORDS + tl.arange(0, RUN_WORDS)[None, :]
    inside = run // 128 < steps
    packed = tl.load(codes + tile * steps * (128 * RUN_WORDS) + words, mask=inside[:, None], other=0)
    if RUN_WORDS == 2:  # of 64 columns: g, t, half of the columns
        g, t, k32 = run // 8 % 8, run // 2 % 4, run // 64 % 2 * 2 + run % 2
    else:
        g, t, k32 = run // 4 % 8, run % 4, run // 32 % 4
    return packed, g, run // 128 * 128 + k32 * 32 + t * 8


# fmt: off
@jit
def decoded_runs(
    packed, g, column, scales, zeros, row_scales, tile, features, steps, scale_columns, h: tl.constexpr,
    CODES: tl.constexpr, PLACES: tl.constexpr, SIGN_PLACES: tl.constexpr, RUN_WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, GROUP_STEPS: tl.constexpr, STEP_GROUP: tl.constexpr, BY_HALVES: tl.constexpr,
    HAS_ZEROS: tl.constexpr, E4M3_SCALES: tl.constexpr, HAS_ROW_SCALES: tl.constexpr, RUNS: tl.constexpr,
):
    # fmt: on
    """What runs stand for in feature g + 8 h, [RUNS, 8] in float32. Scales are found once for a run."""
    step = column // 128
    inside = step < steps
    if RUN_WORDS == 2:
        even = tl.join(
            _value(packed, CODES, PLACES, SIGN_PLACES, h, 0), _value(packed, CODES, PLACES, SIGN_PLACES, h + 2, 0)
        )
        odd = tl.join(
            _value(packed, CODES, PLACES, SIGN_PLACES, h, 1), _value(packed, CODES, PLACES, SIGN_PLACES, h + 2, 1)
        )
        values = tl.reshape(tl.join(even, odd), [RUNS, 8])
    else:
        even, odd = _value(packed, CODES, PLACES, SIGN_PLACES, h, 0), _value(packed, CODES, PLACES, SIGN_PLACES, h, 1)
        values = tl.reshape(tl.join(even, odd), [RUNS, 8])
    GROUPS: tl.constexpr = 128 // STEP_GROUP
    if BLOCK_ROWS == 1:
        group = column % 32 // 16 * 4 + column % 128 // 32 if BY_HALVES else column % 128 // STEP_GROUP
        wide_steps = (steps + GROUP_STEPS - 1) // GROUP_STEPS
        at = (((tile * wide_steps + step // GROUP_STEPS) * 8 + g) * GROUPS + group) * 2 + h
        if HAS_ZEROS:
            zero = tl.load(zeros + at, mask=inside, other=0).to(tl.float32)
            values -= (zero if CODES == "int4" else zero - 128)[:, None]
        elif CODES == "int4":
            values -= 8
        values *= _scale(tl.load(scales + at, mask=inside, other=0), E4M3_SCALES)[:, None]
    elif BLOCK_ROWS > 1:
        at = (tile * 16 // BLOCK_ROWS) * scale_columns + step // GROUP_STEPS
        values *= tl.load(scales + at, mask=inside, other=0).to(tl.float32)[:, None]
    if HAS_ROW_SCALES:
        row = tile * 16 + g + 8 * h
        values *= tl.load(row_scales + row, mask=row < features, other=0).to(tl.float32)[:, None]
    return values


@jit
def _value(
    word,
    CODES: tl.constexpr,
    PLACES: tl.constexpr,
    SIGN_PLACES: tl.constexpr,
    OPERAND: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    """A code of a word as float32; OPERAND: h of a byte, h + 2 pair of four bits."""
    PLACE: tl.constexpr = ((PLACES >> 8 * OPERAND) & 255) + 16 * ELEMENT
    SIGN: tl.constexpr = ((SIGN_PLACES >> 8 * OPERAND) & 255) + 16 * ELEMENT
    BYTE: tl.constexpr = 2 * ELEMENT + 1 - OPERAND
    if CODES == "int4":
        return ((word >> PLACE) & 15).to(tl.float32)
    elif CODES == "int8":
        return ((word << (24 - 8 * BYTE)) >> 24).to(tl.float32)
    elif CODES == "e4m3":
        # Sign, exponent and mantissa to where float32 has them: only the exponent's bias is wrong then.
        bits = ((word << (24 - 8 * BYTE)) >> 4) & -2014314496  # 0x87f00000
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    else:
        bits = (((word >> PLACE) & 7) << 22) | (((word >> SIGN) & 1) << 31)
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@jit
def _scale(raw, E4M3_SCALES: tl.constexpr):
    """A scale as float32; bytes are powers of two or e4m3 without a sign."""
    if raw.dtype != tl.uint8:
        return raw.to(tl.float32)
    elif E4M3_SCALES:
        return (raw.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    else:
        bits = tl.where(raw == 0, 1 << 22, raw.to(tl.int32) << 23)  # 2^-127 has no leading one
        return bits.to(tl.float32, bitcast=True)
