"""How many parameters a model has, group by group, exactly as transformers and our drafter allocate them.

Knows nothing of bytes per weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import lru_cache

from dflash_local.config.features import (
    AttentionConfig,
    FeedForward,
    GatedDeltaNetConfig,
    LatentAttentionConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
)
from dflash_local.drafters.drafter import Drafter


@dataclass(frozen=True, slots=True)
class Parameters:
    """Holds parameters of a target's text model. ``head`` is 0 when it is the embedding.

    Attributes:
        linear: the Gated-DeltaNet layers but for their decay projections, which ``whole`` holds.
        mlp: dense feed-forward parts and shared experts. experts: the routed ones, biases included.
        whole: matrices that stay unquantised whatever the format (decay projections, routers).
        vectors: norms, biases, convolution and other one-dimensional weights.
    """

    embedding: int = 0
    head: int = 0
    attention: int = 0
    linear: int = 0
    mlp: int = 0
    experts: int = 0
    whole: int = 0
    vectors: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def times(self, count: int) -> Parameters:
        return Parameters(*(count * getattr(self, field.name) for field in fields(self)))

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def quantisable(self) -> int:
        """Return weights of the linear layers that bitsandbytes replaces in a dense model."""
        return self.attention + self.linear + self.mlp


@lru_cache(maxsize=64)  # a plan asks for each context that it tries
def target_parameters(model: ModelConfig) -> Parameters:
    hidden, table = model.hidden_size, model.vocab_size * model.hidden_size
    whole = Parameters(embedding=table, head=0 if model.tie_word_embeddings else table, vectors=hidden)
    for layer, count in model.layer_kinds.items():
        whole += layer_parameters(layer, hidden).times(count)
    return whole


def layer_parameters(layer: LayerConfig, hidden: int) -> Parameters:
    """Return parameters of one decoder layer, its norms included."""
    norms = Parameters(vectors=(4 if layer.sandwich_norms else 2) * hidden)
    return _mixer(layer, hidden) + _feed_forward(layer.mlp, hidden) + norms


def drafter_parameters(drafter: Drafter, target_hidden: int) -> int:
    return sum(math.prod(shape) for shape in drafter.tensors(target_hidden).values())


def drafter_resident(drafter: Drafter, target_hidden: int) -> int:
    """Return parameters that a loaded drafter holds."""
    return drafter_parameters(drafter, target_hidden) + drafter.repeated_size


def _mixer(layer: LayerConfig, hidden: int) -> Parameters:
    mixer = layer.mixer
    if isinstance(mixer, GatedDeltaNetConfig):
        return _gated_delta_net(mixer, hidden)
    if isinstance(mixer, LatentAttentionConfig):
        return _latent_attention(mixer, hidden)
    return _attention(mixer, hidden)


def _attention(part: AttentionConfig, hidden: int) -> Parameters:
    vectors = 2 * part.head_dim if part.qk_norm else 0
    vectors += part.qkv_size if part.qkv_bias else 0
    vectors += hidden if part.output_bias else 0
    vectors += part.num_heads if part.sinks else 0
    return Parameters(attention=hidden * part.qkv_size + part.output_size * hidden, vectors=vectors)


def _latent_attention(part: LatentAttentionConfig, hidden: int) -> Parameters:
    heads, queries = part.num_heads, part.num_heads * part.head_dim
    rank = part.q_lora_rank
    query = hidden * queries if rank is None else hidden * rank + rank * queries
    compressed = part.kv_lora_rank + part.qk_rope_head_dim
    keys = hidden * compressed + part.kv_lora_rank * heads * (part.qk_nope_head_dim + part.v_head_dim)
    vectors = (rank or 0) + part.kv_lora_rank
    vectors += (rank or 0) + compressed + hidden if part.bias else 0
    return Parameters(attention=query + keys + heads * part.v_head_dim * hidden, vectors=vectors)


def _gated_delta_net(part: GatedDeltaNetConfig, hidden: int) -> Parameters:
    return Parameters(
        linear=hidden * (part.conv_dim + part.value_size) + part.value_size * hidden,
        whole=2 * hidden * part.num_value_heads,
        vectors=part.conv_dim * part.conv_kernel_size + 2 * part.num_value_heads + part.value_head_dim,
    )


def _feed_forward(part: FeedForward, hidden: int) -> Parameters:
    """Count dense or shared matrices, routed experts, router and shared gate of one layer."""
    if isinstance(part, MLPConfig):
        return Parameters(
            mlp=3 * hidden * part.intermediate_size, vectors=2 * part.intermediate_size + hidden if part.bias else 0
        )
    routed = 3 * hidden * part.intermediate_size
    if part.expert_bias:
        routed += 2 * part.intermediate_size + hidden
    router = part.num_experts * hidden + (part.num_experts if part.router_bias else 0)
    return Parameters(
        mlp=3 * hidden * part.shared_intermediate_size,
        experts=part.num_experts * routed,
        whole=router + (hidden if part.shared_gate else 0),
    )
