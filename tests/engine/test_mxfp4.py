"""gpt-oss as it is published: experts in MXFP4, decoded to 16 or 32 bits at load, exactly."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_local.catalog.bundled import find
from dflash_local.engine import LoadConfig, Session, load
from dflash_local.errors import CheckpointError
from tests.engine_sessions import ask, random_prompt
from tests.families import VOCAB

EXPERTS, WIDTH, GROUP = 4, 64, 32
# e2m1: one sign, two exponent, one mantissa bit (OCP Microscaling Formats 1.0)
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def decoded(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """blocks [E, rows, groups, 16] and scales [E, rows, groups] to weights [E, rows, groups * 32]."""
    low, high = VALUES[(blocks & 15).long()], VALUES[(blocks >> 4).long()]
    pairs = torch.stack((low, high), -1).flatten(-2)  # the low nibble holds the even element
    return (pairs * torch.exp2(scales.float() - 127).unsqueeze(-1)).flatten(-2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random gpt-oss target whose experts are stored in MXFP4."""
    import transformers

    torch.manual_seed(0)
    yarn = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    config = transformers.GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
        rope_parameters=yarn,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=None,
        pad_token_id=None,
    )
    path = tmp_path_factory.mktemp("gpt-oss")
    transformers.GptOssForCausalLM(config).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        rows = tensors.pop(name).shape[2]  # in memory [E, in, out], stored by output row
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (EXPERTS, rows, WIDTH // GROUP, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 126, (EXPERTS, rows, WIDTH // GROUP), dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    whole = json.loads((path / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    whole["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (path / "config.json").write_text(json.dumps(whole))
    return path


def opened(folder: Path, dtype: str) -> Session:
    return load(find(str(folder)), LoadConfig(dtype=dtype, device="cpu", draft=False))


@pytest.mark.parametrize("name", ["(a+)+$", "(", "model.*.*.*.x", "**"])
def test_names_of_modules_are_no_regular_expressions(name: str, folder: Path, tmp_path: Path) -> None:
    """transformers takes them for some, and matches each module with each."""
    shutil.copytree(folder, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"].append(name)
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"leaves out '{re.escape(name)}', which is no name of a module"):
        opened(tmp_path / "other", "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_experts_are_decoded_exactly(folder: Path, dtype: str) -> None:
    stored = load_file(folder / "model.safetensors")
    model = opened(folder, dtype).runner.target.model
    for index, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            prefix = f"model.layers.{index}.mlp.experts.{name}"
            want = decoded(stored[f"{prefix}_blocks"], stored[f"{prefix}_scales"]).transpose(1, 2)
            got = getattr(layer.mlp.experts, name)
            assert got.dtype == getattr(torch, dtype)
            assert torch.equal(got.float(), want), prefix


def test_mxfp4_target_decodes_text(folder: Path) -> None:
    session = opened(folder, "float32")
    prompt = random_prompt(9)
    ids = list(prompt)
    model = session.runner.target.model
    with torch.inference_mode():
        for _ in range(12):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert ask(session, prompt, 12, mode="ar").ids == ids[len(prompt) :]
