"""What a DSpark drafter computes beside a DFlash one, and the tables that its checkpoint may bring."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional

from dflash_local.config.dspark import EMBEDDING, HEAD
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.drafter_weights import MarkovWeights

SLICE = 2**13  # rows of a table that are compared at a time
Choose = Callable[[int, torch.Tensor], torch.Tensor]


class MarkovHead:
    """Chooses drafts one after the other, each by its row's logits and the id before it."""

    def __init__(self, weights: MarkovWeights) -> None:
        self._weights = weights

    def following(self, previous: torch.Tensor, ids: int) -> torch.Tensor:
        """What the id ``previous`` [1] adds to the logits of the first so many ids: [1, ids] in float32."""
        return functional.linear(self._weights.previous[previous], self._weights.following[:ids]).float()

    @torch.no_grad()
    def walk(self, logits: torch.Tensor, anchor: torch.Tensor, choose: Choose) -> torch.Tensor:
        """The ids [m] chosen row by row.

        Args:
            logits: [m, V] of the drafted positions. anchor: [1] the id before the first.
            choose: of a row's number and its scores [1, V] in float32, the id [1].
        """
        previous, found = anchor, []
        for row, own in enumerate(logits.float().split(1)):
            previous = choose(row, own + self.following(previous, own.shape[1]))
            found.append(previous)
        return torch.cat(found) if found else anchor[:0]


class Tables(NamedTuple):
    """A drafter's own embedding and head [V, H]; None where its target's serve."""

    embedding: torch.Tensor | None = None
    head: torch.Tensor | None = None


def own_tables(
    files: Checkpoint, embedding: torch.Tensor, head: torch.Tensor, device: torch.device, dtype: torch.dtype
) -> Tables:
    """The tables of a checkpoint that differ from the target's ``embedding`` and ``head``.

    They are trained as copies of them, which then need no room: they are read to host memory, and compared by slices.
    """

    def differing(name: str, target: torch.Tensor) -> torch.Tensor | None:
        if name not in files.tensors:
            return None
        ((_, own),) = files.read(names=[name])
        return None if _equal(own, target) else own.to(device, dtype)

    return Tables(differing(EMBEDDING, embedding), differing(HEAD, head))


def _equal(own: torch.Tensor, target: torch.Tensor) -> bool:
    """In the target's dtype."""
    if own.shape != target.shape or not target.is_floating_point():
        return False
    pairs = zip(own.split(SLICE), target.split(SLICE), strict=True)
    return all(torch.equal(copy.to(part.device, part.dtype), part) for copy, part in pairs)
