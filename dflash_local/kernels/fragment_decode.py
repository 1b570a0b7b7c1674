"""Rows of a packed quantised weight as plain numbers, for products with many rows: one pass over the codes.

A prompt's chunk has enough rows to pay for it: the codes are read once, the numbers written and read once more.
"""

from __future__ import annotations

from typing import Any

import torch

from dflash_local.kernels.fragment_packing import HALF_OF_LANES, NIBBLES, TILE_N, FragmentFormat, FragmentWeight
from dflash_local.kernels.jit import jit, runs_kernels, tl

DECODED_SLICE = 2**25  # numbers that are decoded at a time
PROGRAM_WORDS = 1024  # of codes that a program decodes: two loads of 16 bytes for each thread
NUM_WARPS = 4


def decode(weight: FragmentWeight, rows: slice, out: torch.Tensor) -> torch.Tensor:
    """What some rows of a weight stand for, in the dtype of ``out``.

    Args:
        rows: from a tile's first to a tile's last or the weight's. out: [>= n, K] contiguous; its first n are written.
    """
    begin, end, _ = rows.indices(weight.shape[0])
    part = out[: end - begin]
    if not runs_kernels(weight):
        return part.copy_(weight.dequantized(rows))
    kind, steps = weight.format, weight.codes.shape[1]
    scales = weight.scales.view(torch.uint8) if weight.scales.dtype == torch.float8_e4m3fn else weight.scales
    row_scales = scales if kind.block is None else weight.row_scales
    grid = (-(-(end - begin) // TILE_N), -(-steps * kind.step_words // PROGRAM_WORDS))
    _decode_kernel[grid](
        weight.codes, scales, scales if weight.zeros is None else weight.zeros,
        scales if row_scales is None else row_scales, part, begin // TILE_N, weight.shape[0], weight.shape[1], steps,
        scales.shape[-1], **constants(kind), num_warps=NUM_WARPS,
    )  # fmt: skip
    return part


def constants(kind: FragmentFormat) -> dict[str, Any]:
    """What the kernel is compiled for."""
    fields = NIBBLES.get(kind.codes, ())
    places = [sum(place << 8 * operand for operand, place in enumerate(field[2])) for field in fields]
    return {
        "CODES": kind.codes,
        "PLACES": places[0] if places else 0,
        "SIGN_PLACES": places[-1] if places else 0,
        "STEP_WORDS": kind.step_words,
        "BLOCK_ROWS": kind.block[0] if kind.block else 0,
        "GROUP_STEPS": kind.group_steps,
        "STEP_GROUP": kind.step_group,
        "BY_HALVES": kind.step_group == HALF_OF_LANES,
        "HAS_ZEROS": kind.zeros,
        "E4M3_SCALES": kind.scales == torch.float8_e4m3fn,
        "HAS_ROW_SCALES": kind.block is None or kind.row_scales,
        "WORDS": PROGRAM_WORDS,
    }


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


# fmt: off
@jit
def _decode_kernel(
    codes, scales, zeros, row_scales, out, first_tile, features, in_features, steps, scale_columns,
    CODES: tl.constexpr, PLACES: tl.constexpr, SIGN_PLACES: tl.constexpr, STEP_WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, GROUP_STEPS: tl.constexpr, STEP_GROUP: tl.constexpr, BY_HALVES: tl.constexpr,
    HAS_ZEROS: tl.constexpr, E4M3_SCALES: tl.constexpr, HAS_ROW_SCALES: tl.constexpr, WORDS: tl.constexpr,
):
    # fmt: on
    # One program: WORDS words, which lie together, of a tile of 16 features. A run is eight columns of features g and
    # g + 8 (``fragment_packing``): words that a thread loads at once, and two stores of 16 bytes. Four neighbours (of
    # four bits: every other one) fill 64 bytes of a row of the result. Scales are found once for a run.
    tile = (tl.program_id(0) + first_tile).to(tl.int64)
    RUN_WORDS: tl.constexpr = STEP_WORDS // 128
    GROUPS: tl.constexpr = 128 // STEP_GROUP
    run = tl.program_id(1) * (WORDS // RUN_WORDS) + tl.arange(0, WORDS // RUN_WORDS)
    step = run // 128
    inside = step < steps
    words = run[:, None] * RUN_WORDS + tl.arange(0, RUN_WORDS)[None, :]
    packed = tl.load(codes + tile * steps * STEP_WORDS + words, mask=inside[:, None], other=0)
    lane = run // 2 if RUN_WORDS == 2 else run
    k32 = run // 64 % 2 * 2 + run % 2 if RUN_WORDS == 2 else run // 32 % 4
    g, t = lane // 4 % 8, lane % 4
    column = step * 128 + k32 * 32 + t * 8
    block_scale = tl.full([WORDS // RUN_WORDS], 1.0, tl.float32)
    if BLOCK_ROWS > 1:
        at = (tile * 16 // BLOCK_ROWS) * scale_columns + step // GROUP_STEPS
        block_scale = tl.load(scales + at, mask=inside, other=0).to(tl.float32)
    for h in tl.static_range(2):
        scale, row_scale = block_scale, tl.full([WORDS // RUN_WORDS], 1.0, tl.float32)
        zero = tl.full([WORDS // RUN_WORDS], 8.0 if CODES == "int4" else 0.0, tl.float32)
        if BLOCK_ROWS == 1:
            group = t // 2 * 4 + k32 if BY_HALVES else column % 128 // STEP_GROUP
            wide_steps = (steps + GROUP_STEPS - 1) // GROUP_STEPS
            at = (((tile * wide_steps + step // GROUP_STEPS) * 8 + g) * GROUPS + group) * 2 + h
            scale = _scale(tl.load(scales + at, mask=inside, other=0), E4M3_SCALES)
            if HAS_ZEROS:
                zero = tl.load(zeros + at, mask=inside, other=0).to(tl.float32)
                zero = zero if CODES == "int4" else zero - 128
        row = tl.program_id(0) * 16 + g + 8 * h
        is_row = first_tile * 16 + row < features
        if HAS_ROW_SCALES:
            row_scale = tl.load(row_scales + first_tile * 16 + row, mask=is_row, other=0).to(tl.float32)
        if RUN_WORDS == 2:
            even = tl.join(
                _value(packed, CODES, PLACES, SIGN_PLACES, h, 0), _value(packed, CODES, PLACES, SIGN_PLACES, h + 2, 0)
            )
            odd = tl.join(
                _value(packed, CODES, PLACES, SIGN_PLACES, h, 1), _value(packed, CODES, PLACES, SIGN_PLACES, h + 2, 1)
            )
            decoded = tl.join(even, odd)
        else:
            decoded = tl.join(
                _value(packed, CODES, PLACES, SIGN_PLACES, h, 0), _value(packed, CODES, PLACES, SIGN_PLACES, h, 1)
            )
        values = tl.reshape(decoded, [WORDS // RUN_WORDS, 8])
        values = (values - zero[:, None]) * scale[:, None] * row_scale[:, None]
        place = (row.to(tl.int64) * in_features + column)[:, None] + tl.arange(0, 8)[None, :]
        stored = is_row & (column < in_features)
        tl.store(out + place, values.to(out.dtype.element_ty), mask=stored[:, None])


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
