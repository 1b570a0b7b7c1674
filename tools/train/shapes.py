"""The two demo pairs in numbers: configs of target and drafter, and the training schedule. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_local.config.drafter_config import DrafterConfig

VOCAB_SIZE = 1024
MASK_ID = VOCAB_SIZE - 1  # a row of the embedding that no tokenizer entry points to
BLOCK = 8
HIDDEN = 192
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
LAYERS = 8
THETA = 10000.0
CONTEXT = 2048
TAPS = (1, 3, 5, 6)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps, ids a step and peak learning rate of one training run."""

    steps: int
    tokens: int
    learning_rate: float


@dataclass(frozen=True, slots=True)
class PairShape:
    """Everything that tells one demo pair from the other."""

    name: str
    hybrid: bool
    target: dict[str, Any]
    drafter: dict[str, Any]
    window: int | None
    target_schedule: Schedule
    drafter_schedule: Schedule

    @property
    def drafter_config(self) -> DrafterConfig:
        return DrafterConfig.from_json(self.drafter, self.name)


def _target(intermediate: int, layer_types: list[str], **extra: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": intermediate,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "layer_types": layer_types,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_cache": True,
        **extra,
    }


def _drafter(intermediate: int, layer_types: list[str], window: int | None, **extra: Any) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "layer_types": layer_types,
        "max_position_embeddings": CONTEXT,
        "max_window_layers": len(layer_types),
        "num_attention_heads": HEADS,
        "num_hidden_layers": len(layer_types),
        "num_key_value_heads": KV_HEADS,
        "num_target_layers": LAYERS,
        "rms_norm_eps": 1e-6,
        "sliding_window": window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": window is not None,
        "vocab_size": VOCAB_SIZE,
        **extra,
    }


def _demo() -> PairShape:
    drafter = _drafter(
        352,
        ["full_attention", "full_attention"],
        None,
        block_size=BLOCK,
        rope_theta=THETA,
        rope_scaling=None,
        auto_map={"AutoModel": "dflash.DFlashDraftModel"},
        dflash_config={"mask_token_id": MASK_ID, "target_layer_ids": list(TAPS)},
    )
    target = _target(352, ["full_attention"] * LAYERS, rope_parameters={"rope_type": "default", "rope_theta": THETA})
    return PairShape("demo", False, target, drafter, None, Schedule(4000, 32768, 3e-3), Schedule(6000, 16384, 1.5e-3))


def _hybrid() -> PairShape:
    rope = {"rope_type": "default", "rope_theta": THETA}
    drafter = _drafter(
        320,
        ["sliding_attention", "full_attention"],
        64,
        rope_parameters=rope,
        dflash_config={"block_size": BLOCK, "mask_token_id": MASK_ID, "target_layer_ids": list(TAPS)},
    )
    target = _target(
        256,
        (["linear_attention"] * 3 + ["full_attention"]) * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
        linear_conv_kernel_dim=4,
        rope_parameters=rope | {"partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2], "mrope_interleaved": True},
    )
    schedules = Schedule(3000, 32768, 3e-3), Schedule(5500, 16384, 1.5e-3)
    return PairShape("demo-hybrid", True, target, drafter, 64, *schedules)


PAIRS: dict[str, PairShape] = {shape.name: shape for shape in (_demo(), _hybrid())}
