"""Quantised checkpoints on a GPU: read as on the CPU, bit by bit, and multiplied alike in both engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.decoded_tensors import decoded_tensors
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.fused.weights import TargetWeights, read_weights
from dflash_local.models.load_target import Placement, load_target
from dflash_local.models.target_facts import TargetFacts
from tests.quantised_checkpoints import DIALECTS, save_quantised
from tests.quantised_pairs import STORED, check_text_of_decoded_weights

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
def test_a_quantised_target_is_the_same_on_a_gpu(dialect: str, tmp_path: Path) -> None:
    folder, twin = save_quantised("qwen3_5", tmp_path, dialect)
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


@pytest.mark.parametrize("dialect", ["gptq_zeros", "fp8", "int_quantized", "modelopt_nvfp4", "mxfp4_pack_quantized"])
def test_codes_stand_for_the_same_in_bfloat16(dialect: str, tmp_path: Path) -> None:
    """Where kernels would have them packed: the reference engine takes them as they are read."""
    folder, _ = save_quantised("qwen3", tmp_path, dialect, sizes={"hidden_size": 128})
    checkpoint = Checkpoint.open(folder)
    facts = TargetFacts.from_checkpoint(checkpoint)
    here, there = (decoded_tensors(checkpoint, facts, torch.device(kind), torch.bfloat16) for kind in ("cpu", "cuda"))
    assert all(torch.equal(here[name], there[name].cpu()) for name in here)


@pytest.mark.parametrize(("name", "dialect", "stored"), STORED)
def test_a_quantised_pair_writes_what_its_decoded_weights_write(
    name: str, dialect: str, stored: str, tmp_path: Path
) -> None:
    check_text_of_decoded_weights(name, dialect, stored, "cuda", tmp_path)
