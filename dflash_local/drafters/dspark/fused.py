"""A DSpark drafter over static buffers: its choice by the id before, and tables of its own."""

from __future__ import annotations

import torch

from dflash_local.drafters.dflash.fused import DFlashBlocks
from dflash_local.drafters.dflash.layout import DFlashConfig
from dflash_local.drafters.dspark.reference import BORROWED, Tables, markov_of, own_tables
from dflash_local.kernels.allocate import Tensors
from dflash_local.kernels.markov_walk import MarkovWalk
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.drafter_weights import DrafterWeights
from dflash_local.models.fused.linear import Linear
from dflash_local.models.fused.target import FusedTarget


class DSparkBlocks(DFlashBlocks):
    """It takes the target's stored rows as they are, and its logits without the soft cap, where ``tables`` has none."""

    def __init__(
        self,
        config: DFlashConfig,
        weights: DrafterWeights,
        target: FusedTarget,
        draft_window: int | None = None,
        tables: Tables = BORROWED,
    ) -> None:
        self._confidence = tables.confidence
        super().__init__(config, weights, target, draft_window)
        self._embedding_scale = 1.0
        if tables.embedding is not None:
            self._embedding = tables.embedding
        if tables.head is not None:
            self.stored_head = Linear(tables.head[: target.vocab_size])
            self.use_head(self.stored_head)

    @classmethod
    def bound(
        cls,
        config: DFlashConfig,
        weights: DrafterWeights,
        target: FusedTarget,
        files: Checkpoint,
        draft_window: int | None,
    ) -> DSparkBlocks:
        tables = own_tables(files, *target.tables, target.device, target.dtype)
        return cls(config, weights, target, draft_window, tables)

    def _bind_own(self, weights: DrafterWeights, tensors: Tensors) -> None:
        self._markov = markov_of(weights)
        if self._markov is not None:
            room = tensors.take(self.config.own_buffers(self.target.vocab_size, self.target.spec.dtype))
            drafted = self._hidden[self.config.first_draft :]
            self.selector = MarkovWalk(self._markov, self.target.tokens[:1], room, self._confidence, drafted)

    def _finish_own(self, drafted: torch.Tensor) -> None:
        """Leave the logits as they are: its head's have no cap."""

    def block_bytes(self, context: int) -> int:
        """Add the Markov head, which is read for each draft."""
        read = 0 if self._markov is None else self._markov.following[: self.head.out_features].nbytes
        return super().block_bytes(context) + len(self.drafts) * read


BLOCKS = DSparkBlocks
