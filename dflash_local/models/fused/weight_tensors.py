"""Describe what the weights of a model's parts are put together from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from dflash_local.checkpoint_files.tensor_info import TensorInfo
from dflash_local.kernels.allocate import Tensors
from dflash_local.kernels.rms_norm import rms_norm
from dflash_local.layout.buffer import Buffer
from dflash_local.layout.part_layout import WeightSpec


@dataclass(frozen=True, slots=True)
class WeightTensors:
    """Allocated tensors and how to read them.

    Attributes:
        eps: of all norms. stored: the checkpoint's tensors by name, where there is one: what may be stored in two ways
            is read in the one that it is.
    """

    tensors: Tensors
    spec: WeightSpec
    eps: float
    stored: Mapping[str, TensorInfo] = field(default_factory=dict)

    def norm(self, buffer: Buffer) -> RMSNorm:
        """Return the norm whose weight a buffer describes."""
        return RMSNorm(self.tensors[buffer.name], self.eps, self.spec.norm_plus_one)


@dataclass(slots=True)
class RMSNorm:
    """``weight`` [H]; ``plus_one``: it is stored counting from zero, and the norm rounds once, after it."""

    weight: torch.Tensor
    eps: float
    plus_one: bool = False

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the norm of ``x`` to ``out`` [M, H], which it may be."""
        return rms_norm(x, self.weight, self.eps, out, norm_plus_one=self.plus_one)

    def reset(self) -> None:
        """Set the stored weight of a norm that only norms."""
        self.weight.fill_(0.0 if self.plus_one else 1.0)

    def finish(self) -> None:
        if self.plus_one:
            self.weight.add_(1.0)
