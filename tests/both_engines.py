"""A checkpoint's greedy tokens and logits on the CPU in float32, by either engine's own layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.fused.weights import TargetWeights, read_weights
from dflash_local.models.load_target import Placement, load_target
from dflash_local.models.target_facts import TargetFacts

CPU = torch.device("cpu")
PROMPT = torch.arange(5, 16)
TOKENS = 12


def weights_of(folder: Path) -> tuple[TargetWeights, TargetFacts]:
    checkpoint = Checkpoint.open(folder)
    facts = TargetFacts.from_checkpoint(checkpoint)
    return read_weights(checkpoint, facts, CPU, torch.float32), facts


def fused(folder: Path) -> FusedTarget:
    weights, facts = weights_of(folder)
    return FusedTarget(weights, facts.model, (0, 2), 64, 4)


def fused_tokens(folder: Path) -> list[int]:
    model = fused(folder)
    token = int(model.head(model.prefill(PROMPT, False).hidden[-1:]).argmax())
    found = [token]
    while len(found) < TOKENS:
        row = model.verify(torch.tensor([found[-1]]), False).hidden
        model.commit(1)
        found.append(int(model.head(row).argmax()))
    return found


def reference(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    checkpoint = Checkpoint.open(folder)
    return load_target(checkpoint, TargetFacts.from_checkpoint(checkpoint), Placement("cpu", dtype, **options))


def reference_tokens(folder: Path) -> list[int]:
    model, ids = reference(folder), PROMPT.tolist()
    for _ in range(TOKENS):
        with torch.inference_mode():
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def logits(folder: Path) -> torch.Tensor:
    model = fused(folder)
    return model.head(model.prefill(PROMPT, False).hidden)
