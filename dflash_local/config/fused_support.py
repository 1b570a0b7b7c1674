"""Describe what the fused engine computes: the one place that says why a model is not for it, by its features."""

from __future__ import annotations

from functools import lru_cache
from typing import get_args

from dflash_local.config.features import (
    AttentionConfig,
    ClampedSwiGLU,
    GatedDeltaNetConfig,
    LatentAttentionConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
)
from dflash_local.config.module_names import GATED_DELTA_NET, INTERLEAVED, PREFIXES
from dflash_local.config.quantization import WHOLE, StoredFp8, StoredPlain
from dflash_local.config.rope_parameters import RopeKind

CONV_KERNEL_SIZE = 4  # of the Gated-DeltaNet kernels
ACTIVATION = "silu"


@lru_cache(maxsize=256)  # every plan of a model asks
def fused_refusal(model: ModelConfig) -> str:
    """Return why the fused engine cannot run a target; empty when it can. What no source states is no reason."""
    if any(isinstance(layer.mixer, LatentAttentionConfig) for layer in model.layers):
        return "its attention is latent"
    if model.quantization is not None and model.quantization.unread:
        return f"its weights are in the format {model.quantization.unread}"
    variants = (reason for layer in model.layers if (reason := _unknown_variant(layer)))
    if reason := next(variants, "") or _crossed_blocks(model) or _unjoined_experts(model):
        return reason
    if not any(isinstance(layer.mixer, AttentionConfig) for layer in model.layers):
        return "it has no attention"
    if model.rope_type not in get_args(RopeKind):
        return f"its rotary embedding is {model.rope_type}"
    return ""


def _unknown_variant(layer: LayerConfig) -> str:
    mixer, mlp = layer.mixer, layer.mlp
    if isinstance(mlp, MLPConfig) and mlp.bias:
        return "its feed-forward projections have biases"
    if isinstance(mlp, MoEConfig) and (reason := _unknown_mixture(mlp)):
        return reason
    if mlp.activation != ACTIVATION and not isinstance(mlp.activation, ClampedSwiGLU):
        return f"its activation is {mlp.activation}"
    if isinstance(mixer, AttentionConfig) and mixer.logit_softcap is not None:
        return "its attention scores have a soft cap"
    if isinstance(mixer, GatedDeltaNetConfig) and mixer.conv_kernel_size != CONV_KERNEL_SIZE:
        return f"its convolution is {mixer.conv_kernel_size} wide, {CONV_KERNEL_SIZE} is known"
    return ""


def _crossed_blocks(model: ModelConfig) -> str:
    """Return why interleaved rows cannot be put in order: a block of rows with one scale must lie in one part."""
    for index, layer in enumerate(model.layers):
        mixer = layer.mixer
        if not isinstance(mixer, GatedDeltaNetConfig) or mixer.split_projections or model.quantization is None:
            continue
        stored = model.quantization.stored(f"{PREFIXES[-1]}layers.{index}.{GATED_DELTA_NET}.{INTERLEAVED[0]}")
        kept = stored.kept if isinstance(stored, StoredPlain) else stored
        rows = kept.block[0] if isinstance(kept, StoredFp8) else WHOLE
        if rows != WHOLE and mixer.num_key_heads > 1 and any(size % rows for size in mixer.qkvz_rows):
            return f"its interleaved Gated-DeltaNet rows cross its fp8 blocks of {rows} rows"
    return ""


def _unjoined_experts(model: ModelConfig) -> str:
    """Return why the matrices of a layer's experts cannot be one weight, one below the other; empty where they can."""
    if model.quantization is None:
        return ""
    for index, layer in enumerate(model.layers):
        if not isinstance(layer.mlp, MoEConfig):
            continue
        gate, up, down = (
            model.quantization.stored(f"model.layers.{index}.mlp.experts.0.{name}_proj")
            for name in ("gate", "up", "down")
        )
        if gate != up:
            return "gate and up of its experts differ in format"
        for stored, rows in ((gate, layer.mlp.intermediate_size), (down, model.hidden_size)):
            if isinstance(stored, StoredFp8) and stored.block[0] and rows % stored.block[0]:
                return f"fp8 blocks of {stored.block[0]} rows do not divide the {rows} rows of its experts"
    return ""


def _unknown_mixture(mixture: MoEConfig) -> str:
    special = mixture.expert_bias or mixture.interleaved or isinstance(mixture.activation, ClampedSwiGLU)
    if special and mixture.shared_intermediate_size:
        return "its shared expert is unlike the others"
    if mixture.scoring != "softmax":
        return f"its router takes the {mixture.scoring} of its logits"
    return "" if mixture.num_experts_per_tok else "its num_experts_per_tok is not known"
