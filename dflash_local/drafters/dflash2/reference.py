"""A DFlash 2 drafter in plain PyTorch: convolutions around its sublayers, and the choice of candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dflash_local.drafters.dflash.reference import DFlashProposer, DrafterModel, Part, Sublayer
from dflash_local.drafters.dflash2.layout import (
    BASE,
    KERNELS,
    PREDECESSORS,
    PROJECTION,
    SELECTOR,
    SUCCESSORS,
    DFlash2Config,
    SelectorConfig,
)
from dflash_local.kernels.block_convolution import block_convolution_reference
from dflash_local.kernels.candidate_walk import Choose, Codebooks, candidates, walk
from dflash_local.models.drafter_weights import DrafterWeights, Matrix
from dflash_local.models.packed_linear import linear

if TYPE_CHECKING:
    from dflash_local.engine.sampling import Sampler


def codebooks_of(weights: DrafterWeights) -> Codebooks:
    """Return the selector's codebooks."""
    return Codebooks(*(weights.own_tensors[f"{SELECTOR}.{name}"] for name in (PREDECESSORS, SUCCESSORS)))


class CandidateSelector:
    """Chooses drafts one after the other among the likeliest ids of each row. ``projection``: [rank, hidden]."""

    def __init__(self, config: SelectorConfig, codebooks: Codebooks, projection: Matrix) -> None:
        self._config, self._codebooks, self._projection = config, codebooks, projection

    @torch.no_grad()
    def walk(
        self, hidden: torch.Tensor, logits: torch.Tensor, anchor: torch.Tensor, choose: Choose
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids [m] chosen row by row, each by the one before it, and their margins.

        Args:
            hidden, logits: [m, hidden] and [m, V], of the drafted positions. anchor: [1] the id before the first.
            choose: see ``kernels.candidate_walk.walk``.
        """
        projected = linear(hidden, self._projection)
        return walk(*candidates(self._config, logits), projected, self._codebooks, anchor, choose)


class DFlash2Model(DrafterModel):
    """A DFlash 2 drafter's forward: a convolution stands around each sublayer."""

    config: DFlash2Config

    def _around(self, index: int, part: Part, sublayer: Sublayer, rows: torch.Tensor) -> torch.Tensor:
        """Convolve a sublayer's input rows, which also decide the kernels for its output."""
        config, weights, at = self.config, self._weights, f"layers.{index}.{part}_conv"
        base, projection = weights.own_tensors[f"{at}.{BASE}"], weights.own_matrices[f"{at}.{KERNELS}"]
        own = linear(rows, projection).view(len(rows), 2, config.convolution.kernel_size, -1)
        result = sublayer(block_convolution_reference(rows, base[0], own[:, 0]))
        return block_convolution_reference(result, base[1], own[:, 1])

    @property
    def selector(self) -> CandidateSelector:
        """Return chooses its ids."""
        config, weights = self.config, self._weights
        projection = weights.own_matrices[f"{SELECTOR}.{PROJECTION}"]
        return CandidateSelector(config.selector, codebooks_of(weights), projection)


class DFlash2Proposer(DFlashProposer):
    """It scales the target's stored rows itself, and takes its logits without the soft cap."""

    model = DFlash2Model
    drafter: DFlash2Model

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.target.stored_rows(ids) * self.drafter.config.embedding_scale

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.target.uncapped(hidden.to(self.target.dtype))

    def _choose(
        self,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        anchor: torch.Tensor,
        sampler: Sampler,
        noise: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def choose(row: int, scores: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return sampler.draft(scores, None if noise is None else noise[row : row + 1, ids])

        return self.drafter.selector.walk(hidden, logits, anchor, choose)


PROPOSER = DFlash2Proposer
