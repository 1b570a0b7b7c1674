"""Which experts a block's rows take while a mixture with random weights is measured, and what they weigh.

Random weights make the rows of a block alike, so that they choose more alike than rows of text do: the routing is set
instead (``models.fused.fixed_routing``).
"""

from __future__ import annotations

from typing import Literal

from dflash_local.models.fused.target import FusedTarget

Routing = Literal["uniform", "correlated"]


def expert_bytes(target: FusedTarget, rows: int) -> int:
    """Of the experts that the last block's rows took, so many, a shared one among them included."""
    total = 0.0
    for part, distinct in zip(target.mixtures, target.distinct_of(rows), strict=True):
        experts = part.weights.experts
        of_one = (experts.gate_up.weight.nbytes + experts.down.weight.nbytes) / experts.gate_up.experts
        total += of_one * (distinct + experts.joined * part.launches(rows))
    return round(total)
