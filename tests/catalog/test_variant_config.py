"""Pre-quantised targets of the registry: names of their own, and sizes before a download."""

from __future__ import annotations

import pytest

from dflash_local.catalog import registry
from dflash_local.catalog.row import Variant
from dflash_local.catalog.shapes import shape
from dflash_local.catalog.variant_config import quantization_config
from dflash_local.checkpoint_files.config_values import ConfigFields
from dflash_local.config.quantizers import read_quantization
from dflash_local.config.read_model import read_model
from dflash_local.layout.buffer import group_bytes
from dflash_local.layout.linear import stored_formats
from dflash_local.layout.target import weight_buffers

GIB = 2**30


@pytest.mark.parametrize(
    ("repo", "gib"),
    [
        ("Qwen/Qwen3.5-27B-FP8", 27.45),
        ("Qwen/Qwen3.6-27B-FP8", 27.45),
        ("Qwen/Qwen3.5-27B-GPTQ-Int4", 26.44),
        ("cyankiwi/Qwen3.6-27B-AWQ-INT4", 18.24),
        ("Lorbus/Qwen3.6-27B-int4-AutoRound", 16.47),
        ("btbtyler09/Qwen3.6-27B-GPTQ-8bit", 28.86),
        ("Intel/Qwen3.5-9B-int4-AutoRound", 7.12),
    ],
)
def test_sizes_follow_from_the_recipe(repo: str, gib: float) -> None:
    """Text weights with embedding and head; zero points lie as a byte each."""
    found = registry.load().find_variant(repo.upper())
    assert found is not None
    row, variant = found
    assert row.target is not None
    plain = shape(row.target.id)
    assert plain is not None
    model = read_model({**plain, "quantization_config": quantization_config(variant)}, repo)
    formats = stored_formats(model.quantization)
    sums = group_bytes(weight_buffers(model, "model.", model.vocab_size, "bfloat16", formats))
    assert sum(sums.values()) / GIB == pytest.approx(gib, abs=0.03)


def test_an_unknown_recipe_is_not_guessed() -> None:
    assert quantization_config(Variant("a/b", "gptq-int4", group_size=128)) is None
    assert quantization_config(Variant("a/b", "awq-int4", group_size=128)) is None
    assert quantization_config(Variant("a/b", "bnb-4bit", group_size=64, kept_16_bits=())) is None
    assert registry.load().find_variant("nobody/nothing") is None


@pytest.mark.parametrize("name", ["fp8", "gptq-int4", "gptq-int8", "autoround-int4", "awq-int4", "nvfp4"])
def test_a_recipe_is_one_that_is_read_and_keeps_what_it_says(name: str) -> None:
    kept = Variant("a/b", name, group_size=16 if name == "nvfp4" else 128, kept_16_bits=("self_attn",))
    found = read_quantization(ConfigFields(dict(quantization_config(kept) or {}), "a/b"))
    assert found is not None and not found.unread
    at = "model.language_model.layers.3"
    assert found.stored(f"{at}.self_attn.q_proj") is None and found.stored(f"{at}.mlp.up_proj") is not None
    assert found.stored("lm_head") is None


def test_every_variant_has_a_name_of_its_own() -> None:
    for row in registry.load().rows:
        assert len({item.name for item in row.variants}) == len(row.variants)
        for item in row.variants:
            assert row.variant(item.name.upper()) is item and row.variant(item.model) is item
        assert row.variant("none of them") is None
