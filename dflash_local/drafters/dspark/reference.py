"""A DSpark drafter in plain PyTorch: its choice by the id before, and tables that its checkpoint may bring."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from dflash_local.drafters.dflash.reference import DFlashProposer, DrafterModel
from dflash_local.drafters.dspark.layout import CONFIDENCE, EMBEDDING, FOLLOWING, HEAD, PREVIOUS
from dflash_local.kernels.markov_walk import ConfidenceHead, MarkovWeights, walk
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.drafter_weights import DrafterWeights
from dflash_local.models.transformers_target import TransformersTarget

if TYPE_CHECKING:
    from dflash_local.engine.sampling import Sampler

SLICE = 2**13  # rows of a table that are compared at a time


class Tables(NamedTuple):
    """A drafter's own embedding and head [V, H], None where its target's serve; and what tells how sure a draft is."""

    embedding: torch.Tensor | None = None
    head: torch.Tensor | None = None
    confidence: ConfidenceHead | None = None


BORROWED = Tables()


def own_tables(
    files: Checkpoint,
    embedding: torch.Tensor | None,
    head: torch.Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Tables:
    """Return the tables of a checkpoint that differ from the target's ``embedding`` and ``head``, and its confidence
    head.

    They are trained as copies of them, which then need no room: they are read to host memory, and compared by slices.

    Args:
        embedding, head: None where the target's is kept as codes that nothing can be compared with: it serves then,
            since no plan has room for a plain one beside it.
    """

    def differing(name: str, target: torch.Tensor | None) -> torch.Tensor | None:
        if target is None or name not in files.tensors:
            return None
        ((_, own),) = files.read(names=[name])
        return None if _equal(own, target) else own.to(device, dtype)

    own = differing(EMBEDDING, embedding)
    if (
        own is not None and embedding is not None and len(own) < len(embedding)
    ):  # padding: rows for all ids that the target may choose
        own = torch.cat((own, embedding[len(own) :].to(device, dtype)))
    names = [f"{CONFIDENCE}.weight", f"{CONFIDENCE}.bias"]
    found = dict(files.read(names=[name for name in names if name in files.tensors]))
    parts = [found[name].to(device, torch.float32) for name in names if name in found]
    return Tables(own, differing(HEAD, head), ConfidenceHead(*parts) if len(parts) == 2 else None)


def _equal(own: torch.Tensor, target: torch.Tensor) -> bool:
    """Compare tables in the target's dtype."""
    if own.shape != target.shape or not target.is_floating_point():
        return False
    pairs = zip(own.split(SLICE), target.split(SLICE), strict=True)
    return all(torch.equal(copy.to(part.device, part.dtype), part) for copy, part in pairs)


def markov_of(weights: DrafterWeights) -> MarkovWeights | None:
    """Return the Markov head's matrices; None where there is no such head."""
    found = weights.own_tensors
    return MarkovWeights(found[PREVIOUS], found[FOLLOWING]) if found else None


class DSparkProposer(DFlashProposer):
    """It takes the target's stored rows as they are, and its logits without the soft cap, where ``tables`` has none."""

    def __init__(
        self,
        drafter: DrafterModel,
        target: TransformersTarget,
        draft_window: int | None = None,
        tables: Tables = BORROWED,
    ) -> None:
        self._tables, self._markov = tables, markov_of(drafter._weights)
        super().__init__(drafter, target, draft_window)

    @classmethod
    def bound(
        cls, drafter: DrafterModel, files: Checkpoint, target: TransformersTarget, draft_window: int | None
    ) -> DSparkProposer:
        tables = own_tables(files, *target.tables, drafter.device, drafter.dtype)
        return cls(drafter, target, draft_window, tables)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        own = self._tables.embedding
        return self.target.stored_rows(ids) if own is None else functional.embedding(ids, own)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        own = self._tables.head
        if own is None:
            return self.target.uncapped(hidden.to(self.target.dtype))
        return functional.linear(hidden, own)[:, : self.target.vocab_size]

    def _choose(
        self,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        anchor: torch.Tensor,
        sampler: Sampler,
        noise: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._markov is None:
            return super()._choose(hidden, logits, anchor, sampler, noise)

        def choose(row: int, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return sampler.draft(scores, None if noise is None else noise[row : row + 1])

        ids, margins = walk(logits, self._markov, anchor, choose)
        confidence = self._tables.confidence
        return ids, margins if confidence is None else confidence.of_drafts(hidden, self._markov, anchor, ids)


PROPOSER = DSparkProposer
