"""What distinguishes generations of one drafter repository, read from its raw config.json.

Tolerant: what is absent or malformed is None here, and an error only when the drafter is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def of_config(config: Mapping[str, Any]) -> dict[str, object]:
    """Layers, taps, mask id, block and window; every key is looked up in ``dflash_config`` first."""
    nested = config.get("dflash_config")
    known = {k: v for k, v in nested.items() if v is not None} if isinstance(nested, Mapping) else {}
    fields = {**config, **known}
    layers = _integer(fields.get("num_hidden_layers"))
    return {
        "layers": layers,
        "taps": _integers(fields.get("target_layer_ids")),
        "mask_id": _integer(fields.get("mask_token_id")),
        "block": _integer(fields.get("block_size")),
        "window": _integer(fields.get("sliding_window")) if _slides(fields, layers) else None,
    }


def _slides(fields: Mapping[str, Any], layers: int | None) -> bool:
    """True when at least one layer sees a window only; the rule without ``layer_types`` is Qwen3Config's."""
    types = fields.get("layer_types")
    if isinstance(types, (list, tuple)):
        return "sliding_attention" in types
    if fields.get("use_swa"):
        return True
    first = _integer(fields.get("max_window_layers"))
    return bool(fields.get("use_sliding_window")) and layers is not None and layers > (28 if first is None else first)


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _integers(value: object) -> list[int] | None:
    if not isinstance(value, (list, tuple)) or any(_integer(item) is None for item in value):
        return None
    return list(value)
