"""Fused products whose parts lie in different formats: read from a checkpoint and multiplied part by part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_local.config.quantization import WHOLE, StoredInt
from dflash_local.errors import CheckpointError
from dflash_local.layout.linear import UNQUANTIZED, WeightFormat, weight_format
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.fused.weights import read_weights
from dflash_local.models.target_facts import TargetFacts
from tests.families import save_model

CPU = torch.device("cpu")
INT8 = weight_format(StoredInt("int-quantized", WHOLE, bits=8))
# One part of attention's three, of the Gated-DeltaNet inputs those that checkpoints quantise, one half of a gate.
CODED = ("q_proj", "in_proj_qkv", "in_proj_z", "gate_proj", "down_proj")


def format_of(module: str) -> WeightFormat:
    return INT8 if module.endswith(CODED) else UNQUANTIZED


def rounded(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, K] int8 and scales [N, 1], as published files have them."""
    scales = matrix.abs().amax(1, keepdim=True) / 127
    return (matrix / scales).round().to(torch.int8), scales


def rewrite(folder: Path, coded: bool) -> None:
    """Put codes, or what they stand for, in place of the chosen matrices."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.removesuffix(".weight").endswith(CODED)]:
        codes, scales = rounded(tensors.pop(name).float())
        if coded:
            tensors |= {name: codes, f"{name}_scale": scales}
        else:
            tensors[name] = codes.float() * scales
    save_file(tensors, file, metadata={"format": "pt"})


def target(folder: Path, coded: bool) -> FusedTarget:
    checkpoint = Checkpoint.open(folder)
    facts = TargetFacts.from_checkpoint(checkpoint)
    weights = read_weights(
        checkpoint, facts, CPU, torch.float32, format_of=format_of if coded else lambda _module: UNQUANTIZED
    )
    return FusedTarget(weights, facts.model, (0, 2), 64, 4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
def test_parts_of_two_formats_give_what_their_numbers_give(family: str, tmp_path: Path) -> None:
    found = []
    for coded in (True, False):
        folder = tmp_path / str(coded)
        folder.mkdir()
        save_model(family, folder)
        rewrite(folder, coded)
        model = target(folder, coded)
        prompt = torch.arange(5, 16)
        first = model.prefill(prompt, True)
        block = model.verify(torch.tensor([3, 1, 4, 1]), True)
        assert first.taps is not None and block.taps is not None
        found.append((first.hidden, first.taps, block.hidden, block.taps, model.head(block.hidden)))
    products = model.weights.layers[-1].products
    assert len(products) == 4, "of one format they are four products"
    for coded_result, want in zip(*found, strict=True):
        assert torch.allclose(coded_result, want, atol=2e-4, rtol=1e-3)


def test_codes_where_numbers_are_wanted_are_refused(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name] = rounded(tensors[name].float())[0]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name} is stored as I8, expected torch.float32"):
        target(tmp_path, coded=False)
