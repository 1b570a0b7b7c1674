"""What a DFlash 2 drafter computes beside a DFlash one, in plain PyTorch: convolutions and the choice of candidates."""

from __future__ import annotations

import torch

from dflash_local.config.dflash2 import BlockConvolution, SelectorConfig
from dflash_local.kernels.block_convolution import block_convolution_reference
from dflash_local.kernels.candidate_walk import Choose, candidates, walk
from dflash_local.models.drafter_weights import ConvolutionWeights, SelectorWeights
from dflash_local.models.packed_linear import linear


class Convolution:
    """A convolution around a sublayer: on its input rows, which also decide the kernels for its output."""

    def __init__(self, config: BlockConvolution, weights: ConvolutionWeights) -> None:
        self._size = config.kernel_size
        self._weights = weights

    def before(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sublayer's input of normed rows [B, hidden], and what ``after`` needs."""
        own = linear(rows, self._weights.projection).view(len(rows), 2, self._size, -1)
        return block_convolution_reference(rows, self._weights.base[0], own[:, 0]), own[:, 1]

    def after(self, rows: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """The sublayer's output [B, hidden] as it is added to the residual."""
        return block_convolution_reference(rows, self._weights.base[1], own)


class CandidateSelector:
    """Chooses drafts one after the other among the likeliest ids of each row."""

    def __init__(self, config: SelectorConfig, weights: SelectorWeights) -> None:
        self._config = config
        self._weights = weights

    @torch.no_grad()
    def walk(self, hidden: torch.Tensor, logits: torch.Tensor, anchor: torch.Tensor, choose: Choose) -> torch.Tensor:
        """The ids [m] chosen row by row, each by the one before it.

        Args:
            hidden, logits: [m, hidden] and [m, V], of the drafted positions. anchor: [1] the id before the first.
            choose: see ``kernels.candidate_walk.walk``.
        """
        projected = linear(hidden, self._weights.projection)
        return walk(*candidates(self._config, logits), projected, self._weights.codebooks, anchor, choose)
