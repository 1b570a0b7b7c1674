"""What the weights of a model's parts are put together from."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dflash_local.kernels.allocate import Tensors
from dflash_local.layout.buffer import Buffer
from dflash_local.layout.part_layout import WeightSpec
from dflash_local.models.fused.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class WeightTensors:
    """Allocated tensors and how to read them.

    Attributes:
        eps: of all norms. stored: names of the checkpoint's tensors, where there is one: what may be stored in two
            ways is read in the one that it is.
    """

    tensors: Tensors
    spec: WeightSpec
    eps: float
    stored: Collection[str] = ()

    def norm(self, buffer: Buffer) -> RMSNorm:
        """The norm whose weight a buffer describes."""
        return RMSNorm(self.tensors[buffer.name], self.eps, self.spec.norm_plus_one)
