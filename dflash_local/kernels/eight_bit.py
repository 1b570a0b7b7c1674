"""A weight in eight bits, and its product with a few rows: half the bytes of bfloat16 are read.

Codes are symmetric with one scale for each output column. The activations stay as they are (codes become bfloat16 in
registers), or each row gets codes of its own (``narrow``: the tensor core multiplies codes, nothing is converted).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from dflash_local.kernels.jit import jit, power_of_two, runs_kernels, tl
from dflash_local.kernels.skinny_gemm import MAX_ROWS, MIN_ROWS, Tile

TOP = 127  # the largest code
TINY = 1e-30  # as the largest number of a row of zeros
SLICE = 2**24  # weights that are converted at a time
COUNTERS = 4096  # tiles of a product at most, where programs share a tile's depth


@dataclass(frozen=True, slots=True)
class EightBit:
    """A weight [N, K] as ``codes * scales``; where a tensor's shape and size are asked for it answers like one.

    Attributes:
        codes: [N, K] int8. scales: [N] float32. dtype: of the weight that it stands for, and of its activations.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: torch.Tensor, device: torch.device | None = None) -> EightBit:
        """The codes of a weight, on ``device`` or where it lies; beside them a slice is held, no second weight."""
        device = weight.device if device is None else device
        codes = torch.empty(weight.shape, dtype=torch.int8, device=device)
        scales = torch.empty(len(weight), dtype=torch.float32, device=device)
        for part in _slices(*weight.shape):
            wide = weight[part].to(device, torch.float32, copy=True)
            torch.linalg.vector_norm(wide, float("inf"), 1, out=scales[part])
            scales[part].clamp_(min=TINY).div_(TOP)
            codes[part] = wide.div_(scales[part, None]).round_()
        return cls(codes, scales, weight.dtype)

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.codes.device

    @property
    def is_cuda(self) -> bool:
        """True on a GPU."""
        return self.codes.is_cuda

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def numel(self) -> int:
        """How many weights."""
        return self.codes.numel()


