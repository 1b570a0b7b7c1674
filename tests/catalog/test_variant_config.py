"""Pre-quantised targets of the registry: names of their own, and sizes before a download."""

from __future__ import annotations

import pytest

from dflash_local.catalog import registry
from dflash_local.catalog.row import Variant
from dflash_local.catalog.shapes import shape
from dflash_local.catalog.variant_config import quantization_config
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
    assert quantization_config(Variant("a/b", "nvfp4", group_size=16, kept_16_bits=())) is None
    assert registry.load().find_variant("nobody/nothing") is None
