"""Strict mode: a text in steps of any size has the same bits."""

from __future__ import annotations

import torch

from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.fused.weights import TargetWeights
from dflash_local.models.target_facts import TargetFacts


def check_steps(weights: TargetWeights, facts: TargetFacts, ids: torch.Tensor, prompt: int, rows: int) -> torch.Tensor:
    """The logits behind a prompt, one token at a time, which are those of steps of up to so many rows."""

    def logits(step: int) -> torch.Tensor:
        target = FusedTarget(weights, facts.model, (0, 2), 128, rows, exact=True)
        target.prefill(ids[:prompt], False)
        found = []
        for at in range(prompt, len(ids), step):
            part = ids[at : at + step]
            found.append(target.head(target.verify(part, False).hidden))
            target.commit(len(part))
        return torch.cat(found)

    want = logits(1)
    assert want.isfinite().all() and want.std() > 0
    for step in (2, 3, rows):
        assert torch.equal(logits(step), want), step
    return want
