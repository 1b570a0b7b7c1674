"""A weight in eight bits, and its product with a few rows: half the bytes of bfloat16 are read.

Codes are symmetric with one scale for each output feature. The activations stay as they are (codes become bfloat16 in
registers), or each row gets codes of its own (``w8a8``: the tensor core multiplies codes, nothing is converted).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from dflash_local.kernels.jit import jit, power_of_two, runs_kernels, tl
from dflash_local.kernels.quantized_weight import CodedWeight
from dflash_local.kernels.skinny_gemm import MAX_ROWS, MIN_ROWS, GemmConfig, row_stride

MAX_CODE = 127
MIN_ABSMAX = 1e-30  # as the largest number of a row of zeros
SLICE_SIZE = 2**24  # weights that are converted at a time
MAX_COUNTERS = 4096  # tiles of a product at most, where programs share a tile's K


@dataclass(frozen=True, slots=True)
class Int8Weight(CodedWeight):
    """A weight [N, K] as ``codes * scales``; where a tensor's shape and size are asked for it answers like one.

    Attributes:
        codes: [N, K] int8. scales: [N] float32. dtype: of the weight that it stands for, and of its activations.
    """

    dtype: torch.dtype

    @classmethod
    def of(cls, weight: torch.Tensor, device: torch.device | None = None) -> Int8Weight:
        """The codes of a weight, on ``device`` or where it lies; beside them a slice is held, no second weight."""
        device = weight.device if device is None else device
        codes = torch.empty(weight.shape, dtype=torch.int8, device=device)
        scales = torch.empty(len(weight), dtype=torch.float32, device=device)
        for part in _slices(*weight.shape):
            wide = weight[part].to(device, torch.float32, copy=True)
            torch.linalg.vector_norm(wide, float("inf"), 1, out=scales[part])
            scales[part].clamp_(min=MIN_ABSMAX).div_(MAX_CODE)
            codes[part] = wide.div_(scales[part, None]).round_()
        return cls(codes, scales, weight.dtype)

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        return self.codes.shape


@dataclass(frozen=True, slots=True)
class Int8Config:
    """How a product with such a weight is done.

    Attributes:
        gemm: of a program. w8a8: activations become codes too. split_k: programs that share a tile's K.
    """

    gemm: GemmConfig
    w8a8: bool = False
    split_k: int = 1

    def fits(self, out_features: int, in_features: int) -> bool:
        """True when it divides a weight of that shape."""
        if self.split_k > 1 and out_features // self.gemm.block_n > MAX_COUNTERS:
            return False
        return in_features % self.split_k == 0 and self.gemm.fits(out_features, in_features // self.split_k)


def _slices(out_features: int, in_features: int) -> list[slice]:
    step = max(128, SLICE_SIZE // in_features // 128 * 128)
    return [slice(at, min(at + step, out_features)) for at in range(0, out_features, step)]


def linear(
    x: torch.Tensor,
    weight: Int8Weight,
    out: torch.Tensor,
    config: Int8Config | None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out = x @ weight.T (+ residual)``, the product rounded once. The library's without a config and for many rows.

    Args:
        x: [M, K]. out: [M, N], perhaps a part of wider rows; may be ``residual``.
    """
    if config is None or len(x) > MAX_ROWS or not runs_kernels(x):
        return linear_reference(x, weight, out, config, residual)
    rows = len(x)
    out_features, in_features = weight.shape
    block_m = max(MIN_ROWS, power_of_two(rows))
    gemm = config.gemm
    part, row_scales = quantise_rows(x) if config.w8a8 else (x, weight.scales)
    counters = _counters(x.device)
    sums = weight.scales
    if config.split_k > 1:
        sums = x.new_empty(config.split_k, block_m, out_features, dtype=torch.float32)
    _linear_kernel[(out_features // gemm.block_n, config.split_k)](
        part, row_scales, weight.codes, weight.scales, out, out if residual is None else residual, sums, counters,
        rows, out_features, row_stride(out, residual), in_features, block_m, gemm.block_n, gemm.block_k, config.split_k,
        config.w8a8, _packs(x), residual is not None, num_warps=gemm.num_warps, num_stages=gemm.num_stages,
    )  # fmt: skip
    return out


def swiglu(x: torch.Tensor, weight: Int8Weight, out: torch.Tensor, config: Int8Config | None) -> torch.Tensor:
    """``out = silu(x @ gate.T) * (x @ up.T)``, each product rounded as a layer of its own would be.

    Args:
        x: [M, K]. weight: [2 I, K], the gate's rows first. out: [M, I]. config: its K is not split.
    """
    if config is None or len(x) > MAX_ROWS or not runs_kernels(x):
        return swiglu_reference(x, weight, out, config)
    rows, in_features = x.shape
    intermediate_size = out.shape[1]
    block_m = max(MIN_ROWS, power_of_two(rows))
    gemm = config.gemm
    part, row_scales = quantise_rows(x) if config.w8a8 else (x, weight.scales)
    _swiglu_kernel[(intermediate_size // gemm.block_n,)](
        part, row_scales, weight.codes, weight.scales, out, rows, intermediate_size, in_features, block_m,
        gemm.block_n, gemm.block_k, config.w8a8, _packs(x), num_warps=gemm.num_warps, num_stages=gemm.num_stages,
    )  # fmt: skip
    return out


def linear_reference(
    x: torch.Tensor,
    weight: Int8Weight,
    out: torch.Tensor,
    config: Int8Config | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain PyTorch, for any number of rows, a slice of the weight at a time."""
    if config is not None and config.w8a8:
        codes, scales = quantise_rows_reference(x)
        x = codes.float() * scales[:, None]
    product = out if residual is None else torch.empty_like(out)
    for part in _slices(*weight.shape):
        product[:, part] = torch.mm(x, weight.codes[part].to(x.dtype).t()) * weight.scales[part]
    return product if residual is None else torch.add(residual, product, out=out)


def swiglu_reference(
    x: torch.Tensor, weight: Int8Weight, out: torch.Tensor, config: Int8Config | None = None
) -> torch.Tensor:
    """The same in plain PyTorch, for any number of rows."""
    gate, up = linear_reference(x, weight, x.new_empty(len(x), len(weight.scales)), config).chunk(2, -1)
    return torch.mul(torch.nn.functional.silu(gate), up, out=out)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [M, K] of activations, and each row's scale [M]."""
    if not runs_kernels(x):
        return quantise_rows_reference(x)
    rows, in_features = x.shape
    codes, scales = x.new_empty(rows, in_features, dtype=torch.int8), x.new_empty(rows, dtype=torch.float32)
    _quantise_kernel[(rows,)](x, codes, scales, in_features, power_of_two(in_features), num_warps=8)
    return codes, scales


def quantise_rows_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain PyTorch."""
    wide = x.float()
    top = wide.abs().amax(1).clamp(min=MIN_ABSMAX)
    return torch.floor(wide * (MAX_CODE / top)[:, None] + 0.5).to(torch.int8), top / MAX_CODE


def _packs(x: torch.Tensor) -> bool:
    """True where codes become bfloat16 four at a time, by instructions of the card."""
    return x.is_cuda and x.dtype == torch.bfloat16


@cache
def _counters(device: torch.device) -> torch.Tensor:
    """Zeros, and every launch leaves them so; the launches that share them follow one another."""
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


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
def _dot(left, codes, total, W8A8: tl.constexpr, PACKED: tl.constexpr):
    """One step along K."""
    if W8A8:
        total = tl.dot(left, codes, total, out_dtype=tl.int32)
    elif PACKED:
        total = tl.dot(left, _bfloats(codes), total)
    else:
        total = tl.dot(left, codes.to(left.dtype), total, input_precision="ieee")
    return total


# fmt: off
@jit
def _linear_kernel(
    x, row_scales, weight, weight_scales, out, residual, sums, counters, rows, out_features, out_stride, in_features,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, W8A8: tl.constexpr,
    PACKED: tl.constexpr, ADD: tl.constexpr,
):
    # fmt: on
    # One program: all rows [BLOCK_M] of BLOCK_N output features, over one of SPLIT_K shares of K. x and the weight's
    # codes are streamed along K, BLOCK_K at a time; the sums [BLOCK_M, BLOCK_N] stay in registers. Where K is split,
    # the program that finds all others of its tile done adds their sums and finishes.
    tile = tl.program_id(0)
    share = tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    inside = (row < rows)[:, None]
    first = tl.multiple_of(share * (in_features // SPLIT_K), BLOCK_K)  # loads stay as wide as they can be
    left = x + row[:, None] * in_features + first + k[None, :]
    right = weight + n.to(tl.int64)[None, :] * in_features + first + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if W8A8 else tl.float32)
    for step in range(0, in_features // SPLIT_K, BLOCK_K):
        total = _dot(
            tl.load(left + step, mask=inside, other=0), tl.load(right + step), total, W8A8, PACKED
        )
    total = total.to(tl.float32)
    place = row[:, None] * out_features + n[None, :]
    last = True
    if SPLIT_K > 1:
        tl.store(sums + share * BLOCK_M * out_features + place, total)
        tl.debug_barrier()
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT_K - 1
    if last:
        if SPLIT_K > 1:
            # In the order of the shares, whoever came last: the same sums every time.
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for other in range(SPLIT_K):
                total += tl.load(sums + other * BLOCK_M * out_features + place, cache_modifier=".cg")
            tl.store(counters + tile, 0)
        total *= tl.load(weight_scales + n)[None, :]
        if W8A8:
            total *= tl.load(row_scales + row, mask=row < rows, other=0.0)[:, None]
        kind = out.dtype.element_ty
        place = row[:, None] * out_stride + n[None, :]
        if ADD:
            # Rounded before the sum, as a layer whose output is added to the residual would be.
            total = total.to(kind).to(tl.float32) + tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + place, total.to(kind), mask=inside)


# fmt: off
@jit
def _swiglu_kernel(
    x, row_scales, weight, weight_scales, out, rows, intermediate_size, in_features, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, W8A8: tl.constexpr, PACKED: tl.constexpr,
):
    # fmt: on
    # One program: all rows [BLOCK_M] of BLOCK_N features. x is streamed along K once, with it the features' codes of
    # both halves of the weight; the two sums [BLOCK_M, BLOCK_N] stay in registers until they are joined.
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    inside = (row < rows)[:, None]
    left = x + row[:, None] * in_features + k[None, :]
    gates = weight + n.to(tl.int64)[None, :] * in_features + k[:, None]
    ups = gates + intermediate_size.to(tl.int64) * in_features
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if W8A8 else tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if W8A8 else tl.float32)
    for step in range(0, in_features, BLOCK_K):
        part = tl.load(left + step, mask=inside, other=0)
        gate = _dot(part, tl.load(gates + step), gate, W8A8, PACKED)
        up = _dot(part, tl.load(ups + step), up, W8A8, PACKED)
    gate = gate.to(tl.float32) * tl.load(weight_scales + n)[None, :]
    up = up.to(tl.float32) * tl.load(weight_scales + intermediate_size + n)[None, :]
    if W8A8:
        scale = tl.load(row_scales + row, mask=row < rows, other=0.0)[:, None]
        gate *= scale
        up *= scale
    kind = out.dtype.element_ty
    gate = gate.to(kind).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    place = row[:, None] * intermediate_size + n[None, :]
    tl.store(out + place, (active * up.to(kind).to(tl.float32)).to(kind), mask=inside)


@jit
def _quantise_kernel(x, codes, scales, in_features, BLOCK_K: tl.constexpr):
    # One program: one row, all of it in registers.
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    inside = k < in_features
    wide = tl.load(x + row * in_features + k, mask=inside, other=0.0).to(tl.float32)
    top = tl.maximum(tl.max(tl.abs(wide), 0), 1e-30)
    tl.store(codes + row * in_features + k, tl.floor(wide * (127.0 / top) + 0.5).to(tl.int8), mask=inside)
    tl.store(scales + row, top / 127.0)
