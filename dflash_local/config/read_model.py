"""Reads a target's config.json, or the registry's copy of one, into features; the only reader of either."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from dflash_local.checkpoint_files.config_values import ConfigFields, Values, fill
from dflash_local.checkpoint_files.text_config import EXPERT_COUNTS, text_values
from dflash_local.config.families import LINEAR, SLIDING, Family, FamilyExperts, family_of
from dflash_local.config.features import (
    AttentionConfig,
    ClampedSwiGLU,
    FeedForward,
    GatedDeltaNetConfig,
    LatentAttentionConfig,
    LayerConfig,
    Mixer,
    MLPConfig,
    ModelConfig,
    MoEConfig,
)
from dflash_local.config.quantization import MXFP4, Quantization
from dflash_local.config.quantizers import read_quantization
from dflash_local.config.rope_parameters import RopeKind, RopeParameters
from dflash_local.errors import CheckpointError


def read_model(config: Mapping[str, Any], source: str) -> ModelConfig:
    """Return the text model of a ``config.json``, nested in ``text_config`` or not.

    Args:
        config: null is "not known"; ``_inferred``, of a shape of the registry, holds likely values of nulls.
        source: what to call it in messages.

    Raises:
        PairError: the architecture is not supported. UnknownValue: a needed number is missing.
        CheckpointError: a value is of the wrong type or out of its bounds; names ``source`` and the key.
    """
    family = family_of(config, source)
    known, inferred = fill(config)
    top = ConfigFields(known, source)
    nested = top.inner("text_config")
    text = ConfigFields(nested or known, source)
    for fields in (text, top):
        if fields.present("model_type"):
            fields.word("model_type", family.model_types)
    values = Values(text_values(text.values, source), source, inferred)
    tied = top.optional_flag("tie_word_embeddings") if nested else None
    dtypes = (place.get(name) for place in (text.values, known) for name in ("dtype", "torch_dtype"))
    return ModelConfig(
        source=source,
        family=family.name,
        hidden_size=values.needed("hidden_size"),
        vocab_size=values.needed("vocab_size"),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", family.tied) if tied is None else tied),
        layers=_layers(values, family),
        rms_norm_eps=values.values.get("rms_norm_eps"),
        norm_plus_one=family.norm_plus_one,
        rope=_rope(values),
        rope_type=_rope_values(values).get("rope_type", "default"),
        max_position_embeddings=values.get("max_position_embeddings"),
        stored_dtype=str(next(filter(None, dtypes), "bfloat16")),
        quantization=_quantization(quantization_settings(top, text), family),
        embedding_scale=values.needed("hidden_size") ** 0.5 if family.scaled_embedding else 1.0,
        final_logit_softcap=_softcap(values, "final_logit_softcapping", family.soft_caps, 1),
        inferred=values.inferred,
    )


def _quantization(settings: ConfigFields, family: Family) -> Quantization | None:
    """Read the format; MXFP4 by that name alone is how gpt-oss stores its experts, and not read for other families."""
    found = read_quantization(settings)
    if found is not None and found.method == MXFP4 and not (family.experts and family.experts.interleaved):
        return replace(found, unread=MXFP4)
    return found


def quantization_settings(top: ConfigFields, text: ConfigFields) -> ConfigFields:
    return ConfigFields(top.inner("quantization_config") or text.inner("quantization_config"), top.where)


def _rope_values(values: Values) -> Mapping[str, Any]:
    found: Mapping[str, Any] = values.values.get("rope_parameters") or values.values.get("rope_scaling") or {}
    return found


def _rope(values: Values) -> RopeParameters | None:
    """Read the rope; ``text_config.check_rope`` says at load what is missing or impossible."""
    if _rope_values(values).get("rope_type", "default") not in get_args(RopeKind):
        return None
    try:
        return RopeParameters.from_json(values.values, values.source)
    except CheckpointError:
        return None


def _layers(values: Values, family: Family) -> tuple[LayerConfig, ...]:
    count = values.needed("num_hidden_layers")
    window = values.values.get("sliding_window", family.window)
    if family.window_flag and not values.get("use_sliding_window"):
        window = None
    kinds = tuple(values.get("layer_types") or ()) or family.pattern({**values.values, "sliding_window": window}, count)
    for kind in kinds:
        ConfigFields({"layer_types": kind}, values.source).word("layer_types", family.layer_types)
    mixers = {kind: _mixer(kind, values, family, window) for kind in dict.fromkeys(kinds)}
    return tuple(
        LayerConfig(mixers[kind], _mlp(index, values, family), family.sandwich_norms)
        for index, kind in enumerate(kinds)
    )


def _mixer(kind: str, values: Values, family: Family, window: int | None) -> Mixer:
    if kind == LINEAR:
        return GatedDeltaNetConfig(
            num_key_heads=values.needed("linear_num_key_heads"),
            num_value_heads=values.needed("linear_num_value_heads"),
            key_head_dim=values.needed("linear_key_head_dim"),
            value_head_dim=values.needed("linear_value_head_dim"),
            conv_kernel_size=values.needed("linear_conv_kernel_dim"),
            split_projections=family.split_projections,
        )
    if family.latent:
        return _latent_attention(values, family)
    heads = values.needed("num_attention_heads")
    head_dim = values.get("head_dim") or values.needed("hidden_size") // heads
    biased = _attention_bias(values, family)
    scalar = None if family.score_scalar is None else values.get("query_pre_attn_scalar", family.score_scalar)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=values.needed("num_key_value_heads")
        if family.kv_heads_required
        else int(values.get("num_key_value_heads", heads)),
        head_dim=head_dim,
        rotary_dim=_rotary_dim(head_dim, values, family),
        gated=family.gated,
        qk_norm=family.qk_norm,
        qkv_bias=biased,
        output_bias=biased,
        sinks=family.sinks,
        sliding_window=window if kind == SLIDING else None,
        logit_softcap=_softcap(values, "attn_logit_softcapping", family.soft_caps, 0),
        scale=None if scalar is None else scalar**-0.5,
    )


def _softcap(values: Values, name: str, usual: tuple[float, float] | None, index: int) -> float | None:
    return None if usual is None else values.values.get(name, usual[index])


def _rotary_dim(head_dim: int, values: Values, family: Family) -> int:
    if family.partial_rotary_factor is None:
        return head_dim
    value = _rope_values(values).get("partial_rotary_factor") or values.get("partial_rotary_factor")
    return int(head_dim * (value or family.partial_rotary_factor))


def _attention_bias(values: Values, family: Family) -> bool:
    return family.attention_bias is not None and bool(values.get("attention_bias", family.attention_bias))


def _latent_attention(values: Values, family: Family) -> LatentAttentionConfig:
    is_null = values.values.get("q_lora_rank", 0) is None
    return LatentAttentionConfig(
        num_heads=values.needed("num_attention_heads"),
        q_lora_rank=None if is_null else values.needed("q_lora_rank"),
        kv_lora_rank=values.needed("kv_lora_rank"),
        qk_nope_head_dim=values.needed("qk_nope_head_dim"),
        qk_rope_head_dim=values.needed("qk_rope_head_dim"),
        v_head_dim=values.needed("v_head_dim"),
        bias=_attention_bias(values, family),
    )


def _mlp(layer: int, values: Values, family: Family) -> FeedForward:
    key, default = family.activation
    activation = str(values.get(key, default))
    experts = family.experts
    if experts is None or not _has_experts(layer, experts, values):
        bias = family.mlp_bias and bool(values.get("mlp_bias"))
        return MLPConfig(values.needed("intermediate_size"), activation, bias)
    if (count := _experts(values)) == 0:
        raise CheckpointError(f"{values.source}: layer {layer} is made of experts, and there are 0 of them")
    usual, width = ClampedSwiGLU(), values.needed(experts.width)
    clamped = ClampedSwiGLU(values.get("swiglu_alpha", usual.alpha), values.get("swiglu_limit", usual.limit))
    shared = 0 if experts.shared is None else int(values.get(experts.shared, 0))
    return MoEConfig(
        num_experts=count,
        num_experts_per_tok=values.get("num_experts_per_tok"),
        intermediate_size=width,
        shared_intermediate_size=shared * width if experts.shared == "n_shared_experts" else shared,
        shared_gate=experts.shared_gate,
        expert_bias=experts.bias,
        router_bias=experts.bias,
        activation=clamped if experts.clamped_swiglu else activation,
        scoring=experts.scoring,
        norm_topk_prob=experts.norm_topk_prob is None or bool(values.get("norm_topk_prob", experts.norm_topk_prob)),
        interleaved=experts.interleaved,
        router=experts.router,
    )


def _has_experts(layer: int, experts: FamilyExperts, values: Values) -> bool:
    if experts.first_dense and layer < values.get("first_k_dense_replace", 0):
        return False
    if not experts.sparse_step:
        return True
    if layer in values.get("mlp_only_layers", ()) or _experts(values) == 0:
        return False
    return (layer + 1) % (values.get("decoder_sparse_step") or 1) == 0


def _experts(values: Values) -> int:
    """Count experts; transformers writes that of Qwen3-MoE under another key than its publisher."""
    return values.needed(next((key for key in EXPERT_COUNTS if values.values.get(key) is not None), EXPERT_COUNTS[0]))
