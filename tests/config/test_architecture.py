"""Which targets are alike: a fine-tune is, another size, head, rotation or vocabulary is not."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_local.config.architecture import same_architecture
from dflash_local.config.read_model import read_model
from tests.drafter_configs import published

LLAMA = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def alike(repo: str, **changes: Any) -> bool:
    return same_architecture(read_model({**published(repo), **changes}, "tuned"), read_model(published(repo), repo))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_position_embeddings": 8192},
        {"vocab_size": 151669},
        {"dtype": "float16"},
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}},
        {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "rope_theta": None},
    ],
    ids=lambda changes: ",".join(changes) or "equal",
)
def test_a_fine_tune_is_alike(changes: dict[str, Any]) -> None:
    assert alike("Qwen/Qwen3-8B", **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 35},
        {"hidden_size": 4224},
        {"num_attention_heads": 16},
        {"num_key_value_heads": 4},
        {"head_dim": 64},
        {"intermediate_size": 12224},
        {"vocab_size": 32000},
        {"vocab_size": 151937},
        {"rope_theta": 10000},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
        {"tie_word_embeddings": True},
        {"rms_norm_eps": 1e-5},
        {"attention_bias": True},
    ],
    ids=lambda changes: ",".join(f"{key}={value}" for key, value in changes.items()),
)
def test_what_shapes_a_layer_parts_them(changes: dict[str, Any]) -> None:
    assert not alike("Qwen/Qwen3-8B", **changes)


def test_settings_that_the_registry_lacks_part_nobody() -> None:
    """Its copies have what sources quote: llama's rotation without its bounds, gpt-oss's without truncation."""
    assert alike("meta-llama/Llama-3.1-8B-Instruct", rope_scaling=LLAMA)
    scaling = {**published("openai/gpt-oss-20b")["rope_scaling"], "truncate": False}
    assert alike("openai/gpt-oss-20b", rope_scaling=scaling)
    assert not alike("openai/gpt-oss-20b", num_local_experts=128)
