"""Which experts a block's rows take while something is measured: drawn, instead of chosen by the routers.

Uniform: each row's by themselves, the worst case. Correlated: all rows' among k * rows^0.75, as measured elsewhere
(Laguna XS 2.1: 39 of 256 experts at 8 rows, 59 at 15). Same: all rows take one row's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from dflash_local.models.fused.moe import MoE

FixedRouting = Literal["uniform", "correlated", "same"]
EXPONENTS = {"correlated": 0.75, "same": 0.0}  # of rows, in the experts that they choose among
FAVOUR = 20.0  # of these, in logits of about one


@contextmanager
def fixed_routing(parts: Sequence[MoE], rows: int, routing: FixedRouting) -> Iterator[None]:
    """Within, each layer routes a block of so many rows by drawn logits; what is recorded reads tensors gone behind."""
    before = [part.fixed_logits for part in parts]
    try:
        for seed, part in enumerate(parts):
            part.fixed_logits = _logits(part, rows, routing, seed)
        yield
    finally:
        for part, logits in zip(parts, before, strict=True):
            part.fixed_logits = logits


def _logits(part: MoE, rows: int, routing: FixedRouting, seed: int) -> torch.Tensor:
    config, device = part.weights.config, part.weights.experts.device
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(rows, config.num_experts + config.shared_gate, device=device, generator=generator)
    if routing in EXPONENTS:
        chosen = torch.randperm(config.num_experts, device=device, generator=generator)
        logits[:, chosen[: round(part.weights.mixture.top_k * rows ** EXPONENTS[routing])]] += FAVOUR
    return logits.to(part.weights.router.products[0].weight.dtype)
