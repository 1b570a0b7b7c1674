"""The values of a drafter's config.json that several keys tell together; every number bounded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_local.checkpoint_files import text_config
from dflash_local.checkpoint_files.config_values import ConfigFields, shown
from dflash_local.checkpoint_files.text_config import MAX_HEADS, MAX_WINDOW
from dflash_local.config.families import FIRST_SLIDING, FULL, SLIDING
from dflash_local.config.quantization import Quantization
from dflash_local.config.quantizers import READ, read_quantization
from dflash_local.errors import CheckpointError

MAX_LAYERS, MAX_TAPS = 128, 64


def refuse_variants(fields: ConfigFields, not_supported: Mapping[str, object]) -> None:
    """Raise CheckpointError where an option has another value than the one at which it changes nothing."""
    for key, neutral in not_supported.items():
        value = fields.values.get(key)
        if value is not None and value != neutral:
            raise CheckpointError(f"{fields.where}: {key} {shown(value)} is not supported yet")
    activation = fields.values.get("hidden_act")
    if activation not in (None, "silu"):
        raise CheckpointError(f"{fields.where}: hidden_act {shown(activation)} is not supported; drafters use silu")


def quantization(top: ConfigFields) -> Quantization | None:
    """Read how the file holds its matrices. Raises CheckpointError: a value is wrong, or the format is not read."""
    found = read_quantization(ConfigFields(top.inner("quantization_config"), top.where))
    if found is not None and found.unread:
        raise CheckpointError(
            f"{top.where}: a drafter in the format {found.unread} is not supported",
            f"take the plain one, or one in {READ}",
        )
    return found


def heads(fields: ConfigFields, hidden: int) -> tuple[int, int, int]:
    """Read query heads, key heads and head width, mutually consistent."""
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    kv_heads = fields.optional_integer("num_key_value_heads", 1, MAX_HEADS) or heads
    if heads % kv_heads:
        raise CheckpointError(
            f"{fields.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = fields.optional_integer("head_dim", 2, MAX_HEADS)
    if head_dim is None:
        if hidden % heads:
            raise CheckpointError(
                f"{fields.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
                " and head_dim is not given"
            )
        head_dim = hidden // heads
    if head_dim % 2:
        raise CheckpointError(f"{fields.where}: head_dim {head_dim} is odd; rotary embedding needs pairs")
    return heads, kv_heads, head_dim


def taps(fields: ConfigFields) -> tuple[int, ...]:
    """Read the tapped layers: required, since a guess is wrong for 14 of 20 published drafters."""
    taps = fields.optional_list("target_layer_ids", MAX_TAPS)
    if taps is None:
        raise fields.missing("target_layer_ids")
    if not taps:
        raise CheckpointError(f"{fields.where}: target_layer_ids is empty; a drafter needs at least one tap")
    return tuple(fields.check_integer("target_layer_ids", tap, 0, text_config.MAX_LAYERS - 1) for tap in taps)


def attention_pattern(
    fields: ConfigFields, top: ConfigFields, nested: ConfigFields, layers: int
) -> tuple[tuple[str, ...], tuple[int | None, ...], tuple[bool, ...]]:
    """Read layer types, windows and causality. Causality: top-level ``is_causal``, else ``dflash_config.causal``, else
    by type: a sliding layer is causal inside the block. ``use_swa`` without ``layer_types``: all sliding, none causal.
    With ``layer_types`` the window counts whatever ``use_sliding_window`` says: transformers' Qwen3Config drops it.
    """
    given = fields.optional_list("layer_types", MAX_LAYERS)
    windowed = given is None and bool(fields.optional_flag("use_swa"))
    types = _layer_types(fields, given, layers, windowed)
    explicit = top.optional_flag("is_causal")
    if explicit is None:
        explicit = nested.optional_flag("causal")
    if explicit is None and windowed:
        explicit = False
    sliding = [kind == SLIDING for kind in types]
    width = fields.integer("sliding_window", 1, MAX_WINDOW) if any(sliding) else None
    causal = tuple(slides if explicit is None else explicit for slides in sliding)
    return types, tuple(width if slides else None for slides in sliding), causal


def _layer_types(fields: ConfigFields, given: list[Any] | None, layers: int, windowed: bool) -> tuple[str, ...]:
    if given is None:
        # As for Qwen3Config, the layers from max_window_layers on slide.
        first = fields.optional_integer("max_window_layers", 0, MAX_WINDOW)
        first = FIRST_SLIDING if first is None else first
        if windowed or not (fields.optional_flag("use_sliding_window") and fields.present("sliding_window")):
            first = 0 if windowed else layers
        return tuple(SLIDING if layer >= first else FULL for layer in range(layers))
    if len(given) != layers:
        raise CheckpointError(f"{fields.where}: layer_types has {len(given)} entries for {layers} layers")
    for kind in given:
        if kind not in (FULL, SLIDING):
            raise CheckpointError(f"{fields.where}: layer type {shown(kind)} is not supported in a drafter")
    return tuple(given)
