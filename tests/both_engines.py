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


def facts_of(folder: Path, quantize: str | None = None) -> tuple[Checkpoint, TargetFacts]:
    checkpoint = Checkpoint.open(folder)
    return checkpoint, TargetFacts.from_checkpoint(checkpoint).quantized(quantize)


def weights_of(
    folder: Path, quantize: str | None = None, dtype: torch.dtype = torch.float32
) -> tuple[TargetWeights, TargetFacts]:
    checkpoint, facts = facts_of(folder, quantize)
    return read_weights(checkpoint, facts, CPU, dtype), facts


def fused(folder: Path, quantize: str | None = None) -> FusedTarget:
    weights, facts = weights_of(folder, quantize)
    return FusedTarget(weights, facts.model, (0, 2), 64, 4)


def fused_tokens(folder: Path, quantize: str | None = None) -> list[int]:
    model = fused(folder, quantize)
    token = int(model.head(model.prefill(PROMPT, False).hidden[-1:]).argmax())
    found = [token]
    while len(found) < TOKENS:
        row = model.verify(torch.tensor([found[-1]]), False).hidden
        model.commit(1)
        found.append(int(model.head(row).argmax()))
    return found


def reference(folder: Path, dtype: torch.dtype = torch.float32, quantize: str | None = None) -> Any:
    return load_target(*facts_of(folder, quantize), Placement("cpu", dtype))


def reference_tokens(folder: Path, quantize: str | None = None) -> list[int]:
    model, ids = reference(folder, quantize=quantize), PROMPT.tolist()
    for _ in range(TOKENS):
        with torch.inference_mode():
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def logits(folder: Path) -> torch.Tensor:
    model = fused(folder)
    return model.head(model.prefill(PROMPT, False).hidden)


def assert_alike(folder: Path, twin: Path) -> None:
    """Of a prompt and of a row behind it, both engines compute what the reference engine computes of the twin."""
    with torch.inference_mode():
        want, by_reference = (reference(each)(input_ids=PROMPT[None]).logits[0] for each in (twin, folder))
        model = fused(folder)
        rows = (model.prefill(PROMPT[:-1], False).hidden, model.verify(PROMPT[-1:], False).hidden)
        by_fused = torch.cat([model.head(each) for each in rows])
    for found in (by_reference, by_fused):
        torch.testing.assert_close(found, want, rtol=1e-3, atol=2e-4)
