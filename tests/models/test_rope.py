"""Inverse frequencies and amplitudes against transformers, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_local.config.rope_parameters import RopeParameters
from dflash_local.errors import CheckpointError
from dflash_local.models.rope import RopeTable, inverse_frequencies

OSS = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "rope_theta": 150000.0}
KINDS = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 5e5,
    },
    "gpt-oss": OSS,
    "not truncated": {**OSS, "truncate": False},
    "kimi": {**OSS, "factor": 64.0, "rope_theta": 5e4, "mscale": 1.0, "mscale_all_dim": 1.0},
    "two mscales": {**OSS, "mscale": 0.7, "mscale_all_dim": 1.0},
    "explicit amplitude": {**OSS, "attention_factor": 1.25},
    "betas": {**OSS, "beta_fast": 16.0, "beta_slow": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_equals_transformers(name: str) -> None:
    head_dim = 64
    raw = KINDS[name]
    theirs = Qwen3Config(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=dict(raw))
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[raw["rope_type"]](theirs, torch.device("cpu"))
    ours = RopeParameters.from_json({"rope_parameters": raw, "max_position_embeddings": 131072}, "config")
    assert torch.equal(inverse_frequencies(ours, head_dim), frequencies)
    assert ours.attention_factor == pytest.approx(amplitude, abs=1e-12)


def test_both_schemas_give_the_same() -> None:
    first = {"rope_theta": 150000.0, "rope_scaling": {k: v for k, v in OSS.items() if k != "rope_theta"}}
    assert RopeParameters.from_json(first, "a") == RopeParameters.from_json({"rope_parameters": OSS}, "b")
    assert RopeParameters.from_json({"rope_theta": 1e6, "rope_scaling": None}, "c") == RopeParameters(1e6)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({}, "rope_theta is missing"),
        ({"rope_theta": -1}, "outside"),
        ({"rope_theta": float("inf")}, "outside"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2}}, "'dynamic' is not supported"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 2}}, "original_max_position_embeddings"),
    ],
)
def test_bad_rope_is_named(raw: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        RopeParameters.from_json(raw, "config.json")


def test_table_rows_do_not_depend_on_growth() -> None:
    rope = RopeParameters(1e4, attention_factor=1.3)
    grown, fresh = (RopeTable(rope, 16, torch.device("cpu"), torch.float32) for _ in range(2))
    before = [part.clone() for part in grown.rows(500, 8)]
    grown.rows(5000, 8)
    for old, new, other in zip(before, grown.rows(500, 8), fresh.rows(500, 8)):
        assert torch.equal(old, new) and torch.equal(old, other)
