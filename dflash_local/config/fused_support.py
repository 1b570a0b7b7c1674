"""What the fused engine computes: the one place that says why a model is not for it, by its features."""

from __future__ import annotations

from collections.abc import Callable
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
from dflash_local.config.quantization import StoredFp8
from dflash_local.config.rope_parameters import RopeKind

CONV_KERNEL_SIZE = 4  # of the Gated-DeltaNet kernels
ACTIVATION = "silu"


def fused_refusal(model: ModelConfig, device: str) -> str:
    """Why the fused engine cannot run a target; empty when it can. What no source tells is no reason.

    Args:
        device: as a session names it.
    """
    if not model.dense and not device.startswith("cpu"):
        return "it is a mixture of experts, whose kernels are missing"
    if reason := _first(_unknown_kind, model):
        return reason
    if model.quantization is not None and model.quantization.unread:
        return f"its weights are in the format {model.quantization.unread}"
    if reason := _first(_unknown_variant, model) or _unjoined_experts(model):
        return reason
    if not any(isinstance(layer.mixer, AttentionConfig) for layer in model.layers):
        return "it has no attention"
    if model.rope_type not in get_args(RopeKind):
        return f"its rotary embedding is {model.rope_type}"
    return ""


def _first(why: Callable[[LayerConfig], str], model: ModelConfig) -> str:
    return next((reason for layer in model.layers if (reason := why(layer))), "")


def _unknown_kind(layer: LayerConfig) -> str:
    if isinstance(layer.mixer, LatentAttentionConfig):
        return "its attention is latent"
    if isinstance(layer.mixer, AttentionConfig) and layer.mixer.sinks:
        return "its attention has sinks"
    if isinstance(layer.mixer, GatedDeltaNetConfig) and not layer.mixer.split_projections:
        return "its Gated-DeltaNet projections are interleaved"
    return ""


def _unknown_variant(layer: LayerConfig) -> str:
    mixer, mlp = layer.mixer, layer.mlp
    attention = mixer if isinstance(mixer, AttentionConfig) else None
    biased = attention is not None and (attention.qkv_bias or attention.output_bias)
    if biased or (isinstance(mlp, MLPConfig) and mlp.bias):
        return "its projections have biases"
    if isinstance(mlp, MoEConfig) and (reason := _unknown_mixture(mlp)):
        return reason
    if mlp.activation != ACTIVATION and not isinstance(mlp.activation, ClampedSwiGLU):
        return f"its activation is {mlp.activation}"
    if attention is not None and attention.logit_softcap is not None:
        return "its attention scores have a soft cap"
    if isinstance(mixer, GatedDeltaNetConfig) and mixer.conv_kernel_size != CONV_KERNEL_SIZE:
        return f"its convolution is {mixer.conv_kernel_size} wide, {CONV_KERNEL_SIZE} is known"
    return ""


def _unjoined_experts(model: ModelConfig) -> str:
    """Why the matrices of a layer's experts cannot be one weight, one below the other; empty where they can."""
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
