"""Lookup drafts for the reference engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dflash_local.drafters.engines import Drafts
from dflash_local.drafters.lookup.layout import TextIndex
from dflash_local.load_config import LoadConfig
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.transformers_target import TransformersTarget

if TYPE_CHECKING:
    from dflash_local.engine.sampling import Sampler


class LookupProposer:
    """An index of the text, which is all the context that there is."""

    def __init__(self, device: torch.device) -> None:
        self.length, self._device, self._index = 0, device, TextIndex()

    @classmethod
    def load(
        cls, files: Checkpoint, target: TransformersTarget, options: LoadConfig, packed: bool
    ) -> tuple[LookupProposer, tuple[str, ...]]:
        """See ``drafters.engines.LoadableProposer``."""
        return cls(target.device), ()

    def extend(self, taps: torch.Tensor, start: int) -> None:
        self.length = start + len(taps)

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)
        self._index.truncate(length)

    def propose(self, ids: Sequence[int], count: int, sampler: Sampler, noise: torch.Tensor | None) -> Drafts:
        drafts, confidence = self._index.draft(ids, count)
        found = torch.tensor(drafts, dtype=torch.long, device=self._device)
        return Drafts(found, torch.full((len(drafts),), confidence))


PROPOSER = LookupProposer
