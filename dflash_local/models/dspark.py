"""The tables that a DSpark drafter's checkpoint may bring."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dflash_local.config.dspark import EMBEDDING, HEAD
from dflash_local.models.checkpoint import Checkpoint

SLICE = 2**13  # rows of a table that are compared at a time


class Tables(NamedTuple):
    """A drafter's own embedding and head [V, H]; None where its target's serve."""

    embedding: torch.Tensor | None = None
    head: torch.Tensor | None = None


BORROWED = Tables()


def own_tables(
    files: Checkpoint,
    embedding: torch.Tensor | None,
    head: torch.Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Tables:
    """The tables of a checkpoint that differ from the target's ``embedding`` and ``head``.

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
    return Tables(own, differing(HEAD, head))


def _equal(own: torch.Tensor, target: torch.Tensor) -> bool:
    """In the target's dtype."""
    if own.shape != target.shape or not target.is_floating_point():
        return False
    pairs = zip(own.split(SLICE), target.split(SLICE), strict=True)
    return all(torch.equal(copy.to(part.device, part.dtype), part) for copy, part in pairs)
