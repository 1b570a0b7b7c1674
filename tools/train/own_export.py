"""A trained drafter as a DFlash folder: config.json and model.safetensors, in bfloat16 or in codes of eight bits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dflash_local.adapt.drafter_file import codes_of
from dflash_local.config.features import MLPConfig
from dflash_local.drafters.dflash.layout import DFlashConfig
from dflash_local.drafters.dflash.training import DraftModule
from tools.train.frozen_target import FrozenTarget

WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None, "dynamic": False}
CODES = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    "ignore": ["lm_head"],
}


def config_json(target: FrozenTarget, *, layers: int, taps: Sequence[int], block: int, mask_id: int) -> dict[str, Any]:
    """The config.json of a drafter as wide as its target, with the target's heads and rope base."""
    model = target.facts.model
    mlp = model.layers[0].mlp
    assert isinstance(mlp, MLPConfig) and model.rope is not None
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": block,
        "dflash_config": {"mask_token_id": mask_id, "target_layer_ids": list(taps)},
        "dtype": "bfloat16",
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": mlp.intermediate_size,
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": model.max_position_embeddings,
        "max_window_layers": layers,
        "num_attention_heads": target.heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": target.kv_heads,
        "num_target_layers": len(target.layers),
        "rms_norm_eps": model.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": model.rope.theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": model.vocab_size,
    }


def new_drafter(config: Mapping[str, Any], target_hidden: int, seed: int) -> DraftModule:
    """Fresh weights: deviation 0.02, of what adds to the residual stream less with each layer."""
    torch.manual_seed(seed)
    drafter = DraftModule(DFlashConfig.from_config(config, "the drafter in training"), target_hidden)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.01 if name == "fc.weight" else 0.02)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_((2 * len(drafter.layers)) ** -0.5)
    return drafter


def save(drafter: DraftModule, config: Mapping[str, Any], folder: Path, *, codes: bool) -> None:
    """Matrices in bfloat16 or in codes, norms in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in drafter.state_dict().items():
        value = value.detach().cpu()
        if codes and value.ndim == 2:
            tensors[name], tensors[f"{name}_scale"] = codes_of(value)
        else:
            tensors[name] = value.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    told = {**config, "quantization_config": CODES} if codes else dict(config)
    (folder / "config.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
