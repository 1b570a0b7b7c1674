"""A DFlash 2 drafter over static buffers: convolutions around the parts of its layers, and a choice of candidates."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dflash_local.drafters.dflash.fused import DFlashBlocks
from dflash_local.drafters.dflash2.layout import (
    BASE,
    CONVOLVED,
    KERNELS,
    PROJECTION,
    SELECTOR,
    BlockConvolution,
    DFlash2Config,
)
from dflash_local.drafters.dflash2.reference import codebooks_of
from dflash_local.kernels.allocate import Tensors
from dflash_local.kernels.block_convolution import block_convolution
from dflash_local.kernels.candidate_walk import CandidateWalk
from dflash_local.models.drafter_weights import DrafterWeights
from dflash_local.models.fused.decoder_layer import DecoderLayer
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
        """Return the part's input [B, H] of normed rows; it lies in ``rows``."""
        self.projection(normed, self.kernels)
        return block_convolution(normed, self.base[0], self._own(0), self.rows)

    def after(self, result: torch.Tensor, x: torch.Tensor) -> None:
        """Add the part's result [B, H], convolved, to the residual stream ``x``."""
        block_convolution(result, self.base[1], self._own(1), x, x)

    def _own(self, side: int) -> torch.Tensor:
        return self.kernels.view(len(self.kernels), 2, self.config.kernel_size, -1)[:, side]


class DFlash2Blocks(DFlashBlocks):
    """It scales the target's stored rows itself, and takes its logits without the soft cap."""

    config: DFlash2Config

    def _bind_own(self, weights: DrafterWeights, tensors: Tensors) -> None:
        config, target = self.config, self.target
        kernels, projected, *candidates = tensors.take(config.own_buffers(target.vocab_size, target.spec.dtype))
        self._embedding_scale = config.embedding_scale
        self._kernels, self._contribution = kernels, projected
        self._bases = weights.own_tensors
        self.selector = CandidateWalk(config.selector, codebooks_of(weights), projected, target.tokens[:1], candidates)

    def _own_layer(self, index: int, layer: DecoderLayer) -> DecoderLayer:
        around, behind = (self._convolution(f"layers.{index}.{module}") for module in CONVOLVED)
        return replace(layer, around_mixer=around, around_mlp=behind)

    def _convolution(self, at: str) -> Convolution:
        # The rows behind the last norm are not there yet while the layers run: they are the room.
        base, projection = self._bases[f"{at}.{BASE}"], self._own_products[f"{at}.{KERNELS}"]
        return Convolution(self.config.convolution, base, projection, self._kernels, self._hidden)

    def _finish_own(self, drafted: torch.Tensor) -> None:
        self._own_products[f"{SELECTOR}.{PROJECTION}"](drafted, self._contribution)


BLOCKS = DFlash2Blocks
