"""Which experts a block's rows take while a mixture with random weights is measured.

Random weights make the rows of a block alike, so that they choose more alike than rows of text do. Two routings are set
instead: uniform, each row's experts drawn by themselves, which is the worst case; correlated, all rows' experts among
k * rows^0.75, as was measured of rows of one block elsewhere (Laguna XS 2.1: 39 of 256 experts at 8 rows, 59 at 15).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from dflash_local.models.fused.moe import MoE

Routing = Literal["uniform", "correlated"]
EXPONENT = 0.75
FAVOUR = 20.0  # of the experts that a block's rows choose among, in logits of about one


def set_routing(parts: Sequence[MoE], rows: int, routing: Routing) -> None:
    """Fix what a block of so many rows is routed by, each layer's by itself."""
    for seed, part in enumerate(parts):
        config, device = part.weights.config, part.weights.experts.device
        generator = torch.Generator(device).manual_seed(seed)
        columns = config.num_experts + config.shared_gate
        logits = torch.randn(rows, columns, device=device, generator=generator)
        if routing == "correlated":
            chosen = torch.randperm(config.num_experts, device=device, generator=generator)
            logits[:, chosen[: round(part.weights.mixture.top_k * rows**EXPONENT)]] += FAVOUR
        part.fixed_logits = logits.to(part.weights.router.products[0].weight.dtype)


def expert_bytes(parts: Sequence[MoE]) -> int:
    """Of the experts that the last block's rows took, a shared one among them included."""
    total = 0.0
    for part in parts:
        experts = part.weights.experts
        of_one = (experts.gate_up.weight.nbytes + experts.down.weight.nbytes) / experts.gate_up.experts
        total += of_one * (int(part.distinct_experts) + experts.joined)
    return round(total)
