"""The rotary-embedding settings of a config, both spellings, checked. Torch-free; the maths is in ``rope``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dflash_local.checkpoint_files.config_values import ConfigFields, shown
from dflash_local.checkpoint_files.text_config import MAX_POSITION
from dflash_local.errors import CheckpointError

RopeKind = Literal["default", "linear", "yarn", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """Hold what decides a position's angle. ``attention_factor`` multiplies cos and sin (YaRN). ``original_positions``:
    the context trained at first, 0 where the kind does not use it.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0

    @classmethod
    def from_json(cls, config: Mapping[str, Any], where: str) -> RopeParameters:
        """Read ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``. Raises CheckpointError."""
        merged = _merged(ConfigFields(config, where))
        fields = ConfigFields(merged, f"{where}: rope")
        theta = fields.number("rope_theta", 1.0 + 1e-6, 1e12)
        kind = merged.get("rope_type") or merged.get("type") or "default"
        if kind == "default":
            return cls(theta)
        if kind == "linear":
            return cls(theta, "linear", factor=fields.number("factor", 1e-3, 1e6))
        if kind == "yarn":
            return _yarn(fields, theta)
        if kind == "llama3":
            return _llama3(fields, theta)
        raise CheckpointError(
            f"{where}: rope type {shown(kind)} is not supported", "supported: default, linear, yarn, llama3"
        )


def _merged(config: ConfigFields) -> dict[str, Any]:
    """Return both schemas as one flat object; the nested one wins."""
    nested = config.inner("rope_parameters") or config.inner("rope_scaling")
    per_type = [value for value in nested.values() if isinstance(value, dict)]
    if per_type:
        if any(value != per_type[0] for value in per_type):
            raise CheckpointError(f"{config.where}: rope_parameters differ by layer type, which is not supported")
        nested = per_type[0]
    outer = ("rope_theta", "max_position_embeddings", "original_max_position_embeddings")
    merged = {key: config.values[key] for key in outer if config.present(key)}
    return {**merged, **{key: value for key, value in nested.items() if value is not None}}


def _original_positions(fields: ConfigFields) -> int:
    for key in ("original_max_position_embeddings", "max_position_embeddings"):
        if fields.present(key):
            return fields.integer(key, 1, MAX_POSITION)
    raise fields.missing("original_max_position_embeddings")


def _yarn(fields: ConfigFields, theta: float) -> RopeParameters:
    """Read YaRN as transformers does (arXiv 2309.00071 and DeepSeek's mscale pair). Kimi-K2.5's drafter has mscale =
    mscale_all_dim = 1, of which transformers makes 1.0, but was trained with 0.1 ln(factor) + 1: hence the load option
    ``attention_factor``.
    """
    original = _original_positions(fields)
    if fields.present("factor"):
        factor = fields.number("factor", 1e-3, 1e6)
    else:
        factor = fields.integer("max_position_embeddings", 1, MAX_POSITION) / original
    attention = fields.optional_number("attention_factor", 1e-3, 1e3)
    if attention is None:
        mscale = fields.optional_number("mscale", 0.0, 1e3)
        all_dim = fields.optional_number("mscale_all_dim", 0.0, 1e3)
        attention = (
            _amplitude(factor, mscale) / _amplitude(factor, all_dim) if mscale and all_dim else _amplitude(factor)
        )
    truncate = fields.optional_flag("truncate")
    return RopeParameters(
        theta,
        "yarn",
        factor=factor,
        original_positions=original,
        beta_fast=fields.optional_number("beta_fast", 0.0, 1e6) or 32.0,
        beta_slow=fields.optional_number("beta_slow", 0.0, 1e6) or 1.0,
        truncate=True if truncate is None else truncate,
        attention_factor=attention,
    )


def _amplitude(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(fields: ConfigFields, theta: float) -> RopeParameters:
    low = fields.number("low_freq_factor", 1e-6, 1e6)
    high = fields.number("high_freq_factor", 1e-6, 1e6)
    if low >= high:
        raise CheckpointError(f"{fields.where}: low_freq_factor {low:g} must be below high_freq_factor {high:g}")
    return RopeParameters(
        theta,
        "llama3",
        factor=fields.number("factor", 1e-3, 1e6),
        original_positions=_original_positions(fields),
        low_freq_factor=low,
        high_freq_factor=high,
    )
