"""Strict mode over stored formats on a GPU: a row's bits in a block, alone and in its own pass are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_local.config.quantization import GGUF_TYPES
from dflash_local.kernels.fragment_gemm import FragmentGemmConfig
from dflash_local.kernels.fragment_packing import FragmentWeight
from dflash_local.models.fused.kernel_choice import choose_configs, choose_experts, settle_rows
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.fused.weights import TargetWeights, read_weights
from tests.both_engines import facts_of
from tests.expert_pairs import sizes_of
from tests.families import save_model
from tests.gguf_models import all_of, write_model
from tests.quantized_checkpoints import DIALECTS, fp8_blocks, quantize_checkpoint

pytestmark = pytest.mark.gpu
ROWS, PROMPT, SINK = 8, 11, 5
FORMATS = (
    "gptq", "auto_round", "awq", "pack_quantized_zeros", "gptq_8", "int_quantized", "fp8", "float_quantized_channel",
    "modelopt_nvfp4", "mxfp4_pack_quantized",
)  # fmt: skip


@pytest.fixture(autouse=True)
def wide_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DIALECTS, "fp8", fp8_blocks((128, 128)))  # which the kernels take


def scale(folder: Path, factors: dict[str, tuple[slice | int | tuple[slice, int], float]]) -> None:
    """Multiply a part of each tensor whose name ends so."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            for ending, (part, factor) in factors.items():
                if name.endswith(ending):
                    tensor[part] *= factor
        save_file(tensors, file, metadata={"format": "pt"})


def check_steps(path: Path, experts: bool = False) -> tuple[torch.Tensor, TargetWeights, torch.Tensor]:
    """Assert that a text has the same logits in steps of any size; these, the weights, and the text."""
    checkpoint, facts = facts_of(path)
    weights = read_weights(checkpoint, facts, torch.device("cuda"), torch.bfloat16)
    choose_configs(weights.measured, ROWS)
    if experts:
        choose_experts(weights.parts, ROWS, exact=True)
    settle_rows([*weights.products, weights.head], ROWS)
    ids = torch.arange(SINK, SINK + PROMPT + 3 * ROWS, device="cuda") % facts.model.vocab_size

    def logits(step: int) -> torch.Tensor:
        target = FusedTarget(weights, facts.model, (0, 2), 128, ROWS, exact=True)
        target.prefill(ids[:PROMPT], False)
        found = []
        for part in ids[PROMPT:].split(step):
            found.append(target.head(target.verify(part, False).hidden))
            target.commit(len(part))
        return torch.cat(found)

    want = logits(1)
    assert want.isfinite().all() and want.std() > 0
    assert all(torch.equal(logits(step), want) for step in (2, 3, ROWS))
    return want, weights, ids


def check_packed(weights: TargetWeights, least: int) -> None:
    packed = [product for product in weights.measured if isinstance(product.weight, FragmentWeight)]
    assert len(packed) >= least and all(isinstance(product.config, FragmentGemmConfig) for product in packed)


@pytest.mark.parametrize("dialect", FORMATS)
def test_a_quantized_target(dialect: str, tmp_path: Path) -> None:
    """With what real activations have: channels a hundred times larger, and a first token that all see."""
    save_model("qwen3_5", tmp_path / "twin", hidden_size=256, intermediate_size=512, head_dim=64)
    scale(tmp_path / "twin", {"embed_tokens.weight": ((slice(None), 3), 100.0), "down_proj.weight": (7, 100.0)})
    scale(tmp_path / "twin", {"embed_tokens.weight": (SINK, 30.0)})
    quantize_checkpoint(tmp_path / "twin", tmp_path / "quantized", dialect)
    check_packed(check_steps(tmp_path / "quantized")[1], 5)


@pytest.mark.parametrize("dtype", GGUF_TYPES)
def test_a_gguf_target_whose_embedding_is_its_head(dtype: str, tmp_path: Path) -> None:
    _, weights, _ = check_steps(write_model(tmp_path / "model.gguf", "qwen3", all_of(dtype), tied=True))
    check_packed(weights, len(weights.measured))


@pytest.mark.parametrize(
    ("family", "dialect"),
    [("qwen3_moe", ""), ("qwen3_5_moe", ""), ("qwen3_next", ""), ("gpt_oss", ""), ("qwen3_5_moe", "gptq"),
     ("qwen3_5_moe", "fp8"), ("qwen3_moe", "mxfp4_pack_quantized")],
)  # fmt: skip
def test_a_mixture_of_experts(family: str, dialect: str, tmp_path: Path) -> None:
    folder = save_model(family, tmp_path / "plain", **sizes_of(family, 256))
    # Routers whose first expert weighs almost all: a tie between others then matters little.
    scale(folder, {".mlp.gate.weight": (slice(None), 20.0), ".mlp.router.weight": (slice(None), 20.0)})
    if dialect:
        quantize_checkpoint(folder, tmp_path / "quantized", dialect)
        folder = tmp_path / "quantized"
    want, _, ids = check_steps(folder, experts=True)
    # What a CPU makes of the same weights by PyTorch's products.
    checkpoint, facts = facts_of(folder)
    weights = read_weights(checkpoint, facts, torch.device("cpu"), torch.float32)
    plain = FusedTarget(weights, facts.model, (0, 2), 128, len(ids))
    plain.prefill(ids[:PROMPT].cpu(), False)
    wide = plain.head(plain.verify(ids[PROMPT:].cpu(), False).hidden)
    by_row = (want.cpu().float() - wide).norm(dim=1) / wide.norm(dim=1)
    assert by_row.median() < 0.15, "but for rows of which bfloat16 chooses another expert"
