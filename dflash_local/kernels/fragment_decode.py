"""Rows of a packed quantised weight as plain numbers, for products with many rows: one pass over the codes.

A prompt's chunk has enough rows to pay for it: the codes are read once, the numbers written and read once more.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from dflash_local.kernels import fragment_gemm
from dflash_local.kernels.fragment_order import NIBBLES, Codes
from dflash_local.kernels.fragment_packing import STEP_K, TILE_N, FragmentFormat, FragmentWeight
from dflash_local.kernels.jit import jit, runs_kernels, tl
from dflash_local.kernels.skinny_gemm import multiply
from dflash_local.kernels.split_kv import device_properties
from dflash_local.layout.linear import DECODED_SLICE

STEP_RUNS = 128  # of eight columns of two features
FP8_LOAD_CAPABILITY = (8, 9)  # from which compute capability a load can be told that its bytes are float8_e4m3fn
ABOVE: dict[Codes, int] = {"int5": 1, "int6": 2}  # bits of a code above four, which lie behind those of a step
MAX_GRID_Y = 65535  # programs along the second axis of a grid
GEMM_TILE = 256  # rows of a weight that a tile of torch's product may take: slices of whole tiles leave none half empty


class LaunchConfig(NamedTuple):
    """Describe how ``decode`` is launched; results do not depend on it.

    Attributes:
        steps: of 128 columns of a tile that one program decodes, a power of two.
        across: neighbouring 32 columns that lanes of a warp store together: 1, 2 or 4, filling 64, 128 or 256 bytes of
            a row. Runs of four bits always fill 128.
        along_k: programs that follow each other decode a tile's columns; else the same columns of all tiles.
        last_first: the last tile is decoded first, and the product begins with what was written last.
        streamed: the cache drops codes first, since they are read once, and keeps what is decoded.
        native: e4m3 is converted by an instruction where the card has one; other cards take NaN for 480.
    """

    steps: int = 4
    num_warps: int = 4
    across: int = 4
    along_k: bool = True
    last_first: bool = True
    streamed: bool = True
    native: bool = True


CONFIG = LaunchConfig()


def decode(
    weight: FragmentWeight,
    rows: slice,
    out: torch.Tensor,
    config: LaunchConfig | None = None,
    taken: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode coded rows, from a tile's first to a tile's last or the end, to the first of ``out`` [>= n, K].

    Args:
        taken: [E + 1] int32, of a weight that is E matrices one below the other. A kernel leaves out matrix e where
            the numbers e and e + 1 are equal.
    """
    begin, end, _ = rows.indices(weight.coded_rows)
    part = out[: end - begin]
    if not runs_kernels(weight):
        return part.copy_(weight.dequantized(rows))
    config = config or CONFIG
    steps, tiles = weight.steps, -(-(end - begin) // TILE_N)
    pieces = -(-steps // config.steps)
    codes, *scales = tile_operands(weight)
    if config.native and weight.format.codes == "e4m3":
        if device_properties(weight.device).compute_capability >= FP8_LOAD_CAPABILITY:
            codes = codes.view(torch.float8_e4m3fn)
    along_k = config.along_k and tiles <= MAX_GRID_Y
    matrix_tiles = 0 if taken is None else weight.coded_rows // (len(taken) - 1) // TILE_N
    _decode_kernel[(pieces, tiles) if along_k else (tiles, pieces)](
        codes, *scales, part, codes if taken is None else taken, begin // TILE_N, weight.coded_rows, weight.shape[1],
        steps, weight.scales.shape[-1], matrix_tiles,
        **_constants(weight.format, weight.coded_rows, weight.shape[1], config, along_k), num_warps=config.num_warps,
        enable_fp_fusion=not weight.format.minima,  # which are added to what was rounded
    )  # fmt: skip
    return part


def gather(weight: FragmentWeight, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write row ``ids[i]`` of what a weight stands for to ``out[i]`` [M, K]; ids [M] int64 on the device."""
    if not runs_kernels(weight):
        for row, id_ in zip(out, ids.tolist(), strict=True):
            first = id_ // TILE_N * TILE_N
            row.copy_(weight.dequantized(slice(first, first + TILE_N))[id_ - first])
        return out
    steps = weight.steps
    pieces = -(-steps // CONFIG.steps)
    _gather_kernel[(pieces, len(ids))](
        *tile_operands(weight), ids, out, weight.coded_rows, weight.shape[1], steps, weight.scales.shape[-1],
        **tile_constants(weight.format), RUNS=CONFIG.steps * STEP_RUNS, num_warps=CONFIG.num_warps,
        enable_fp_fusion=not weight.format.minima,
    )  # fmt: skip
    return out


def linear(x: torch.Tensor, weight: FragmentWeight, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x`` [M, K] ``@ weight.T`` of many rows, or ``residual`` with that added, a slice of it at a time."""
    n, k = weight.coded_rows, weight.shape[1]
    step = slice_rows(n, k)
    out = x.new_empty(len(x), weight.shape[0]) if residual is None else residual
    room = x.new_empty(min(step, n), k)
    for begin in range(0, n, step):
        rows = slice(begin, min(begin + step, n))
        multiply(x, decode(weight, rows, room), out[:, rows], residual is not None)
    fragment_gemm.multiply_tail(x, weight, out, residual)
    return out


def slice_rows(n: int, k: int) -> int:
    """Count rows of a weight [N, K] that are decoded at a time, so that slices are of about one size."""
    most = max(TILE_N, DECODED_SLICE // k)
    unit = GEMM_TILE if most >= GEMM_TILE else TILE_N
    most = most // unit * unit
    slices = -(-n // most)
    return -(-n // (slices * unit)) * unit


def tile_operands(weight: FragmentWeight) -> tuple[torch.Tensor, ...]:
    """Return codes, scales, zero points and row scales, as ``load_runs`` and ``decoded_runs`` take them."""
    scales = weight.scales.view(torch.uint8) if weight.scales.dtype == torch.float8_e4m3fn else weight.scales
    row_scales = scales if weight.row_scales is None else weight.row_scales
    return weight.codes, scales, scales if weight.zeros is None else weight.zeros, row_scales


@cache  # hundreds of launches a chunk, and a host that is late leaves the card waiting
def _constants(kind: FragmentFormat, n: int, k: int, config: LaunchConfig, along_k: bool) -> dict[str, Any]:
    return {**tile_constants(kind), **launch_constants(n, k, config._replace(along_k=along_k))}


def launch_constants(n: int, k: int, config: LaunchConfig) -> dict[str, Any]:
    """Return what ``decode``'s kernel is compiled for beside ``tile_constants``, of ``n`` rows of ``k`` columns."""
    steps = -(-k // STEP_K)
    return {
        "RUNS": config.steps * STEP_RUNS,
        "ACROSS": config.across,
        "ALONG_K": config.along_k,
        "LAST_FIRST": config.last_first,
        "STREAMED": config.streamed,
        "WHOLE": n % TILE_N == 0 and k % STEP_K == 0 and steps % config.steps == 0,
    }


def tile_constants(kind: FragmentFormat) -> dict[str, Any]:
    fields = NIBBLES.get(kind.codes, ())
    places = [sum(place << 8 * operand for operand, place in enumerate(field[2])) for field in fields]
    return {
        "CODES": kind.codes,
        "PLACES": places[0] if places else 0,
        "SIGN_PLACES": places[-1] if places else 0,
        "RUN_WORDS": (4 if kind.codes in NIBBLES else kind.bits) // 2,
        "ABOVE": ABOVE.get(kind.codes, 0),
        "BLOCK_ROWS": kind.block[0] if kind.block else 0,
        "GROUP_STEPS": kind.group_steps,
        "STEP_GROUP": kind.step_group,
        "BY_HALVES": kind.by_halves,
        "ORDERED": kind.ordered,
        "HAS_ZEROS": kind.zeros,
        "HAS_MINIMA": kind.minima,
        "NESTED": kind.nested,
        "E4M3_SCALES": kind.scales == torch.float8_e4m3fn,
        "HAS_ROW_SCALES": kind.block is None or kind.row_scales,
    }


# fmt: off
@jit
def _decode_kernel(
    codes, scales, zeros, row_scales, out, taken, first_tile, features, in_features, steps, scale_columns,
    MATRIX_TILES: tl.constexpr,
    CODES: tl.constexpr, PLACES: tl.constexpr, SIGN_PLACES: tl.constexpr, RUN_WORDS: tl.constexpr,
    ABOVE: tl.constexpr, BLOCK_ROWS: tl.constexpr, GROUP_STEPS: tl.constexpr, STEP_GROUP: tl.constexpr,
    BY_HALVES: tl.constexpr, ORDERED: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINIMA: tl.constexpr,
    NESTED: tl.constexpr, E4M3_SCALES: tl.constexpr, HAS_ROW_SCALES: tl.constexpr, RUNS: tl.constexpr,
    ACROSS: tl.constexpr, ALONG_K: tl.constexpr, LAST_FIRST: tl.constexpr, STREAMED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    # fmt: on
    # One program: RUNS runs, whose codes lie together, of a tile of 16 features. A thread loads a run's words at once
    # and stores 16 bytes of either feature. Four lanes fill 64 bytes of a row; ACROSS times as many take the columns
    # next to them, so that a warp stores whole lines of the cache, and loads no more lines than in the codes' order.
    # Programs are numbered along K first: those that run together read codes that lie together, and write whole rows.
    # A run's scales are found once; all is loaded before anything is stored.
    # WHOLE: nothing is ragged, and no program reaches behind the last step.
    if ALONG_K:
        piece, local, tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    else:
        piece, local, tiles = tl.program_id(1), tl.program_id(0), tl.num_programs(0)
    if LAST_FIRST:
        local = tiles - 1 - local
    tile = (local + first_tile).to(tl.int64)
    if MATRIX_TILES > 0:
        matrix = taken + tile // MATRIX_TILES
        if tl.load(matrix) == tl.load(matrix + 1):
            return
    first = piece * (RUNS // 128)
    packed, above, g, column = load_runs(codes, tile, first, steps, RUN_WORDS, ABOVE, RUNS, ACROSS, STREAMED, WHOLE)
    upper = decoded_runs(
        packed, above, g, column, scales, zeros, row_scales, tile, first, features, steps, scale_columns, 0, CODES,
        PLACES, SIGN_PLACES, RUN_WORDS, ABOVE, BLOCK_ROWS, GROUP_STEPS, STEP_GROUP, BY_HALVES, ORDERED, HAS_ZEROS,
        HAS_MINIMA, NESTED, E4M3_SCALES, HAS_ROW_SCALES, RUNS, WHOLE,
    )  # fmt: skip
    lower = decoded_runs(
        packed, above, g, column, scales, zeros, row_scales, tile, first, features, steps, scale_columns, 1, CODES,
        PLACES, SIGN_PLACES, RUN_WORDS, ABOVE, BLOCK_ROWS, GROUP_STEPS, STEP_GROUP, BY_HALVES, ORDERED, HAS_ZEROS,
        HAS_MINIMA, NESTED, E4M3_SCALES, HAS_ROW_SCALES, RUNS, WHOLE,
    )  # fmt: skip
    # What differs between a thread's runs is known when it is compiled: one address serves all of them.
    corner = out + local.to(tl.int64) * 16 * in_features + first * 128
    places = corner + (g * in_features)[:, None] + columns_of(column, ORDERED)
    inside = (first * 128 + column < in_features) | WHOLE
    row = tile * 16 + g
    tl.store(places, upper.to(out.dtype.element_ty), mask=(inside & ((row < features) | WHOLE))[:, None])
    places += 8 * in_features
    tl.store(places, lower.to(out.dtype.element_ty), mask=(inside & ((row + 8 < features) | WHOLE))[:, None])


# fmt: off
@jit
def _gather_kernel(
    codes, scales, zeros, row_scales, ids, out, features, in_features, steps, scale_columns,
    CODES: tl.constexpr, PLACES: tl.constexpr, SIGN_PLACES: tl.constexpr, RUN_WORDS: tl.constexpr,
    ABOVE: tl.constexpr, BLOCK_ROWS: tl.constexpr, GROUP_STEPS: tl.constexpr, STEP_GROUP: tl.constexpr,
    BY_HALVES: tl.constexpr, ORDERED: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINIMA: tl.constexpr,
    NESTED: tl.constexpr, E4M3_SCALES: tl.constexpr, HAS_ROW_SCALES: tl.constexpr, RUNS: tl.constexpr,
):
    # fmt: on
    # One program: RUNS runs of the tile that holds a row. The tile's other rows are read and decoded for nothing, which
    # takes less than a microsecond of a block's few rows.
    place, first = tl.program_id(1), tl.program_id(0) * (RUNS // 128)
    row = tl.load(ids + place)
    tile = row // 16
    packed, above, g, column = load_runs(codes, tile, first, steps, RUN_WORDS, ABOVE, RUNS, 1, False, False)
    upper = decoded_runs(
        packed, above, g, column, scales, zeros, row_scales, tile, first, features, steps, scale_columns, 0, CODES,
        PLACES, SIGN_PLACES, RUN_WORDS, ABOVE, BLOCK_ROWS, GROUP_STEPS, STEP_GROUP, BY_HALVES, ORDERED, HAS_ZEROS,
        HAS_MINIMA, NESTED, E4M3_SCALES, HAS_ROW_SCALES, RUNS, False,
    )  # fmt: skip
    lower = decoded_runs(
        packed, above, g, column, scales, zeros, row_scales, tile, first, features, steps, scale_columns, 1, CODES,
        PLACES, SIGN_PLACES, RUN_WORDS, ABOVE, BLOCK_ROWS, GROUP_STEPS, STEP_GROUP, BY_HALVES, ORDERED, HAS_ZEROS,
        HAS_MINIMA, NESTED, E4M3_SCALES, HAS_ROW_SCALES, RUNS, False,
    )  # fmt: skip
    values = tl.where(row % 16 >= 8, lower, upper)
    places = out + place.to(tl.int64) * in_features + first * 128 + columns_of(column, ORDERED)
    wanted = (g == row % 8) & (first * 128 + column < in_features)
    tl.store(places, values.to(out.dtype.element_ty), mask=wanted[:, None])


# fmt: off
@jit
def load_runs(
    codes, tile, first, steps, RUN_WORDS: tl.constexpr, ABOVE: tl.constexpr, RUNS: tl.constexpr, ACROSS: tl.constexpr,
    STREAMED: tl.constexpr, WHOLE: tl.constexpr,
):
    # fmt: on
    """Return codes of some runs of a tile from a step on, and words of what they have above four bits; g of each run,
    and its first column from that step's on, see ``columns_of``.

    A run is eight columns of features g and g + 8 (``fragment_order``). A step of 128 columns has 128 of them. Codes
    are words [RUNS, RUN_WORDS], or bytes [RUNS, 16] where e4m3 is read as such. ACROSS: see ``LaunchConfig``; 1 is the
    order in memory. WHOLE: no run lies behind the last step.
    """
    run = tl.arange(0, RUNS)
    if RUN_WORDS == 2:  # of 64 columns: g, t, half of the columns
        g, t, k32 = run // 8 % 8, run // 2 % 4, run // 64 % 2 * 2 + run % 2
    else:
        g, t, k32 = run // (4 * ACROSS) % 8, run % 4, run // (32 * ACROSS) % (4 // ACROSS) * ACROSS + run // 4 % ACROSS
        run = run // 128 * 128 + k32 * 32 + g * 4 + t
    OF_RUN: tl.constexpr = RUN_WORDS if codes.dtype.element_ty == tl.int32 else 4 * RUN_WORDS
    OF_STEP: tl.constexpr = 128 * OF_RUN + 64 * ABOVE
    begin = codes + (tile * steps + first) * OF_STEP
    inside = (first + run // 128 < steps) | WHOLE
    POLICY: tl.constexpr = "evict_first" if STREAMED else ""
    step = begin + run // 128 * OF_STEP
    if ABOVE == 0:
        places = begin + run[:, None] * OF_RUN + tl.arange(0, OF_RUN)[None, :]
    else:
        places = step[:, None] + (run % 128)[:, None] * OF_RUN + tl.arange(0, OF_RUN)[None, :]
    packed = tl.load(places, mask=inside[:, None], eviction_policy=POLICY)
    above = g
    if ABOVE > 0:  # a lane's words are of 64 or 32 columns
        place = step + 128 * OF_RUN + (g * 4 + t) * (2 * ABOVE) + k32 * ABOVE // 2
        above = tl.load(place, mask=inside, eviction_policy=POLICY)
    if ABOVE == 1:
        above = above >> k32 % 2 * 8
    return packed, above, g, run // 128 * 128 + k32 * 32 + t * 8


@jit
def columns_of(column, ORDERED: tl.constexpr):
    """Return the columns of the eight codes of runs by their first columns [RUNS], ORDERED or not: [RUNS, 8]."""
    place = tl.arange(0, 8)[None, :]
    if ORDERED:  # four, and those 16 further
        return (column - column % 32 // 2)[:, None] + place % 4 + place // 4 * 16
    else:
        return column[:, None] + place


# fmt: off
@jit
def decoded_runs(
    packed, above, g, column, scales, zeros, row_scales, tile, first, features, steps, scale_columns, h: tl.constexpr,
    CODES: tl.constexpr, PLACES: tl.constexpr, SIGN_PLACES: tl.constexpr, RUN_WORDS: tl.constexpr, ABOVE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, GROUP_STEPS: tl.constexpr, STEP_GROUP: tl.constexpr, BY_HALVES: tl.constexpr,
    ORDERED: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINIMA: tl.constexpr, NESTED: tl.constexpr,
    E4M3_SCALES: tl.constexpr, HAS_ROW_SCALES: tl.constexpr, RUNS: tl.constexpr, WHOLE: tl.constexpr,
):
    # fmt: on
    """Decode runs of ``load_runs`` in feature g + 8 h to [RUNS, 8] float32; scales are found once for a run."""
    inside = (first + column // 128 < steps) | WHOLE
    if packed.dtype == tl.float8e4nv:
        lower, upper = tl.split(tl.reshape(packed.to(tl.float32), [RUNS, 8, 2]))
        values = lower if h == 1 else upper
    elif RUN_WORDS == 2:
        even = tl.join(
            _value(packed, above, CODES, PLACES, SIGN_PLACES, ABOVE, h, 0),
            _value(packed, above, CODES, PLACES, SIGN_PLACES, ABOVE, h + 2, 0),
        )
        odd = tl.join(
            _value(packed, above, CODES, PLACES, SIGN_PLACES, ABOVE, h, 1),
            _value(packed, above, CODES, PLACES, SIGN_PLACES, ABOVE, h + 2, 1),
        )
        values = tl.reshape(tl.join(even, odd), [RUNS, 8])
    else:
        even = _value(packed, above, CODES, PLACES, SIGN_PLACES, ABOVE, h, 0)
        odd = _value(packed, above, CODES, PLACES, SIGN_PLACES, ABOVE, h, 1)
        values = tl.reshape(tl.join(even, odd), [RUNS, 8])
    GROUPS: tl.constexpr = 128 // STEP_GROUP
    if GROUP_STEPS == 1:
        first_scale, scale = first, column // 128
    else:
        first_scale, scale = 0, (first + column // 128) // GROUP_STEPS
    factor, factor_of_minima = 1.0, 1.0
    if NESTED:
        FACTORS: tl.constexpr = 2 if HAS_MINIMA else 1
        block = tile * ((steps + 1) // 2) + (first + column // 128) // 2
        place = row_scales + (block * 16 + g * 2 + h) * FACTORS
        factor = tl.load(place, mask=inside, other=0).to(tl.float32)
        if HAS_MINIMA:
            factor_of_minima = -tl.load(place + 1, mask=inside, other=0).to(tl.float32)
    if ORDERED:  # two groups of a run
        group = (column % 128 // 32 * 2)[:, None] + tl.arange(0, 2)[None, :]
        place = scales + (tile * steps + first) * (16 * GROUPS) + h
        place = place + (((column // 128 * 8 + g) * GROUPS)[:, None] + group) * 2
        scale = tl.load(place, mask=inside[:, None], other=0).to(tl.float32) * factor[:, None]  # type: ignore[index]
        values = tl.reshape(tl.reshape(values - 32, [RUNS, 2, 4]) * scale[:, :, None], [RUNS, 8])
    elif BLOCK_ROWS == 1:
        group = column % 32 // 16 * 4 + column % 128 // 32 if BY_HALVES else column % 128 // STEP_GROUP
        begin = (tile * ((steps + GROUP_STEPS - 1) // GROUP_STEPS) + first_scale) * (16 * GROUPS) + h
        at = ((scale * 8 + g) * GROUPS + group) * 2
        if HAS_ZEROS:
            zero = tl.load(zeros + begin + at, mask=inside, other=0).to(tl.float32)
            values -= (zero if CODES == "int4" else zero - 128)[:, None]
        elif not HAS_MINIMA and (CODES == "int4" or CODES == "int5"):
            values -= 8 if CODES == "int4" else 16
        scale = _scale(tl.load(scales + begin + at, mask=inside, other=0), E4M3_SCALES, NESTED)
        values *= (scale * factor)[:, None]
        if HAS_MINIMA:
            minimum = tl.load(zeros + begin + at, mask=inside, other=0).to(tl.float32)
            values += (minimum * factor_of_minima)[:, None]
    elif BLOCK_ROWS > 1:
        begin = tile * 16 // BLOCK_ROWS * scale_columns + first_scale
        values *= tl.load(scales + begin + scale, mask=inside, other=0).to(tl.float32)[:, None]
    if HAS_ROW_SCALES:
        begin = tile * 16 + 8 * h
        real = (begin + g < features) | WHOLE
        values *= tl.load(row_scales + begin + g, mask=real, other=0).to(tl.float32)[:, None]
    return values


# fmt: off
@jit
def _value(
    word, above, CODES: tl.constexpr, PLACES: tl.constexpr, SIGN_PLACES: tl.constexpr, ABOVE: tl.constexpr,
    OPERAND: tl.constexpr, ELEMENT: tl.constexpr,
):
    # fmt: on
    """Return a code of a word as float32; OPERAND: h of a byte, h + 2 pair of four bits."""
    PLACE: tl.constexpr = ((PLACES >> 8 * OPERAND) & 255) + (4 if CODES == "iq4" else 16) * ELEMENT
    SIGN: tl.constexpr = ((SIGN_PLACES >> 8 * OPERAND) & 255) + 16 * ELEMENT
    BYTE: tl.constexpr = 2 * ELEMENT + 1 - OPERAND
    if CODES == "int4":
        return ((word >> PLACE) & 15).to(tl.float32)
    elif ABOVE > 0:
        place = ABOVE * (tl.arange(0, 2) * 4 + OPERAND) + 16 * ELEMENT  # of either half of a run
        upper = (above[:, None] >> place[None, :]) & ((1 << ABOVE) - 1)
        return (((word >> PLACE) & 15) | (upper << 4)).to(tl.float32)
    elif CODES == "iq4":
        code = (word >> PLACE) & 15
        # Bytes of quantized_weight.IQ4, the first in the lowest.
        values = tl.where(code < 8, -654466911485192063, 8167635493787864321)
        byte = values >> ((code & 7) * 8).to(tl.int64)
        return ((byte << 56) >> 56).to(tl.float32)
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
def _scale(raw, E4M3_SCALES: tl.constexpr, NESTED: tl.constexpr):
    """Return a scale as float32; bytes are powers of two, e4m3 without a sign, or whole numbers."""
    if raw.dtype != tl.uint8 or NESTED:
        return raw.to(tl.float32)
    elif E4M3_SCALES:
        return (raw.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    else:
        bits = tl.where(raw == 0, 1 << 22, raw.to(tl.int32) << 23)  # 2^-127 has no leading one
        return bits.to(tl.float32, bitcast=True)
