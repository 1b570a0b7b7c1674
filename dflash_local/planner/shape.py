"""Shapes of a target and a drafter, read from a config.json or from the registry's copy of one.

A value that is null stays None, and every figure that needs it becomes None. Knows no sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_local.catalog.engine_rule import target_refusal
from dflash_local.catalog.families import FAMILIES
from dflash_local.checkpoint_files.config_values import Fields
from dflash_local.checkpoint_files.text_config import INTEGERS, text_values

QK_NORM = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
GATED_ATTENTION = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
RECURRENT = GATED_ATTENTION
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
BOUNDS = {**INTEGERS, "block_size": (1, 64)}
FULL_EVERY = 4  # Qwen3-Next and Qwen3.5: the last of every four layers has full attention


@dataclass(frozen=True, slots=True)
class Linear:
    """A Gated-DeltaNet layer: key and value heads, their widths, the convolution's width."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: how many, how many per token, their width; ``shared`` is the width every token takes."""

    count: int
    active: int | None
    width: int
    shared: int
    dense_layers: int


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V3 style): ranks and head parts."""

    query_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True)
class TargetShape:
    """A target as far as its memory depends on it. Text model only: vision and MTP parts are not loaded.

    Attributes:
        source: where the shape was read, for messages. family: None for an unknown architecture.
        kinds: one of full_attention, sliding_attention, linear_attention per layer.
        native_format: format of the published weights when they are quantised (mxfp4, int4, fp8 ...).
        stored_dtype: dtype of the published weights.
        inferred: names of values that are likely but not quoted by any source.
        turned: dimensions of a head that rotate. not_fused: why the fused engine cannot run it; empty when it can.
    """

    source: str
    family: str | None
    hidden: int | None
    width: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    vocab: int | None
    tied: bool
    kinds: tuple[str, ...]
    context: int | None
    biased: bool
    experts: Experts | None
    linear: Linear | None
    latent: Latent | None
    native_format: str | None
    stored_dtype: str
    inferred: tuple[str, ...] = ()
    turned: int | None = None
    not_fused: str = ""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str) -> TargetShape:
        """Read a config.json, or a registry shape with its published key names.

        Raises:
            CheckpointError: a value is of the wrong type or out of its bounds; names ``source`` and the key.
        """
        reader = _Reader(config, source)
        family = _family(config)
        heads = reader.integer("num_attention_heads")
        hidden = reader.integer("hidden_size")
        head_dim = reader.integer("head_dim")
        if head_dim is None and heads and hidden and family not in (None, "deepseek_v3"):
            head_dim = hidden // heads
        kv_heads = reader.integer("num_key_value_heads")
        return cls(
            source=source,
            family=family,
            hidden=hidden,
            width=reader.integer("intermediate_size"),
            heads=heads,
            kv_heads=heads if kv_heads is None and family == "llama" else kv_heads,
            head_dim=head_dim,
            vocab=reader.integer("vocab_size"),
            tied=reader.flag("tie_word_embeddings"),
            kinds=_kinds(reader, family),
            context=reader.integer("max_position_embeddings"),
            biased=reader.flag("attention_bias") if family != "gpt_oss" else True,
            experts=_experts(reader, family),
            linear=_linear(reader, family),
            latent=_latent(reader),
            native_format=_native_format(reader),
            stored_dtype=str(reader.value("dtype") or reader.value("torch_dtype") or "bfloat16"),
            inferred=tuple(sorted(reader.inferred_used)),
            turned=_turned(reader, family, head_dim),
            not_fused=target_refusal(family, reader.text, _native_format(reader)),
        )

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self.kinds)

    @property
    def dense(self) -> bool:
        """True when no layer has experts: what bitsandbytes can quantise."""
        return self.experts is None

    def count(self, kind: str) -> int:
        """Layers of one kind."""
        return self.kinds.count(kind)


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """A drafter as far as its memory depends on it; it has no embedding and no head of its own."""

    source: str
    hidden: int | None
    width: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    layers: int | None
    taps: int | None
    target_hidden: int | None
    biased: bool
    block_size: int | None
    windows: tuple[int | None, ...]
    context: int | None
    inferred: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str, target: TargetShape) -> DrafterShape:
        """Read a drafter's config.json or registry shape; ``dflash_config`` first, then the top level.

        Raises:
            CheckpointError: as ``TargetShape.from_config``.
        """
        reader = _Reader(config, source)
        inner = config.get("dflash_config")
        inner = {**inner, "_inferred": _nested_inferred(config)} if isinstance(inner, Mapping) else {}
        nested = _Reader(inner, source)
        taps = nested.value("target_layer_ids") or reader.value("target_layer_ids")
        block = nested.integer("block_size")
        layers = reader.integer("num_hidden_layers")
        heads, hidden = reader.integer("num_attention_heads"), reader.integer("hidden_size")
        head_dim = reader.integer("head_dim")
        return cls(
            source=source,
            hidden=hidden,
            width=reader.integer("intermediate_size"),
            heads=heads,
            kv_heads=reader.integer("num_key_value_heads"),
            head_dim=head_dim if head_dim or not heads or not hidden else hidden // heads,
            layers=layers,
            taps=len(taps) if isinstance(taps, (list, tuple)) else None,
            target_hidden=target.hidden,
            biased=reader.flag("attention_bias"),
            block_size=reader.integer("block_size") if block is None else block,
            windows=_windows(reader, layers),
            context=reader.integer("max_position_embeddings"),
            inferred=tuple(sorted(reader.inferred_used)),
        )


class _Reader:
    """Values of the text model's config: nested first, then the top level, then what was inferred."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self._source = source
        nested = config.get("text_config")
        self._places = [part for part in (nested, config) if isinstance(part, Mapping)]
        self.text: Mapping[str, Any] = text_values(self._places[0], source)
        inferred = config.get("_inferred")
        self._inferred: Mapping[str, Any] = inferred if isinstance(inferred, Mapping) else {}
        self.inferred_used: set[str] = set()

    def value(self, name: str) -> Any:
        for place in self._places:
            if place.get(name) is not None:
                return place[name]
        for key in (name, f"text_config.{name}"):
            if self._inferred.get(key) is not None:
                self.inferred_used.add(name)
                return self._inferred[key]
        return None

    def integer(self, *names: str) -> int | None:
        """The first of ``names`` that is told and not zero."""
        for name in names:
            found = self.value(name)
            if found is None:
                continue
            if number := Fields({}, self._source).check_integer(name, found, *BOUNDS[name]):
                return number
        return None

    def checked(self, name: str) -> Any:
        """A value of a text model that is neither a number nor a flag; None when it is not told."""
        return text_values({name: self.value(name)}, self._source).get(name)

    def flag(self, name: str) -> bool:
        """False when it is not told."""
        return bool(Fields({name: self.value(name)}, self._source).optional_flag(name))

    def mapping(self, name: str) -> Mapping[str, Any]:
        found = self.value(name)
        return found if isinstance(found, Mapping) else {}


