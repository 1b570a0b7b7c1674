"""Targets in GGUF files on a GPU: read as on the CPU, bit by bit, and multiplied by the kernels, alone or in blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_local.config.quantization import GGUF_TYPES
from dflash_local.kernels.few_row_gemm import FewRowConfig
from dflash_local.kernels.fragment_packing import FragmentWeight
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fused.invariance import settle_rows
from dflash_local.models.fused.kernel_choice import choose_configs, choose_experts
from dflash_local.models.fused.moe import MoEWeights
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.fused.weights import TargetWeights, read_weights
from dflash_local.models.target_facts import TargetFacts
from tests.exact_steps import check_steps
from tests.gguf_models import MODELS, all_of, mixed, write_model

pytestmark = pytest.mark.gpu
PROMPT, ROWS = 11, 8


def decoded(weights: TargetWeights) -> torch.Tensor:
    """What all matrices stand for, one behind the other: on a card a few plain rows are one product with others."""
    matrices = [product.weight for product in (*weights.products, weights.head, weights.table)]
    for part in weights.parts:
        if isinstance(part, MoEWeights):
            matrices += [part.experts.gate_up.weight, part.experts.down.weight]
    values: list[torch.Tensor] = []
    for weight in matrices:
        values.append(weight if isinstance(weight, torch.Tensor) else weight.dequantized())
        values += [weight.tail_rows()] if isinstance(weight, FragmentWeight) else []
    return torch.cat([value.flatten().float() for value in values]).cpu()


def read(file: Path, device: str, dtype: torch.dtype) -> tuple[TargetWeights, TargetFacts]:
    checkpoint = Checkpoint.open(file)
    facts = TargetFacts.from_checkpoint(checkpoint)
    return read_weights(checkpoint, facts, torch.device(device), dtype), facts


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_is_read_as_on_the_cpu(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Through the ring, decoded or taken apart on the card; in bfloat16 packed as well."""
    file = write_model(tmp_path / "model.gguf", name, mixed)
    (here, _), (there, _) = (read(file, device, dtype) for device in ("cpu", "cuda"))
    packed = [product.weight for product in there.products if isinstance(product.weight, FragmentWeight)]
    assert bool(packed) == (dtype == torch.bfloat16)
    assert torch.equal(decoded(here), decoded(there))


def logits(file: Path, device: str, dtype: torch.dtype) -> torch.Tensor:
    weights, facts = read(file, device, dtype)
    if device == "cuda":
        choose_configs(weights.measured, ROWS)
        choose_experts(weights.parts, ROWS, exact=False)
    target = FusedTarget(weights, facts.model, (0, 1), 64, ROWS)
    target.prefill(torch.arange(5, 5 + PROMPT, device=device), False)
    rows = target.verify(torch.arange(20, 20 + ROWS, device=device), False).hidden
    return target.head(rows).float().cpu()


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", name, mixed)
    want, found = logits(file, "cpu", torch.float32), logits(file, "cuda", torch.bfloat16)
    rounding = (logits(file, "cpu", torch.bfloat16) - want).norm()  # of the activations alone
    assert (found - want).norm() < 1.5 * rounding + 1e-2 * want.norm()


@pytest.mark.parametrize("dtype", GGUF_TYPES)
def test_a_drafted_block_has_the_bits_of_single_steps(dtype: str, tmp_path: Path) -> None:
    """With the embedding as the head."""
    file = write_model(tmp_path / "model.gguf", "qwen3", all_of(dtype), tied=True)
    weights, facts = read(file, "cuda", torch.bfloat16)
    choose_configs(weights.measured, ROWS)
    settle_rows([*weights.products, weights.head], ROWS)
    packed = [product for product in weights.measured if isinstance(product.weight, FragmentWeight)]
    assert len(packed) == len(weights.measured) and all(isinstance(each.config, FewRowConfig) for each in packed)
    ids = torch.arange(5, 5 + PROMPT + 3 * ROWS, device="cuda") % facts.model.vocab_size
    check_steps(weights, facts, ids, PROMPT, ROWS)
