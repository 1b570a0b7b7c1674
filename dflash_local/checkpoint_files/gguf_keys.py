"""The keys of a GGUF file that shape a model: which say what a config.json says, which change nothing. Torch-free.

Their names: src/llama-arch.cpp of llama.cpp; what its converter writes into them: conversion/base.py there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dflash_local.checkpoint_files.config_values import ConfigFields, shown
from dflash_local.checkpoint_files.gguf_header import GgufHeader
from dflash_local.checkpoint_files.gguf_rope import FACTORS, rope_of, short
from dflash_local.checkpoint_files.text_config import MAX_HEADS, MAX_LAYERS, MAX_WIDTH
from dflash_local.errors import CheckpointError

COMMON = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# Read one by one, or told by the tensors as well.
READ = (
    *("block_count", "nextn_predict_layers", "vocab_size", "attention.key_length", "attention.value_length"),
    *("rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.dimension_sections"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
    *("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
)
# Keys of other forward passes, each with the values at which they change nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.value_scale": (1,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),  # softmax
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0, 1),
    "expert_used_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "hidden_activation": ("silu",),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "norm_top_k_prob": (True,),  # of Ollama's converter
    "pooling_type": (0,),
    "residual_scale": (0, 1),
    "rope.scale_linear": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}


def architecture_of(header: GgufHeader, known: Collection[str]) -> str:
    """Return ``general.architecture``. Raises CheckpointError: none of ``known``, or the file holds no whole model."""
    top = ConfigFields(header.metadata, str(header.file))
    kind = top.optional_text("general.type") or "model"
    if kind != "model":
        raise CheckpointError(f"{top.where} holds a part of a model ({shown(kind)})", "give the model's own GGUF file")
    return top.word("general.architecture", [*known])


def architecture_keys(header: GgufHeader, architecture: str) -> ConfigFields:
    """Return the keys of its architecture, without its name before them."""
    start = f"{architecture}."
    named = {key.removeprefix(start): value for key, value in header.metadata.items() if key.startswith(start)}
    return ConfigFields(named, f"{header.file}: {architecture}")


def refuse_others(keys: ConfigFields, known: Collection[str]) -> None:
    """Raise CheckpointError where a key is not ``known``: it may change the forward pass."""
    for key, value in keys.values.items():
        if key in known or key in COMMON or key in READ:
            continue
        if key not in NEUTRAL or not any(value == each for each in NEUTRAL[key]):
            raise CheckpointError(
                f"{keys.where}.{key} {shown(value)} is not supported: it may change what the model computes",
                "take the safetensors checkpoint, or another file of this model",
            )


def values_of(keys: ConfigFields, names: Mapping[str, str]) -> dict[str, Any]:
    """Return values by their names in config.json; numbers one for each layer must agree."""
    found: dict[str, Any] = {}
    for key, name in names.items():
        value = keys.values.get(key)
        if isinstance(value, list):
            if not value or any(each != value[0] for each in value):
                raise CheckpointError(f"{keys.where}.{key} {shown(value)} differs by layer, which is not supported")
            value = value[0]
        if value is not None:
            found[name] = short(value) if isinstance(value, float) else value
    return found


def common_values(keys: ConfigFields, header: GgufHeader, partial: bool = False) -> dict[str, Any]:
    """Return sizes, layers, heads and rope: what every architecture here has. Raises CheckpointError, UnknownValue.

    Args:
        partial: as of ``rope_of``.
    """
    found = values_of(keys, COMMON)
    hidden = keys.integer("embedding_length", 1, MAX_WIDTH)
    heads = ConfigFields(found, keys.where).integer("num_attention_heads", 1, MAX_HEADS)
    head_dim = keys.optional_integer("attention.key_length", 2, MAX_HEADS) or hidden // heads
    if keys.values.get("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{keys.where}.attention.value_length is not its key_length, which is not supported")
    theta = keys.values.get("rope.freq_base_swa")
    if theta is not None and theta != keys.values.get("rope.freq_base"):
        raise CheckpointError(f"{keys.where}.rope.freq_base_swa is not its freq_base, which is not supported")
    return {
        **found,
        "num_hidden_layers": block_count(keys) - (keys.optional_integer("nextn_predict_layers", 0, 64) or 0),
        "num_key_value_heads": found.get("num_key_value_heads", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rope_parameters": rope_of(keys, head_dim, header.tensors.get(FACTORS), partial),
    }


def block_count(keys: ConfigFields) -> int:
    """Return all layers; those that predict tokens further ahead are the last."""
    return keys.integer("block_count", 1, MAX_LAYERS)


def layer_flags(keys: ConfigFields, key: str, layers: int) -> list[bool] | None:
    """Return one flag for each layer, None where the key is absent or empty; those behind are of layers that predict
    further ahead. Raises CheckpointError: they are too few, or no flags.
    """
    flags = keys.optional_list(key, MAX_LAYERS)
    if not flags:
        return None
    if len(flags) < layers or any(flag not in (False, True) for flag in flags):
        raise CheckpointError(f"{keys.where}.{key} {shown(flags)} is not a flag for each of {layers} layers")
    return [bool(flag) for flag in flags[:layers]]
