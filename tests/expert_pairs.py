"""Tiny pairs whose target is a mixture of experts, in files: random targets that kernels take, and random drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.random_checkpoint import build_drafter
from dflash_local.catalog.bundled import Pair
from tests.families import HIDDEN, VOCAB, save_model
from tests.fused_models import TAPS
from tests.quantized_checkpoints import experts_in_mxfp4, quantize_checkpoint

MXFP4 = "mxfp4"  # of gpt_oss, as it is published
DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 20,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "vocab_size": VOCAB,
    "dflash_config": {"block_size": 16, "mask_token_id": 5, "target_layer_ids": list(TAPS)},
}


def sizes_of(family: str, width: int) -> dict[str, int]:
    """Of a model so wide; a card's kernels take 256."""
    sizes = {"hidden_size": width, "head_dim": width // 4}
    if family == "gpt_oss":
        return {**sizes, "intermediate_size": width // 2}
    shared = {"shared_expert_intermediate_size": width // 2} if family != "qwen3_moe" else {}
    return {**sizes, "moe_intermediate_size": width // 2, **shared}


def write_expert_pair(family: str, stored: str, folder: Path, width: int = 256) -> Pair:
    """A target of ``sizes_of`` and a drafter for blocks of 16.

    Args:
        stored: a quantizer's dialect of ``DIALECTS``, ``MXFP4``, or "" for plain weights.
    """
    sizes = sizes_of(family, width)
    target, drafter = save_model(family, folder / "plain", **sizes), folder / "drafter"
    if stored == MXFP4:
        experts_in_mxfp4(target)
    elif stored:
        quantize_checkpoint(target, folder / "quantized", stored)
        target = folder / "quantized"
    config = {**DRAFTER, "hidden_size": width, "head_dim": width // 4}
    build_drafter(drafter, config, width, "cpu")
    return Pair(f"{family} {stored}".strip(), target, drafter, bundled=False)
