"""Tiny DSpark drafters as DeepSpec and SpecForge write them, with random weights or with a Markov head that knows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dflash_local.drafters.dspark.layout import CONFIDENCE, EMBEDDING, FOLLOWING, HEAD, PREVIOUS
from tests.drafter_configs import read_decoder

TARGET = Path(__file__).parent / "golden" / "qwen3-v1-b8" / "target"
VOCAB, HIDDEN, DRAFTS = 96, 64, 7


def raw(nested: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A config.json as DeepSpec writes it, or as SpecForge does with ``nested``, its dflash_config."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": VOCAB, "rope_theta": 1e6, "layer_types": ["full_attention"] * 2, "sliding_window": None,
        "max_position_embeddings": 2048, "num_target_layers": 5, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
        "block_size": DRAFTS, "mask_token_id": 95, "target_layer_ids": [1, 2, 3], "num_anchors": 512,
        "markov_rank": 12, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }  # fmt: skip
    if nested is not None:
        own = {"projector_type": "dspark", "target_layer_ids": [1, 2, 3], "mask_token_id": 95, **nested}
        config = {**config, "architectures": ["DSparkDraftModel"], "dflash_config": own}
        del config["target_layer_ids"], config["mask_token_id"]
    return {**config, **changes}


def save_drafter(
    folder: Path, config: Mapping[str, Any], *, tables: bool = True, text: Iterable[int] = (), seed: int = 1
) -> Path:
    """Write a drafter with random weights.

    Args:
        tables: it brings copies of the target's embedding and head.
        text: of ids that its Markov head has learnt by heart, of which each has one that follows.
    """
    shape, generator = read_decoder(config, folder), torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in {**shape.tensors(HIDDEN), **shape.optional_tensors()}.items():
        noise = torch.randn(size, generator=generator)
        tensors[name] = 1 + 0.1 * noise if name.endswith("norm.weight") else noise / max(size[-1], 2) ** 0.5
    target = load_file(TARGET / "model.safetensors")
    tensors |= {EMBEDDING: target["model.embed_tokens.weight"], HEAD: target["lm_head.weight"]}
    if not tables:
        del tensors[EMBEDDING], tensors[HEAD]
    if known := list(text):
        tensors[PREVIOUS], tensors[FOLLOWING] = torch.eye(VOCAB), torch.zeros(VOCAB, VOCAB)
        for before, after in zip(known, known[1:], strict=False):
            tensors[FOLLOWING][:, before] = 0
            tensors[FOLLOWING][after, before] = 100
    folder.mkdir(parents=True)
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder


def without_confidence(folder: Path) -> None:
    """Drop the head that tells how sure a draft is, as files without one have it."""
    tensors = {n: t for n, t in load_file(folder / "model.safetensors").items() if not n.startswith(CONFIDENCE)}
    save_file(tensors, folder / "model.safetensors")
