"""DFlash 2 drafters by their configuration: what is read, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_local.drafters.dflash2.layout import BlockConvolution, DFlash2Config, SelectorConfig
from dflash_local.errors import CheckpointError
from tests.drafter_configs import read_decoder

HERE = Path("some/config.json")


def raw(nested: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A small drafter of 2 sliding layers; ``nested``: of its dflash_config."""
    second = {
        "block_size": 8, "mask_token_id": 5, "target_layer_ids": [1, 2], "conv_kernel_size": 2, "conv_group_size": 16,
        "selector_rank": 12, "selector_top_k": 4,
    }  # fmt: skip
    base = {
        "architectures": ["DFlash2DraftModel"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "rope_theta": 1e6,
        "layer_types": ["sliding_attention"] * 2, "sliding_window": 24, "is_causal": False,
        "dflash_config": {**second, **(nested or {})},
    }  # fmt: skip
    return {**base, **changes}


def read(nested: dict[str, Any] | None = None, **changes: Any) -> DFlash2Config:
    found = read_decoder(raw(nested, **changes), HERE)
    assert isinstance(found, DFlash2Config)
    return found


def test_the_schema_is_read_with_its_defaults() -> None:
    config = read()
    assert (config.convolution, config.selector) == (BlockConvolution(2, 16), SelectorConfig(12, 4, 96))
    assert config.selector.softcap is None and config.embedding_scale == 1.0
    assert (config.windows, config.causal, config.block_size) == ((24, 24), (False, False), 8)


def test_optional_factors_are_read_from_either_place() -> None:
    config = read({"output_multiplier": 0.19611613513818404}, final_logit_softcapping=20, input_embedding_scale=2)
    selector = config.selector
    assert (selector.output_multiplier, selector.softcap) == (0.19611613513818404, 20.0)
    assert config.embedding_scale == 2.0
    assert read(final_logit_softcapping=0) == read()  # no cap


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no kernel size": ({"conv_kernel_size": None}, {}, "conv_kernel_size is missing"),
    "kernel wider than the block": ({"conv_kernel_size": 9}, {}, "conv_kernel_size 9 is outside 1..8"),
    "group that does not divide": ({"conv_group_size": 24}, {}, "hidden_size 64 is not a multiple of conv_group_size"),
    "rank 10^6": ({"selector_rank": 10**6}, {}, "selector_rank 1000000 is outside 1..4096"),
    "more candidates than ids": ({"selector_top_k": 97}, {}, "selector_top_k 97 is outside 1..96"),
    "no vocabulary": ({}, {"vocab_size": None}, "vocab_size is missing"),
    "multiplier nan": ({"output_multiplier": float("nan")}, {}, "output_multiplier nan is outside"),
    "anchor predicts": ({"sample_from_anchor": True}, {}, "sample_from_anchor True is not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_values_are_named(name: str) -> None:
    nested, changes, said = REFUSED[name]
    with pytest.raises(CheckpointError, match=said) as caught:
        read(nested, **changes)
    assert str(HERE) in caught.value.message and "\n" not in caught.value.message and caught.value.exit_code == 6
