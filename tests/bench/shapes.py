"""Tiny pairs by their configurations alone, and the CPU to measure them on."""

from __future__ import annotations

from typing import Any

import torch

from dflash_local.bench.random_pair import RandomPair, read_pair
from dflash_local.bench.random_run import Place, host_ms

PLACE = Place(torch.device("cpu"), torch.float32, host_ms, replays=1, probe=2**16)
DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
HYBRID = DENSE | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5},
}
MIXTURE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "block_size": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 24,
    "dflash_config": {"mask_token_id": 255, "target_layer_ids": [0, 2]},
    "rope_theta": 1e6,
}


def tiny_pair(hybrid: bool = False) -> RandomPair:
    """A pair of some hundred thousand weights."""
    return read_pair(("tiny", HYBRID if hybrid else DENSE), ("tiny drafter", DRAFTER))


def tiny_dspark(markov_rank: int = 12) -> RandomPair:
    """The same dense target with a DSpark drafter of 7 drafts, whose tables are longer than the target's."""
    own = {"architectures": ["DSparkDraftModel"], "block_size": 7, "vocab_size": 288, "markov_rank": markov_rank}
    return read_pair(("tiny", DENSE), ("tiny DSpark drafter", DRAFTER | own))


def tiny_mixture() -> RandomPair:
    """The same with 32 experts, of which a token takes four."""
    return read_pair(("tiny mixture", MIXTURE), ("tiny drafter", DRAFTER))
