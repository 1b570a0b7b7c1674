"""A DFlash 2 drafter as a module that can be trained: with its convolutions, and with its selector in the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from dflash_local.drafters.dflash.reference import Part, Sublayer
from dflash_local.drafters.dflash.training import DraftModule, Embed, Layer
from dflash_local.drafters.dflash2.layout import DFlash2Config
from dflash_local.kernels.block_convolution import block_convolution_reference
from dflash_local.kernels.candidate_walk import candidate_scores, candidates
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.head_loss import rows_at_once

if TYPE_CHECKING:
    from dflash_local.engine.runner import ScoringTarget


class ConvolutionModule(nn.Module):
    """The convolution around a sublayer."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        width, own = config.hidden_size, config.convolution
        self.block, self.size = config.draft_rows, own.kernel_size
        self.base_kernel = nn.Parameter(torch.zeros(2, own.kernel_size, width))
        self.kernel_projection = nn.Linear(width, own.kernels(width), bias=False)

    def forward(self, sublayer: Sublayer, rows: torch.Tensor) -> torch.Tensor:
        """Return the sublayer's output on rows [b, n, w] of blocks."""
        own = self.kernel_projection(rows).unflatten(1, (-1, self.block)).unflatten(-1, (2, self.size, -1))

        def convolved(values: torch.Tensor, side: int) -> torch.Tensor:
            blocks = values.unflatten(1, (-1, self.block))
            return block_convolution_reference(blocks, self.base_kernel[side], own[..., side, :, :]).flatten(1, 2)

        return convolved(sublayer(convolved(rows, 0)), 1)


class ConvolvedLayer(Layer):
    """A layer with a convolution around each sublayer."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.attention_conv, self.mlp_conv = ConvolutionModule(config), ConvolutionModule(config)

    def _around(self, part: Part, sublayer: Sublayer, rows: torch.Tensor) -> torch.Tensor:
        convolution = self.attention_conv if part == "attention" else self.mlp_conv
        return convolution(sublayer, rows)  # type: ignore[no-any-return]


class SelectorModule(nn.Module):
    """How well candidates follow the id before them."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        rank, vocab = config.selector.rank, config.selector.vocab_size
        self.predecessor_codebook, self.successor_codebook = nn.Embedding(vocab, rank), nn.Embedding(vocab, rank)
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def forward(self, hidden: torch.Tensor, before: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return scores [n, k] of candidates [n, k] for rows [n, w] behind the ids ``before`` [n]."""
        mixed = self.predecessor_codebook(before) * self.hidden_projection(hidden)
        return (self.successor_codebook(ids) @ mixed.unsqueeze(-1)).squeeze(-1)  # type: ignore[no-any-return]


class DFlash2Module(DraftModule):
    """Its loss is the cross entropy among the candidates of a row and the right id, as the selector scores them: an id
    whose logit rises becomes a candidate, so that no other needs a part in it.
    """

    layer = ConvolvedLayer
    config: DFlash2Config

    def __init__(self, config: DFlash2Config, target_hidden: int) -> None:
        super().__init__(config, target_hidden)
        self.candidate_selector = SelectorModule(config)

    def loss(
        self,
        hidden: torch.Tensor,
        head: torch.Tensor,
        before: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config.selector
        with torch.no_grad():
            parts = hidden.split(rows_at_once(head))
            found = torch.cat([candidates(config, part @ head.t())[1] for part in parts])
        ids = torch.cat((found, labels.unsqueeze(1)), 1)
        logits = (head[ids] @ hidden.unsqueeze(-1)).squeeze(-1)
        scores = candidate_scores(config, logits) + self.candidate_selector(hidden.float(), before, ids)
        likeliest = found.gather(1, scores[:, :-1].argmax(1, keepdim=True)).squeeze(1)
        right = ids == labels.unsqueeze(1)
        at = right.long().argmax(1)  # the first one; where that is a candidate, the last column says it again
        again = right & (at.unsqueeze(1) != torch.arange(ids.shape[1], device=ids.device))
        losses = functional.cross_entropy(scores.masked_fill(again, float("-inf")), at, reduction="none")
        return (losses * weights).sum(), likeliest

    def learning(self) -> list[nn.Module]:
        return [*super().learning(), self.candidate_selector]

    def borrowed(self, target: ScoringTarget, files: Checkpoint) -> tuple[Embed, torch.Tensor | None]:
        """It scales the target's stored rows itself."""
        return lambda ids: target.stored_rows(ids) * self.config.embedding_scale, None


MODULE = DFlash2Module