@dataclass(frozen=True, slots=True)
class Way:
    """How a product with such a weight is done.

    Attributes:
        tile: of a program. narrow: activations become codes too. split: programs that share a tile's depth.
    """

    tile: Tile
    narrow: bool = False
    split: int = 1

    def fits(self, columns: int, depth: int) -> bool:
        """True when it divides a weight of that shape."""
        if self.split > 1 and columns // self.tile.columns > COUNTERS:
            return False
        return depth % self.split == 0 and self.tile.fits(columns, depth // self.split)


def _slices(columns: int, depth: int) -> list[slice]:
    step = max(128, SLICE // depth // 128 * 128)
    return [slice(at, min(at + step, columns)) for at in range(0, columns, step)]


def linear(
    x: torch.Tensor, weight: EightBit, out: torch.Tensor, way: Way | None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """``out = x @ weight.T (+ residual)``, the product rounded once. Without a way, or for many rows, by the library.

    Args:
        x: [M, K]. out: [M, N]; may be ``residual``.
    """
    if way is None or len(x) > MAX_ROWS or not runs_kernels(x):
        return linear_twin(x, weight, out, way, residual)
    rows, (columns, depth) = len(x), weight.shape
    block, tile = max(MIN_ROWS, power_of_two(rows)), way.tile
    part, row_scales = quantise_rows(x) if way.narrow else (x, weight.scales)
    counters = _counters(x.device)
    sums = x.new_empty(way.split, block, columns, dtype=torch.float32) if way.split > 1 else weight.scales
    added = out if residual is None else residual
    flags = (way.split, way.narrow, _packs(x), residual is not None)
    places = (part, row_scales, weight.codes, weight.scales, out, added, sums, counters, rows, columns, depth)
    _linear_kernel[(columns // tile.columns, way.split)](
        *places, block, tile.columns, tile.depth, *flags, num_warps=tile.warps, num_stages=tile.stages
    )
    return out


def swiglu(x: torch.Tensor, weight: EightBit, out: torch.Tensor, way: Way | None) -> torch.Tensor:
    """``out = silu(x @ gate.T) * (x @ up.T)``, each product rounded as a layer of its own would be.

    Args:
        x: [M, K]. weight: [2 I, K], the gate's rows first. out: [M, I]. way: its depth is not shared.
    """
    if way is None or len(x) > MAX_ROWS or not runs_kernels(x):
        return swiglu_twin(x, weight, out, way)
    (rows, depth), inner, tile = x.shape, out.shape[1], way.tile
    block = max(MIN_ROWS, power_of_two(rows))
    part, row_scales = quantise_rows(x) if way.narrow else (x, weight.scales)
    places = (part, row_scales, weight.codes, weight.scales, out, rows, inner, depth)
    _swiglu_kernel[(inner // tile.columns,)](
        *places, block, tile.columns, tile.depth, way.narrow, _packs(x), num_warps=tile.warps, num_stages=tile.stages
    )
    return out


def linear_twin(
    x: torch.Tensor, weight: EightBit, out: torch.Tensor, way: Way | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """The same in plain PyTorch, for any number of rows, a slice of the weight at a time."""
    if way is not None and way.narrow:
        codes, scales = quantise_rows_twin(x)
        x = codes.float() * scales[:, None]
    product = out if residual is None else torch.empty_like(out)
    for part in _slices(*weight.shape):
        product[:, part] = torch.mm(x, weight.codes[part].to(x.dtype).t()) * weight.scales[part]
    return product if residual is None else torch.add(residual, product, out=out)


def swiglu_twin(x: torch.Tensor, weight: EightBit, out: torch.Tensor, way: Way | None = None) -> torch.Tensor:
    """The same in plain PyTorch, for any number of rows."""
    gate, up = linear_twin(x, weight, x.new_empty(len(x), len(weight.scales)), way).chunk(2, -1)
    return torch.mul(torch.nn.functional.silu(gate), up, out=out)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [M, K] of activations, and each row's scale [M]."""
    if not runs_kernels(x):
        return quantise_rows_twin(x)
    rows, depth = x.shape
    codes, scales = x.new_empty(rows, depth, dtype=torch.int8), x.new_empty(rows, dtype=torch.float32)
    _quantise_kernel[(rows,)](x, codes, scales, depth, power_of_two(depth), num_warps=8)
    return codes, scales


def quantise_rows_twin(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain PyTorch."""
    wide = x.float()
    top = wide.abs().amax(1).clamp(min=TINY)
    return torch.floor(wide * (TOP / top)[:, None] + 0.5).to(torch.int8), top / TOP


def _packs(x: torch.Tensor) -> bool:
    """True where codes become bfloat16 four at a time, by instructions of the card."""
    return x.is_cuda and x.dtype == torch.bfloat16


@cache
def _counters(device: torch.device) -> torch.Tensor:
    """Zeros, and every launch leaves them so; the launches that share them follow one another."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@jit
def _bfloats(codes):
    """bfloat16 of int8: the low seven bits on top of 128 or 256, less 128 or 256; two numbers an instruction."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, part, less, minus;
        mov.b32 minus, 0xbf80bf80;
        prmt.b32 low, $2, 0x43434343, 0x4140;
        prmt.b32 high, $2, 0x43434343, 0x4342;
        and.b32 part, low, 0xff7fff7f;
        and.b32 less, low, 0xff80ff80;
        fma.rn.bf16x2 $0, less, minus, part;
        and.b32 part, high, 0xff7fff7f;
        and.b32 less, high, 0xff80ff80;
        fma.rn.bf16x2 $1, less, minus, part;
        }
        """,
        "=r,=r,r",
        [codes],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@jit
def _step(left, codes, total, NARROW: tl.constexpr, PACKED: tl.constexpr):
    """One step of the depth."""
    if NARROW:
        total = tl.dot(left, codes, total, out_dtype=tl.int32)
    elif PACKED:
        total = tl.dot(left, _bfloats(codes), total)
    else:
        total = tl.dot(left, codes.to(left.dtype), total, input_precision="ieee")
    return total


# fmt: off
@jit
def _linear_kernel(
    x, row_scales, weight, column_scales, out, residual, sums, counters, rows, columns, depth,
    BLOCK_ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr, NARROW: tl.constexpr,
    PACKED: tl.constexpr, ADD: tl.constexpr,
):
    # fmt: on
    tile = tl.program_id(0)
    share = tl.program_id(1)
    at = tile * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, BLOCK_ROWS)
    k = tl.arange(0, DEPTH)
    inside = (row < rows)[:, None]
    first = tl.multiple_of(share * (depth // SPLIT), DEPTH)  # loads stay as wide as they can be
    left = x + row[:, None] * depth + first + k[None, :]
    right = weight + at.to(tl.int64)[None, :] * depth + first + k[:, None]
    total = tl.zeros((BLOCK_ROWS, COLUMNS), tl.int32 if NARROW else tl.float32)
    for step in range(0, depth // SPLIT, DEPTH):
        total = _step(
            tl.load(left + step, mask=inside, other=0), tl.load(right + step), total, NARROW, PACKED
        )
    total = total.to(tl.float32)
    place = row[:, None] * columns + at[None, :]
    last = True
    if SPLIT > 1:
        tl.store(sums + share * BLOCK_ROWS * columns + place, total)
        tl.debug_barrier()
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT - 1
    if last:
        if SPLIT > 1:
            # In the order of the shares, whoever came last: the same sums every time.
            total = tl.zeros((BLOCK_ROWS, COLUMNS), tl.float32)
            for other in range(SPLIT):
                total += tl.load(sums + other * BLOCK_ROWS * columns + place, cache_modifier=".cg")
            tl.store(counters + tile, 0)
        total *= tl.load(column_scales + at)[None, :]
        if NARROW:
            total *= tl.load(row_scales + row, mask=row < rows, other=0.0)[:, None]
        kind = out.dtype.element_ty
        if ADD:
            # Rounded before the sum, as a layer whose output is added to the residual would be.
            total = total.to(kind).to(tl.float32) + tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + place, total.to(kind), mask=inside)


# fmt: off
@jit
def _swiglu_kernel(
    x, row_scales, weight, column_scales, out, rows, inner, depth, BLOCK_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, NARROW: tl.constexpr, PACKED: tl.constexpr,
):
    # fmt: on
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, BLOCK_ROWS)
    k = tl.arange(0, DEPTH)
    inside = (row < rows)[:, None]
    left = x + row[:, None] * depth + k[None, :]
    gates = weight + at.to(tl.int64)[None, :] * depth + k[:, None]
    ups = gates + inner.to(tl.int64) * depth
    gate = tl.zeros((BLOCK_ROWS, COLUMNS), tl.int32 if NARROW else tl.float32)
    up = tl.zeros((BLOCK_ROWS, COLUMNS), tl.int32 if NARROW else tl.float32)
    for step in range(0, depth, DEPTH):
        part = tl.load(left + step, mask=inside, other=0)
        gate = _step(part, tl.load(gates + step), gate, NARROW, PACKED)
        up = _step(part, tl.load(ups + step), up, NARROW, PACKED)
    gate = gate.to(tl.float32) * tl.load(column_scales + at)[None, :]
    up = up.to(tl.float32) * tl.load(column_scales + inner + at)[None, :]
    if NARROW:
        scale = tl.load(row_scales + row, mask=row < rows, other=0.0)[:, None]
        gate *= scale
        up *= scale
    kind = out.dtype.element_ty
    gate = gate.to(kind).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    place = row[:, None] * inner + at[None, :]
    tl.store(out + place, (active * up.to(kind).to(tl.float32)).to(kind), mask=inside)


@jit
def _quantise_kernel(x, codes, scales, depth, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    k = tl.arange(0, WIDTH)
    inside = k < depth
    wide = tl.load(x + row * depth + k, mask=inside, other=0.0).to(tl.float32)
    top = tl.maximum(tl.max(tl.abs(wide), 0), 1e-30)
    tl.store(codes + row * depth + k, tl.floor(wide * (127.0 / top) + 0.5).to(tl.int8), mask=inside)
    tl.store(scales + row, top / 127.0)
