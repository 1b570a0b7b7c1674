"""A root-mean-square norm with its weight, as layers use one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_local.kernels.rms_norm import rms_norm


@dataclass(slots=True)
class RMSNorm:
    """``weight`` [H]; ``plus_one``: it is stored counting from zero, and the norm rounds once, after it."""

    weight: torch.Tensor
    eps: float
    plus_one: bool = False

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """``out`` [M, H] becomes the norm of ``x``, which it may be."""
        return rms_norm(x, self.weight, self.eps, out, norm_plus_one=self.plus_one)

    def reset(self) -> None:
        """The stored weight of a norm that only norms."""
        self.weight.fill_(0.0 if self.plus_one else 1.0)

    def finish(self) -> None:
        if self.plus_one:
            self.weight.add_(1.0)
