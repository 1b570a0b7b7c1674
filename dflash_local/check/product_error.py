"""What rounding explains of a product's error in bfloat16, by its terms; other dtypes take a share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dflash_local.config.features import ClampedSwiGLU
from dflash_local.kernels.experts import Activation

# Decoded weights are rounded by 2^-9 or so, independently of each other: a sum errs by so many times the root of its
# terms' squares. The largest of a million sums is five standard deviations off; libraries round partial sums as well.
TERM_ERROR, DEVIATIONS = 2**-9, 8
RESULT_ERROR = 2**-7  # a result is rounded a few times
SLOPE = 1.1  # the largest one of silu; of a clamped gate's it is the same
SHARES = {torch.float32: 2**-6}  # sums of thousands of terms in another order, not rounded in between


@dataclass(frozen=True, slots=True)
class Tried:
    """A product with so many rows. ``error``: the largest over what rounding explains; more than 1 is wrong."""

    name: str
    rows: int
    error: float


def gated_bound(both: torch.Tensor, errors: torch.Tensor, activation: Activation) -> tuple[torch.Tensor, torch.Tensor]:
    """What is gated [M, I] of gate and up side by side [M, 2 I], and what errors of either make of it."""
    gate, up = both.chunk(2, 1)
    of_gate, of_up = errors.chunk(2, 1)
    if isinstance(activation, ClampedSwiGLU):
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit) + 1
        passed = gate * torch.sigmoid(activation.alpha * gate)
    else:
        passed = F.silu(gate)
    want = passed * up
    return want, SLOPE * of_gate * (up.abs() + of_up) + passed.abs() * of_up + RESULT_ERROR * want.abs()


def row_ratios(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """The largest error of each row [M] over its bound; NaN where a result is not a number.

    0 where the bound is infinite or what is wanted beyond the dtype of the results.
    """
    limits = bound * SHARES.get(got.dtype, 1.0)
    ratios = (got.float() - want).abs() / limits.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(bound.isfinite() & (want.abs() <= torch.finfo(got.dtype).max), ratios, 0.0).amax(1)
