"""Products of a few rows with a large weight matrix: every byte of the weight is read once, in order.

Configurations are chosen by measurement (``models.fused.kernel_choice``). Sums are float32 over all of K in one
program, so a row's result does not depend on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dflash_local.kernels.jit import jit, power_of_two, runs_kernels, tl

MAX_ROWS = 64
MIN_ROWS = 16  # what a tensor core takes at least
GATED_BLOCK = 1024  # columns of a program that multiplies gates
RESERVED_SHARED_MEMORY = 1024  # bytes of each program's that the system keeps


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """The kernel configuration of one product: a program's tile of N, its step along K, its pipeline and its warps."""

    block_n: int = 32
    block_k: int = 128
    num_stages: int = 4
    num_warps: int = 4

    def fits(self, out_features: int, in_features: int) -> bool:
        """Return True when it divides a weight of that shape."""
        return out_features % self.block_n == 0 and in_features % self.block_k == 0


def linear(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, config: GemmConfig, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute ``out = x @ weight.T (+ residual)``, rounded once.

    Args:
        x: [M, K], M <= 64. weight: [N, K]. out: [M, N], perhaps a part of wider rows; may be ``residual``.
    """
    if not runs_kernels(x):
        return linear_reference(x, weight, out, residual)
    rows = x.shape[0]
    _linear_kernel[(weight.shape[0] // config.block_n,)](
        x, weight, out, out if residual is None else residual, rows, row_stride(out, residual), x.shape[1],
        max(MIN_ROWS, power_of_two(rows)), config.block_n, config.block_k, residual is not None,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def row_stride(out: torch.Tensor, residual: torch.Tensor | None) -> int:
    """Count numbers from a row to the next one, of both."""
    if residual is not None and residual.stride(0) != out.stride(0):
        raise ValueError("the residual's rows do not lie as the result's do")
    return out.stride(0)


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the same in plain PyTorch."""
    product = F.linear(x, weight)
    return out.copy_(product if residual is None else residual + product)


def multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, add: bool) -> torch.Tensor:
    """Compute ``out = x @ weight.T``, or add that to ``out``, for many rows by the library."""
    return torch.addmm(out, x, weight.t(), out=out) if add else torch.mm(x, weight.t(), out=out)


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor, config: GemmConfig) -> torch.Tensor:
    """Compute ``out`` [M, I] = silu(x @ gate.T) * (x @ up.T), each rounded; ``gate_up``: [2 I, K], gate first."""
    if not runs_kernels(x):
        return swiglu_reference(x, gate_up, out)
    rows, intermediate_size = x.shape[0], out.shape[1]
    _swiglu_kernel[(intermediate_size // config.block_n,)](
        x, gate_up, out, rows, intermediate_size, x.shape[1], max(MIN_ROWS, power_of_two(rows)), config.block_n,
        config.block_k, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def swiglu_reference(x: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Compute the same in plain PyTorch."""
    return gated(F.linear(x, gate_up), out)


def gated(products: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Compute ``out`` [M, I] = silu(gate) * up of ``products`` [M, 2 I], the gate's columns first, which may be
    written over.
    """
    if not runs_kernels(products):
        gate, up = products.chunk(2, -1)
        return torch.mul(F.silu(gate, inplace=True), up, out=out)
    rows, width = out.shape
    strides = products.stride(0), out.stride(0)
    _gated_kernel[(rows, -(-width // GATED_BLOCK))](products, out, *strides, width, GATED_BLOCK, num_warps=4)
    return out


@jit
def _gated_kernel(products, out, products_stride, out_stride, width, BLOCK: tl.constexpr):
    # One program: BLOCK numbers of a row. silu is rounded before the product, as the library rounds it.
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = products + row * products_stride + column
    gate = tl.load(place, mask=inside, other=0.0)
    up = tl.load(place + width, mask=inside, other=0.0).to(tl.float32)
    x = gate.to(tl.float32)
    opened = (x / (1.0 + tl.exp(-x))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * out_stride + column, (opened * up).to(gate.dtype), mask=inside)


# fmt: off
@jit
def _linear_kernel(
    x, weight, out, residual, rows, out_stride, in_features: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ADD: tl.constexpr,
):
    # fmt: on
    # One program: all rows [BLOCK_M] of BLOCK_N output features. x and the weight are streamed along K, BLOCK_K at a
    # time and num_stages steps ahead; the sums [BLOCK_M, BLOCK_N] stay in registers.
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    inside = (row < rows)[:, None]
    left = x + row[:, None] * in_features + k[None, :]
    right = weight + n.to(tl.int64)[None, :] * in_features + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(0, in_features, BLOCK_K):
        total = tl.dot(
            tl.load(left + step, mask=inside, other=0.0), tl.load(right + step), total, input_precision="ieee"
        )
    place = row[:, None] * out_stride + n[None, :]
    if ADD:
        # Rounded before the sum, as a layer whose output is added to the residual would be.
        total = total.to(out.dtype.element_ty).to(tl.float32) + tl.load(residual + place, mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


# fmt: off
@jit
def _swiglu_kernel(
    x, gate_up, out, rows, intermediate_size, in_features: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # fmt: on
    # One program: all rows [BLOCK_M] of BLOCK_N features. x is streamed along K once, with it the features' rows of
    # both halves of the weight; the two sums [BLOCK_M, BLOCK_N] stay in registers until they are joined.
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    inside = (row < rows)[:, None]
    left = x + row[:, None] * in_features + k[None, :]
    gates = gate_up + n.to(tl.int64)[None, :] * in_features + k[:, None]
    ups = gates + intermediate_size.to(tl.int64) * in_features
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(0, in_features, BLOCK_K):
        part = tl.load(left + step, mask=inside, other=0.0)
        gate = tl.dot(part, tl.load(gates + step), gate, input_precision="ieee")
        up = tl.dot(part, tl.load(ups + step), up, input_precision="ieee")
    kind = out.dtype.element_ty
    gate = gate.to(kind).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    place = row[:, None] * intermediate_size + n[None, :]
    tl.store(out + place, (active * up.to(kind).to(tl.float32)).to(kind), mask=inside)
