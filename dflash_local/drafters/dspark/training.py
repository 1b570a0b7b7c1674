"""A DSpark drafter as a module that can be trained: with its Markov head in the loss, behind the right ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from dflash_local.drafters.dflash.training import DraftModule, Embed
from dflash_local.drafters.dspark.layout import DSparkConfig
from dflash_local.drafters.dspark.reference import own_tables
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.head_loss import head_loss

if TYPE_CHECKING:
    from dflash_local.engine.runner import ScoringTarget


class MarkovHead(nn.Module):
    """A row by id of the one before, and one by id of what follows it."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1, self.markov_w2 = nn.Embedding(vocab_size, rank), nn.Embedding(vocab_size, rank)


class DSparkModule(DraftModule):
    """Its confidence head is not trained: it decides no id."""

    config: DSparkConfig

    def __init__(self, config: DSparkConfig, target_hidden: int) -> None:
        super().__init__(config, target_hidden)
        if config.markov_rank:
            self.markov_head = MarkovHead(config.vocab_size, config.markov_rank)

    def loss(
        self,
        hidden: torch.Tensor,
        head: torch.Tensor,
        before: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.config.markov_rank:
            return super().loss(hidden, head, before, labels, weights)
        rows, table = self.markov_head.markov_w1(before), self.markov_head.markov_w2.weight[: len(head)]
        return head_loss(labels, weights, hidden, head, rows.to(head.dtype), table.to(head.dtype))

    def learning(self) -> list[nn.Module]:
        return [*super().learning(), *([self.markov_head] if self.config.markov_rank else [])]

    def borrowed(self, target: ScoringTarget, files: Checkpoint) -> tuple[Embed, torch.Tensor | None]:
        """It takes the target's stored rows as they are, where it has none of its own. Its own stay on the host."""
        own = own_tables(files, *target.tables, torch.device("cpu"), target.dtype)
        table, head = own.embedding, None if own.head is None else own.head[: target.vocab_size]
        return target.stored_rows if table is None else lambda ids: functional.embedding(ids.cpu(), table), head


MODULE = DSparkModule
