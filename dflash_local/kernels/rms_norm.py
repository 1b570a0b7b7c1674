"""Root-mean-square norm of rows, with the rounding of the published models: float32 inside, rounded, then weighed."""

from __future__ import annotations

import torch

from dflash_local.kernels.jit import (
    jit,
    overlapping,
    power_of_two,
    runs_kernels,
    start_next_kernel,
    tl,
    wait_for_earlier_kernels,
)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, norm_plus_one: bool = False
) -> torch.Tensor:
    """Compute ``out = weight * x / rms(x)`` row by row.

    Args:
        x, out: [M, H]. weight: [H]. norm_plus_one: round once, after the weight (Qwen3.5's norm, whose stored weight
            counts from zero and is given here with the one added).
    """
    if not runs_kernels(x):
        return rms_norm_reference(x, weight, eps, out, norm_plus_one=norm_plus_one)
    rows, size = x.shape
    _rms_norm_kernel[(rows,)](
        x, weight, out, eps, size, power_of_two(size), norm_plus_one, num_warps=8, **overlapping(x)
    )
    return out


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, norm_plus_one: bool = False
) -> torch.Tensor:
    """Compute the same in plain PyTorch."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return out.copy_(scaled * weight.float() if norm_plus_one else scaled.to(x.dtype) * weight.to(x.dtype))


@jit
def _rms_norm_kernel(x, weight, out, eps, size, BLOCK: tl.constexpr, NORM_PLUS_ONE: tl.constexpr):
    # One program: one row, all of it in registers. Its loads come before the next kernel's, which are many.
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)  # no kernel writes it
    wait_for_earlier_kernels()
    value = tl.load(x + row * size + at, mask=inside, other=0.0).to(tl.float32)
    start_next_kernel()
    scaled = value / tl.sqrt(tl.sum(value * value, 0) / size + eps)
    if not NORM_PLUS_ONE:
        scaled = scaled.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + at, (scaled * factor).to(out.dtype.element_ty), mask=inside)
