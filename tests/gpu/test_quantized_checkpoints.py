"""Quantized checkpoints on a GPU: read as on the CPU, bit by bit, and multiplied alike in both engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.fused.weights import TargetWeights, read_weights
from dflash_local.models.load_target import Placement, load_target
from dflash_local.models.target_facts import TargetFacts
from tests.quantized_checkpoints import DIALECTS, save_quantized

pytestmark = pytest.mark.gpu
PROMPT = torch.arange(5, 16)


def tensors(weights: TargetWeights) -> Iterator[torch.Tensor]:
    for product in weights.products:
        if isinstance(product.weight, torch.Tensor):
            yield product.weight
        else:
            for name in ("codes", "scales", "zeros", "row_scales"):
                found = getattr(product.weight, name, None)
                if found is not None:
                    yield found.view(torch.uint8)


def reference_logits(checkpoint: Checkpoint) -> torch.Tensor:
    model = load_target(checkpoint, TargetFacts.from_checkpoint(checkpoint), Placement("cuda", torch.float32))
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=PROMPT.cuda()[None], use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_quantized_target_is_the_same_on_a_gpu(dialect: str, tmp_path: Path) -> None:
    folder, twin = save_quantized("qwen3_5", tmp_path, dialect)
    checkpoint = Checkpoint.open(folder)
    facts = TargetFacts.from_checkpoint(checkpoint)
    here, there = (read_weights(checkpoint, facts, torch.device(kind), torch.float32) for kind in ("cpu", "cuda"))
    assert all(torch.equal(one, two.cpu()) for one, two in zip(tensors(here), tensors(there), strict=True))
    target = FusedTarget(there, facts.model, (0, 2), 64, 4)
    logits = target.head(target.prefill(PROMPT.cuda(), False).hidden)
    decoded, want = reference_logits(checkpoint), reference_logits(Checkpoint.open(twin))
    assert torch.equal(decoded, want)
    assert torch.allclose(logits, want, atol=2e-3, rtol=1e-2)
    assert torch.equal(logits.argmax(-1), want.argmax(-1))
