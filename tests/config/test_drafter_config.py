"""Drafter configs: both schemas, the attention pattern's precedence, bounds, and shapes that are not all known."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_local.checkpoint_files.config_values import UnknownValue
from dflash_local.config.features import AttentionConfig, MLPConfig
from dflash_local.drafters.dflash.layout import DFlashConfig
from dflash_local.errors import CheckpointError
from tests.drafter_configs import decoder_of_shape, read_decoder

HERE = Path("some/config.json")


def raw(**changes: object) -> dict:
    base: dict[str, object] = {
        "architectures": ["DFlashDraftModel"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "block_size": 8, "rope_theta": 1e6, "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 2]},
    }  # fmt: skip
    return {key: value for key, value in {**base, **changes}.items() if value is not None}


def read(**changes: object) -> DFlashConfig:
    return read_decoder(raw(**changes), HERE)


def test_dflash_config_comes_first() -> None:
    config = read(mask_token_id=9, dflash_config={"mask_token_id": 5, "target_layer_ids": [2], "block_size": 4})
    assert (config.mask_token_id, config.block_size, config.taps) == (5, 4, (2,))
    top = read(mask_token_id=9, dflash_config={"target_layer_ids": [2]})
    assert (top.mask_token_id, top.block_size) == (9, 8)


SLIDING = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 24}
BY_TYPE = ((24, 24, None), (True, True, False))
PATTERNS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "nothing said": ({}, (None,) * 3, (False,) * 3),
    "by type": (SLIDING, *BY_TYPE),
    "use_sliding_window false does not drop it": ({**SLIDING, "use_sliding_window": False}, *BY_TYPE),
    "is_causal false": ({**SLIDING, "is_causal": False}, (24, 24, None), (False,) * 3),
    "is_causal true": ({"is_causal": True}, (None,) * 3, (True,) * 3),
    "nested causal": ({**SLIDING, "causal": False}, (24, 24, None), (False,) * 3),
    "is_causal before nested": ({**SLIDING, "is_causal": True, "causal": False}, (24, 24, None), (True,) * 3),
    "use_swa": ({"use_swa": True, "sliding_window": 24}, (24,) * 3, (False,) * 3),
    "qwen default": (
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
        (None, None, 24),
        (False, False, True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PATTERNS)
def test_attention_pattern_precedence(name: str) -> None:
    changes, windows, causal = PATTERNS[name]
    changes = dict(changes)
    nested = {"mask_token_id": 5, "target_layer_ids": [1, 2]}
    if "causal" in changes:
        nested["causal"] = changes.pop("causal")
    config = read(dflash_config=nested, **changes)
    assert (config.windows, config.causal) == (windows, causal)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "hidden 2^31": ({"hidden_size": 2**31}, "hidden_size 2147483648 is outside"),
    "hidden 10^4000": ({"hidden_size": 10**4000}, "an integer of 13288 bits is outside"),
    "hidden text": ({"hidden_size": "64"}, "hidden_size must be a whole number, got '64'"),
    "kv does not divide": ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
    "head_dim not dividing": ({"head_dim": None, "num_attention_heads": 6}, "not a multiple of num_attention_heads 6"),
    "head_dim odd": ({"head_dim": 15}, "head_dim 15 is odd"),
    "eps nan": ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan is outside"),
    "block 0": ({"block_size": 0}, "block_size 0 is outside 2..64"),
    "no theta": ({"rope_theta": None}, "rope_theta is missing"),
    "layer type": ({"layer_types": ["full_attention", "mamba", "full_attention"]}, "'mamba' is not supported"),
    "no window": ({"layer_types": ["sliding_attention"] * 3}, "sliding_window is missing"),
    "many taps": ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1] * 10**5}}, "100000 entries"),
    "anchor predicts": ({"sample_from_anchor": True}, "sample_from_anchor True is not supported"),
    "output multiplier": ({"output_multiplier": 0.5}, "output_multiplier 0.5 is not supported"),
    "dspark": ({"architectures": ["Gemma4DSparkModel"]}, "is a dspark drafter of other layers"),
    "a target": ({"architectures": ["Qwen3ForCausalLM"]}, "'Qwen3ForCausalLM' is not a drafter's"),
    "no architecture": ({"architectures": []}, "no architecture is not a drafter's"),
    "dflash_config list": ({"dflash_config": [1]}, "dflash_config must be an object"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_values_are_named_at_once(name: str) -> None:
    changes, said = REFUSED[name]
    start = time.process_time()
    with pytest.raises(CheckpointError, match=said) as caught:
        read(**changes)
    assert time.process_time() - start < 1 and caught.value.exit_code == 6
    assert str(HERE) in caught.value.message and len(caught.value.message) < 400


def test_layers_are_told_as_features() -> None:
    config = read(**SLIDING, attention_bias=True)
    plain = AttentionConfig(4, 2, 16, rotary_dim=16, qk_norm=True, qkv_bias=True, output_bias=True)
    assert [config.attention(layer) for layer in range(3)] == [replace(plain, sliding_window=24)] * 2 + [plain]
    assert config.mlp == MLPConfig(128)


def test_a_shape_is_known_by_likely_values_and_names_those_that_sizes_depend_on() -> None:
    likely = {"intermediate_size": 96, "rms_norm_eps": 1e-5, "dflash_config.block_size": 4, "hidden_size": 7}
    nested = {"mask_token_id": 5, "target_layer_ids": [1, 2], "block_size": None}
    shape = raw(dflash_config=nested) | {"intermediate_size": None, "rope_theta": None, "_inferred": likely}
    config = decoder_of_shape(shape, "x")
    assert (config.intermediate_size, config.hidden_size, config.block_size) == (96, 64, 4)
    assert config.inferred == ("block_size", "intermediate_size") and config.source == "x"
    with pytest.raises(UnknownValue, match="x: rope: rope_theta is missing"):
        read_decoder({**shape, "intermediate_size": 96}, "x")
