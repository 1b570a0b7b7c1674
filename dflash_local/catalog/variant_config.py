"""What a pre-quantised target's config.json says of its weights, as far as the registry knows the recipe: for sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_local.catalog.row import Variant

FP8_BLOCK = 128


def quantization_config(variant: Variant) -> Mapping[str, Any] | None:
    """Return it as the method's own tools write it; None where the recipe is not known well enough."""
    group, kept = variant.group_size, variant.kept_16_bits
    if kept is None:
        return None
    if variant.format == "fp8":
        return {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK] * 2, "modules_to_not_convert": list(kept)}
    if group is None:
        return None
    if variant.format == "autoround-int4":
        extra = {f".*{part}.*": {"bits": 16} for part in kept}
        return {"quant_method": "auto-round", "bits": 4, "sym": True, "group_size": group, "extra_config": extra}
    if variant.format == "awq-int4":
        numbers = {"bits": 4, "group_size": group, "zero_point": True}
        return {"quant_method": "awq", "version": "gemm", **numbers, "modules_to_not_convert": list(kept)}
    if variant.format in ("gptq-int4", "gptq-int8"):
        numbers = {"bits": int(variant.format[-1]), "group_size": group, "sym": True, "desc_act": False}
        return {"quant_method": "gptq", **numbers, "dynamic": {f"-:.*{part}.*": {} for part in kept}}
    if variant.format == "nvfp4":
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": group}
        return _compressed_tensors("nvfp4-pack-quantized", weights, kept)
    if variant.format == "pack-quantized-int4":
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": False}
        return _compressed_tensors("pack-quantized", weights, kept)
    return None


def _compressed_tensors(layout: str, weights: Mapping[str, Any], kept: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": layout}},
        "ignore": ["lm_head", *(f"re:.*{part}.*" for part in kept)],
    }
