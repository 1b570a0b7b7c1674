"""Strict mode over quantised targets on a GPU: a row's bits in a block, alone and in its own pass are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_local.kernels.few_row_gemm import FewRowConfig
from dflash_local.kernels.fragment_packing import FragmentWeight
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fused.invariance import settle_rows
from dflash_local.models.fused.kernel_choice import choose_configs
from dflash_local.models.fused.weights import TargetWeights, read_weights
from dflash_local.models.target_facts import TargetFacts
from tests.exact_steps import check_steps
from tests.families import save_model
from tests.quantised_checkpoints import DIALECTS, fp8_blocks, quantise

pytestmark = pytest.mark.gpu
ROWS, PROMPT, SINK = 8, 11, 5
FORMATS = (
    "gptq", "auto_round", "awq", "pack_quantized_zeros", "gptq_8", "int_quantized", "fp8", "float_quantized_channel",
    "modelopt_nvfp4", "mxfp4_pack_quantized",
)  # fmt: skip


def spoil(folder: Path) -> None:
    """What real activations have and noise has not: channels a hundred times larger, and a first token that all see."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith("embed_tokens.weight"):
                tensor[:, 3] *= 100
                tensor[SINK] *= 30
            elif name.endswith("down_proj.weight"):
                tensor[7] *= 100
        save_file(tensors, file, metadata={"format": "pt"})


def read(folder: Path) -> tuple[TargetWeights, TargetFacts]:
    checkpoint = Checkpoint.open(folder)
    facts = TargetFacts.from_checkpoint(checkpoint)
    weights = read_weights(checkpoint, facts, torch.device("cuda"), torch.bfloat16)
    choose_configs(weights.products, ROWS)
    settle_rows([*weights.products, weights.head], ROWS)
    packed = [product for product in weights.products if isinstance(product.weight, FragmentWeight)]
    assert len(packed) > 4 and all(isinstance(product.config, FewRowConfig) for product in packed)
    return weights, facts


@pytest.mark.parametrize("dialect", FORMATS)
def test_a_drafted_block_has_the_bits_of_single_steps(
    dialect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DIALECTS, "fp8", fp8_blocks((128, 128)))  # which the kernels take
    save_model("qwen3_5", tmp_path / "twin", hidden_size=256, intermediate_size=512, head_dim=64)
    spoil(tmp_path / "twin")
    quantise(tmp_path / "twin", tmp_path / "quantised", dialect)
    weights, facts = read(tmp_path / "quantised")
    ids = torch.arange(SINK, SINK + PROMPT + 3 * ROWS, device="cuda") % facts.model.vocab_size
    check_steps(weights, facts, ids, PROMPT, ROWS)