def _nested_inferred(config: Mapping[str, Any]) -> dict[str, Any]:
    inferred = config.get("_inferred")
    if not isinstance(inferred, Mapping):
        return {}
    return {key.partition(".")[2]: value for key, value in inferred.items() if key.startswith("dflash_config.")}


def _family(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures")
    first = names[0] if isinstance(names, (list, tuple)) and names else None
    return FAMILIES.get(first) if isinstance(first, str) else None


def _kinds(reader: _Reader, family: str | None) -> tuple[str, ...]:
    if types := reader.checked("layer_types"):
        return tuple(types)
    layers = reader.integer("num_hidden_layers") or 0
    if family in RECURRENT:
        every = reader.integer("full_attention_interval") or FULL_EVERY
        return tuple(LINEAR if (i + 1) % every else FULL for i in range(layers))
    if family == "gpt_oss":
        return tuple(FULL if i % 2 else SLIDING for i in range(layers))
    return (FULL,) * layers


def _turned(reader: _Reader, family: str | None, head_dim: int | None) -> int | None:
    """A share of each head in families whose attention is gated, all of it elsewhere."""
    if head_dim is None or family not in GATED_ATTENTION:
        return head_dim
    rope = reader.checked("rope_parameters") or {}
    share = rope.get("partial_rotary_factor") or reader.checked("partial_rotary_factor")
    return int(head_dim * share) if share else head_dim


def _experts(reader: _Reader, family: str | None) -> Experts | None:
    count = reader.integer("num_experts", "num_local_experts", "n_routed_experts")
    width = reader.integer("moe_intermediate_size")
    if width is None and family == "gpt_oss":
        width = reader.integer("intermediate_size")
    if count is None or width is None:
        return None
    shared = reader.integer("shared_expert_intermediate_size") or 0
    if not shared:
        shared = width * (reader.integer("n_shared_experts") or 0)
    active = reader.integer("num_experts_per_tok")
    return Experts(count, active, width, shared, reader.integer("first_k_dense_replace") or 0)


def _linear(reader: _Reader, family: str | None) -> Linear | None:
    if family not in RECURRENT:
        return None
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    found = [reader.integer(f"linear_{name}") for name in names]
    numbers = [number for number in found if number is not None]
    return Linear(*numbers) if len(numbers) == len(names) else None


def _latent(reader: _Reader) -> Latent | None:
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    numbers = [number for number in map(reader.integer, names) if number is not None]
    return Latent(*numbers) if len(numbers) == len(names) else None


def _native_format(reader: _Reader) -> str | None:
    held = reader.mapping("quantization_config")
    if not held:
        return None
    method = str(held.get("quant_method") or "unknown")
    return "int4" if method == "compressed-tensors" else method


def _windows(reader: _Reader, layers: int | None) -> tuple[int | None, ...]:
    """Keys each layer sees; the cache keeps every row all the same."""
    types = reader.checked("layer_types")
    window = reader.integer("sliding_window")
    if types is not None:
        return tuple(window if kind == SLIDING else None for kind in types)
    return (None,) * (layers or 0)
