"""Pairs by their shapes alone: what belongs together, and what is assumed of it."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_local.bench.random_pair import ASSUMED, RandomPair, read_pair
from dflash_local.catalog import registry
from dflash_local.catalog.row import Row
from dflash_local.catalog.shapes import shape
from dflash_local.errors import CheckpointError, PairError, UsageError
from tests.drafter_configs import decoder

ROWS = {row.name: row for row in registry.load().rows if row.target is not None and row.drafter is not None}


def _shapes(row: Row) -> list[tuple[str, dict[str, Any]]]:
    assert row.target is not None and row.drafter is not None
    found = [(part.id, shape(part.id)) for part in (row.target, row.drafter)]
    return [(name, config) for name, config in found if config is not None]


def _pair(name: str) -> RandomPair:
    target, drafter = _shapes(ROWS[name])
    return read_pair(target, drafter, ROWS[name].fingerprints)


def test_what_no_source_quotes_is_named() -> None:
    assert _pair("Qwen/Qwen3-8B").assumed == {}
    llama = _pair("meta-llama/Llama-3.1-8B-Instruct")
    assert llama.assumed["target"] == {"rope_scaling": None}
    assert llama.assumed["drafter"]["rope_theta"] == ASSUMED["rope_theta"]
    hybrid = _pair("Qwen/Qwen3.5-9B").assumed["drafter"]
    assert hybrid["dflash_config.mask_token_id"] == 248077, "an inferred value goes before a made-up one"
    assert "rope_theta" not in hybrid and "block_size" not in hybrid, (
        "the inferred rope has it, dflash_config quotes it"
    )


def test_what_the_fused_engine_does_not_compute_is_one_clear_line() -> None:
    (name, shape), drafter = _shapes(ROWS["Qwen/Qwen3-8B"])
    with pytest.raises(UsageError, match=f"cannot run {name}: its activation is gelu"):
        read_pair((name, {**shape, "hidden_act": "gelu"}), drafter)
    target, (name, second) = _shapes(ROWS["Qwen/Qwen3.8-27B"])
    many = {**second, "dflash_config": {**second["dflash_config"], "selector_top_k": 65}}
    with pytest.raises(UsageError, match=r"cannot run Qwen/Qwen3.8-27B: its drafter chooses among 65 candidates, 64 "):
        read_pair(target, (name, many))


def test_what_does_not_belong_together_is_refused() -> None:
    small, large = _shapes(ROWS["Qwen/Qwen3-4B"]), _shapes(ROWS["Qwen/Qwen3-8B"])
    with pytest.raises(PairError, match="no drafter of"):
        read_pair(small[0], large[1])
    with pytest.raises(CheckpointError, match="is not a drafter's"):
        read_pair(large[0], large[0])
    name, biased = large[1][0], {**large[1][1], "attention_bias": True}
    assert decoder(read_pair(large[0], (name, biased)).config).attention_bias


def test_the_generation_is_the_newest_or_unknown_to_the_registry() -> None:
    target, (name, drafter) = _shapes(ROWS["Qwen/Qwen3-8B"])
    other = {**drafter, "dflash_config": {**drafter["dflash_config"], "target_layer_ids": [1, 2, 3, 4, 5]}}
    assert read_pair(target, (name, other), ROWS["Qwen/Qwen3-8B"].fingerprints).generation is None
    for known in ("Qwen/Qwen3-8B", "Qwen/Qwen3.5-9B", "meta-llama/Llama-3.1-8B-Instruct"):
        assert _pair(known).generation == ROWS[known].fingerprints[0].generation
