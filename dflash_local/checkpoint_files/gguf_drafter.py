"""The config.json of a DFlash drafter that llama.cpp's converter wrote as a GGUF file. Torch-free."""

from __future__ import annotations

from typing import Any

from dflash_local.checkpoint_files.config_values import ConfigFields
from dflash_local.checkpoint_files.gguf_header import GgufHeader
from dflash_local.checkpoint_files.gguf_keys import common_values, layer_flags, refuse_others, values_of
from dflash_local.checkpoint_files.text_config import MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, MAX_WINDOW
from dflash_local.errors import CheckpointError

DFLASH = "dflash"  # its general.architecture
KEYS = {"block_size": "block_size", "sample_from_anchor": "sample_from_anchor"}
DFLASH2_KEYS = {
    "conv_kernel_size": "conv_kernel_size",
    "conv_group_size": "conv_group_size",
    "selector_rank": "selector_rank",
    "selector_top_k": "selector_top_k",
    "logit_scale": "output_multiplier",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "input_embedding_scale",
}
OWN = (
    "target_layers",
    "has_confidence_head",
    "attention.causal",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
)
MARKOV, CONFIDENCE, SELECTOR = "markov_w1.weight", "conf_proj.weight", "selector_predecessor.weight"


def drafter_config(header: GgufHeader, keys: ConfigFields) -> dict[str, Any]:
    """Return what its config.json would hold. Raise CheckpointError as ``config_of`` does."""
    names = KEYS | (DFLASH2_KEYS if SELECTOR in header.tensors else {})
    refuse_others(keys, (*names, *OWN))
    found = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **common_values(keys, header),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        **_heads_of_kind(header, keys.integer("embedding_length", 1, MAX_WIDTH)),
    }
    layers = found["num_hidden_layers"]
    taps = keys.optional_list("target_layers", MAX_LAYERS) or []
    # llama.cpp counts the embedding's output as layer 0.
    taps = [keys.check_integer("target_layers", tap, 1, MAX_LAYERS) - 1 for tap in taps]
    found["dflash_config"] = {
        **values_of(keys, names),
        "mask_token_id": header.metadata.get("tokenizer.ggml.mask_token_id"),
        "target_layer_ids": taps,
    }
    return {**found, **_windows(keys, layers)}


def _heads_of_kind(header: GgufHeader, hidden: int) -> dict[str, Any]:
    """Return what the tables by id of a DFlash 2 or a DSpark drafter tell, and the vocabulary of others."""
    table = header.tensors.get(SELECTOR) or header.tensors.get(MARKOV)
    if table is None:
        tokens = ConfigFields(header.metadata, str(header.file)).optional_list("tokenizer.ggml.tokens", MAX_VOCAB)
        return {"vocab_size": len(tokens) if tokens else None}
    if len(table.shape) != 2:
        raise CheckpointError(f"{header.file}: tensor {table.name} has shape {list(table.shape)}, expected a matrix")
    if table.name == SELECTOR:
        return {"architectures": ["DFlash2DraftModel"], "vocab_size": table.shape[0]}
    confidence = header.tensors.get(CONFIDENCE)
    return {
        "architectures": ["Qwen3DSparkModel"],
        "vocab_size": table.shape[0],
        "markov_rank": table.shape[1],
        "enable_confidence_head": confidence is not None,
        "confidence_head_with_markov": confidence is not None and confidence.shape[-1:] > (hidden,),
    }


def _windows(keys: ConfigFields, layers: int) -> dict[str, Any]:
    """Return ``layer_types``, ``sliding_window`` and, where it is told, ``is_causal``."""
    width = keys.optional_integer("attention.sliding_window", 0, MAX_WINDOW)
    flags = layer_flags(keys, "attention.sliding_window_pattern", layers) if width else None
    kinds = ["sliding_attention" if flag else "full_attention" for flag in flags or [False] * layers]
    found = {"layer_types": kinds, "sliding_window": width, "use_sliding_window": bool(width)}
    causal = keys.optional_flag("attention.causal")
    return found if causal is None else {**found, "is_causal": causal}
