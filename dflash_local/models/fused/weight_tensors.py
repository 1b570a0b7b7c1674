"""What the weights of a model's parts are put together from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dflash_local.checkpoint_files.tensor_info import TensorInfo
from dflash_local.kernels.allocate import Tensors
from dflash_local.layout.buffer import Buffer
from dflash_local.layout.part_layout import WeightSpec
from dflash_local.models.fused.norm import RMSNorm


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
        """The norm whose weight a buffer describes."""
        return RMSNorm(self.tensors[buffer.name], self.eps, self.spec.norm_plus_one)
