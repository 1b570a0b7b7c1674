"""Targets in GGUF files on a GPU: read as on the CPU, bit by bit, and multiplied by the kernels, alone or in blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_local.kernels.fragment_packing import FragmentWeight
from dflash_local.models.fused.moe import MoEWeights
from dflash_local.models.fused.weights import TargetWeights, read_weights
from dflash_local.models.target_facts import TargetFacts
from tests.both_engines import facts_of
from tests.gguf_models import MODELS, mixed, write_model

pytestmark = pytest.mark.gpu


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
    checkpoint, facts = facts_of(file)
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
