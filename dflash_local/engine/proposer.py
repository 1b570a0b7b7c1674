"""Drafts from a DFlash drafter: one pass over [anchor, MASK x (B-1)], head borrowed from the target."""

from __future__ import annotations

import torch

from dflash_local.engine.sampling import Sampler
from dflash_local.models.drafter import Drafter
from dflash_local.models.transformers_target import TransformersTarget


class DFlashProposer:
    """A drafter with its context cache, bound to the target whose embedding and head it borrows.

    The block is always drafted at its trained size, since bidirectional layers see all of it; a
    shorter request takes the first slots.
    """

    def __init__(self, drafter: Drafter, target: TransformersTarget, draft_window: int | None = None) -> None:
        self.drafter, self.target = drafter, target
        self._cache = drafter.new_cache(draft_window=draft_window)
        # The mask row never changes: embed the whole block once, then only the anchor's row.
        ids = torch.full((drafter.config.block_size,), drafter.config.mask_token_id, device=target.device)
        self._block = target.embed(ids).to(drafter.dtype).clone()

    @property
    def length(self) -> int:
        return self._cache.length

    def extend(self, taps: torch.Tensor, start: int) -> None:
        """Write the context K/V of newly committed tokens, once."""
        self.drafter.write_context(self._cache, taps.to(self.drafter.dtype), start)

    def truncate(self, length: int) -> None:
        if length < self._cache.length:
            self._cache.truncate(length)

    def propose(
        self, anchor: int, start: int, count: int, sampler: Sampler, noise: torch.Tensor | None
    ) -> torch.Tensor:
        anchor_id = torch.tensor([anchor], device=self.target.device)
        self._block[:1] = self.target.embed(anchor_id)
        hidden = self.drafter.draft_hidden(self._cache, self._block, start)
        logits = self.target.head(hidden[1 : count + 1].to(self.target.dtype))
        return sampler.draft(logits, None if noise is None else noise[:count])
