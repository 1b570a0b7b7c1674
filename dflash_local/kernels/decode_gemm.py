"""Products of a few rows with a quantised weight in Triton: decoded in registers, multiplied, in one fixed order.

For any packed format and shape where ``fragment_gemm`` cannot be compiled or is not right; slow, for its decoding.
"""

from __future__ import annotations

import torch

from dflash_local.kernels import fragment_gemm
from dflash_local.kernels.fragment_decode import decoded_runs, load_runs, tile_constants, tile_operands
from dflash_local.kernels.fragment_packing import FragmentWeight
from dflash_local.kernels.jit import jit, power_of_two, runs_kernels, tl
from dflash_local.kernels.skinny_gemm import MIN_ROWS, gated, row_stride


def linear(
    x: torch.Tensor, weight: FragmentWeight, out: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute ``out`` [M, N] = x @ weight.T (+ residual), rounded once, M <= 64; ``out`` may be ``residual``."""
    if not runs_kernels(x):
        return fragment_gemm.linear_reference(x, weight, out, residual)
    fragment_gemm.multiply_tail(x, weight, out, residual)
    rows, features, columns = len(x), weight.coded_rows, weight.shape[1]
    tiles, steps = weight.codes.shape[:2]
    _linear_kernel[(tiles,)](
        x, *tile_operands(weight), out, out if residual is None else residual, rows, features, columns, x.stride(0),
        row_stride(out, residual), steps, weight.scales.shape[-1], **tile_constants(weight.format),
        BLOCK_M=max(MIN_ROWS, power_of_two(rows)), ADD=residual is not None, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def swiglu(x: torch.Tensor, weight: FragmentWeight, out: torch.Tensor) -> torch.Tensor:
    """Compute ``out`` [M, I] = silu(x @ gate.T) * (x @ up.T), each rounded; ``weight``: [2 I, K], the gate first."""
    return gated(linear(x, weight, x.new_empty(len(x), weight.shape[0])), out)


# fmt: off
@jit
def _linear_kernel(
    x, codes, scales, zeros, row_scales, out, residual, rows, features, columns, x_stride, out_stride, steps,
    scale_columns, CODES: tl.constexpr, PLACES: tl.constexpr, SIGN_PLACES: tl.constexpr, RUN_WORDS: tl.constexpr,
    ABOVE: tl.constexpr, BLOCK_ROWS: tl.constexpr, GROUP_STEPS: tl.constexpr, STEP_GROUP: tl.constexpr,
    BY_HALVES: tl.constexpr, ORDERED: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINIMA: tl.constexpr,
    NESTED: tl.constexpr, E4M3_SCALES: tl.constexpr, HAS_ROW_SCALES: tl.constexpr, BLOCK_M: tl.constexpr,
    ADD: tl.constexpr,
):
    # fmt: on
    # One program: all rows [BLOCK_M] of one tile of 16 features. Its steps of 128 columns are decoded to [16, 128] one
    # after the other and multiplied with that part of x; the sums [16, BLOCK_M] stay in registers.
    tile = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, 128)
    total = tl.zeros((16, BLOCK_M), tl.float32)
    for step in range(steps):
        packed, above, g, inner = load_runs(codes, tile, step, steps, RUN_WORDS, ABOVE, 128, 1, False, False)
        upper = decoded_runs(
            packed, above, g, inner, scales, zeros, row_scales, tile, step, features, steps, scale_columns, 0, CODES,
            PLACES, SIGN_PLACES, RUN_WORDS, ABOVE, BLOCK_ROWS, GROUP_STEPS, STEP_GROUP, BY_HALVES, ORDERED, HAS_ZEROS,
            HAS_MINIMA, NESTED, E4M3_SCALES, HAS_ROW_SCALES, 128, False,
        )  # fmt: skip
        lower = decoded_runs(
            packed, above, g, inner, scales, zeros, row_scales, tile, step, features, steps, scale_columns, 1, CODES,
            PLACES, SIGN_PLACES, RUN_WORDS, ABOVE, BLOCK_ROWS, GROUP_STEPS, STEP_GROUP, BY_HALVES, ORDERED, HAS_ZEROS,
            HAS_MINIMA, NESTED, E4M3_SCALES, HAS_ROW_SCALES, 128, False,
        )  # fmt: skip
        both = tl.join(_by_feature(upper, RUN_WORDS, ORDERED), _by_feature(lower, RUN_WORDS, ORDERED))
        value = tl.reshape(tl.permute(both, (2, 0, 1)), [16, 128])
        k = step * 128 + column
        inside = (row < rows)[None, :] & (k < columns)[:, None]
        right = tl.load(x + row[None, :] * x_stride + k[:, None], mask=inside, other=0.0)
        total = tl.dot(value.to(x.dtype.element_ty), right, total, input_precision="ieee")
    kind = out.dtype.element_ty
    feature = tile * 16 + tl.arange(0, 16)
    inside = (feature < features)[:, None] & (row < rows)[None, :]
    place = row[None, :] * out_stride + feature[:, None]
    if ADD:
        # Rounded before the sum, as a layer whose output is added to the residual would be.
        total = total.to(kind).to(tl.float32) + tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(kind), mask=inside)


@jit
def _by_feature(runs, RUN_WORDS: tl.constexpr, ORDERED: tl.constexpr):
    """Return eight features [8, 128] of a step's runs."""
    if ORDERED:  # 64 columns, g, t, half of them, 16 of that
        ordered = tl.permute(tl.reshape(runs, [2, 8, 4, 2, 2, 4]), (1, 0, 3, 4, 2, 5))
    elif RUN_WORDS == 2:
        ordered = tl.permute(tl.reshape(runs, [2, 8, 4, 2, 8]), (1, 0, 3, 2, 4))  # 64 columns, g, t, half of them
    else:
        ordered = tl.permute(tl.reshape(runs, [4, 8, 4, 8]), (1, 0, 2, 3))  # 32 columns, g, t
    return tl.reshape(ordered, [8, 128])
