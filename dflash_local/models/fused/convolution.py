"""The convolutions of a DFlash 2 drafter around the parts of its layers, as fixed lists of launches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_local.config.dflash2 import BlockConvolution
from dflash_local.kernels.block_convolution import block_convolution
from dflash_local.models.fused.linear import Linear


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution around a part: on its input rows, which also decide the kernels for its output.

    Attributes:
        base: [2, kernel size, H]. projection: gives each row's own kernels, [2 x kernel size x groups].
        kernels, rows: room [B, 2 x kernel size x groups] and [B, H]; the layers of a model share it.
    """

    config: BlockConvolution
    base: torch.Tensor
    projection: Linear
    kernels: torch.Tensor
    rows: torch.Tensor

    def before(self, normed: torch.Tensor) -> torch.Tensor:
        """The part's input [B, H] of normed rows; it lies in ``rows``."""
        self.projection(normed, self.kernels)
        return block_convolution(normed, self.base[0], self._own(0), self.rows)

    def after(self, result: torch.Tensor, x: torch.Tensor) -> None:
        """Add the part's result [B, H], convolved, to the residual stream ``x``."""
        block_convolution(result, self.base[1], self._own(1), x, x)

    def _own(self, side: int) -> torch.Tensor:
        return self.kernels.view(len(self.kernels), 2, self.config.kernel_size, -1)[:, side]
