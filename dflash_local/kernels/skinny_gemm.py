"""Products of a few rows with a large weight matrix: every byte of the weight is read once, in order.

At up to 64 rows the time is that of the weight's bytes; a tile is chosen by measurement (``models.fused.linear``).
Sums are float32 over the whole depth in one program, so a row's result does not depend on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dflash_local.kernels.jit import jit, power_of_two, runs_kernels, tl

MAX_ROWS = 64
MIN_ROWS = 16  # what a tensor core takes at least


@dataclass(frozen=True, slots=True)
class Tile:
    """How one product is cut: output columns and depth of a program's step, its pipeline and its warps."""

    columns: int = 32
    depth: int = 128
    stages: int = 4
    warps: int = 4

    def fits(self, columns: int, depth: int) -> bool:
        """True when it divides a weight of that shape."""
        return columns % self.columns == 0 and depth % self.depth == 0


def linear(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tile: Tile, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """``out = x @ weight.T (+ residual)``, rounded once.

    Args:
        x: [M, K], M <= 64. weight: [N, K]. out: [M, N]; may be ``residual``.
    """
    if not runs_kernels(x):
        return linear_twin(x, weight, out, residual)
    rows, columns = x.shape[0], weight.shape[0]
    _linear_kernel[(columns // tile.columns,)](
        x,
        weight,
        out,
        out if residual is None else residual,
        rows,
        columns,
        x.shape[1],
        max(MIN_ROWS, power_of_two(rows)),
        tile.columns,
        tile.depth,
        residual is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def linear_twin(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """The same in plain PyTorch."""
    product = F.linear(x, weight)
    return out.copy_(product if residual is None else residual + product)


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor, tile: Tile) -> torch.Tensor:
    """``out = silu(x @ gate.T) * (x @ up.T)``, each product rounded as a layer of its own would be.

    Args:
        x: [M, K]. gate_up: [2 I, K], the gate's rows first. out: [M, I].
    """
    if not runs_kernels(x):
        return swiglu_twin(x, gate_up, out)
    rows, inner = x.shape[0], out.shape[1]
    _swiglu_kernel[(inner // tile.columns,)](
        x,
        gate_up,
        out,
        rows,
        inner,
        x.shape[1],
        max(MIN_ROWS, power_of_two(rows)),
        tile.columns,
        tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def swiglu_twin(x: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The same in plain PyTorch."""
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    return torch.mul(F.silu(gate), up, out=out)


# fmt: off
@jit
def _linear_kernel(
    x, weight, out, residual, rows, columns, depth: tl.constexpr, BLOCK_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, ADD: tl.constexpr,
):
    # fmt: on
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, BLOCK_ROWS)
    k = tl.arange(0, DEPTH)
    inside = (row < rows)[:, None]
    left = x + row[:, None] * depth + k[None, :]
    right = weight + at.to(tl.int64)[None, :] * depth + k[:, None]
    total = tl.zeros((BLOCK_ROWS, COLUMNS), tl.float32)
    for step in range(0, depth, DEPTH):
        total = tl.dot(
            tl.load(left + step, mask=inside, other=0.0), tl.load(right + step), total, input_precision="ieee"
        )
    place = row[:, None] * columns + at[None, :]
    if ADD:
        # Rounded before the sum, as a layer whose output is added to the residual would be.
        total = total.to(out.dtype.element_ty).to(tl.float32) + tl.load(residual + place, mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


# fmt: off
@jit
def _swiglu_kernel(
    x, gate_up, out, rows, inner, depth: tl.constexpr, BLOCK_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # fmt: on
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, BLOCK_ROWS)
    k = tl.arange(0, DEPTH)
    inside = (row < rows)[:, None]
    left = x + row[:, None] * depth + k[None, :]
    gates = gate_up + at.to(tl.int64)[None, :] * depth + k[:, None]
    ups = gates + inner.to(tl.int64) * depth
    gate = tl.zeros((BLOCK_ROWS, COLUMNS), tl.float32)
    up = tl.zeros((BLOCK_ROWS, COLUMNS), tl.float32)
    for step in range(0, depth, DEPTH):
        part = tl.load(left + step, mask=inside, other=0.0)
        gate = tl.dot(part, tl.load(gates + step), gate, input_precision="ieee")
        up = tl.dot(part, tl.load(ups + step), up, input_precision="ieee")
    kind = out.dtype.element_ty
    gate = gate.to(kind).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    place = row[:, None] * inner + at[None, :]
    tl.store(out + place, (active * up.to(kind).to(tl.float32)).to(kind), mask=inside)
