"""A target's text model as features of the whole and of each layer, named as in published configurations.

Building, planning and loading a layer read its features; the family's name decides nothing behind ``read_model``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

from dflash_local.checkpoint_files.config_values import UnknownValue
from dflash_local.config.quantization import Quantization
from dflash_local.config.rope_parameters import RopeParameters


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Softmax attention of one layer.

    Attributes:
        rotary_dim: leading dimensions of a head that rotate.
        gated: each query head is followed by a gate, whose sigmoid multiplies the head's result (Qwen3-Next, Qwen3.5).
        qk_norm: queries and keys are normed head by head.
        qkv_bias, output_bias: of the projections. sinks: a logit of each head's own in its softmax (gpt-oss).
        sliding_window: keys a row sees including its own; None is all.
        logit_softcap: scores become ``cap * tanh(score / cap)``; None leaves them.
        scale: of the scores; None is ``head_dim ** -0.5``.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    gated: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    sliding_window: int | None = None
    logit_softcap: float | None = None
    scale: float | None = None

    @property
    def fits_sdpa(self) -> bool:
        """Return True where torch's scaled_dot_product_attention computes it: it takes neither sinks nor a soft cap."""
        return not self.sinks and self.logit_softcap is None

    @property
    def query_size(self) -> int:
        """Count rows of q_proj: queries, and their gates where they have some."""
        return self.output_size * (2 if self.gated else 1)

    @property
    def kv_size(self) -> int:
        """Count rows of k_proj, and of v_proj."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Count rows of the three projections in one."""
        return self.query_size + 2 * self.kv_size

    @property
    def output_size(self) -> int:
        """Count numbers that o_proj takes: all heads' results."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LatentAttentionConfig:
    """Multi-head latent attention (DeepSeek-V3). ``q_lora_rank``: None where queries are projected at once."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    bias: bool = False

    @property
    def head_dim(self) -> int:
        """Return the width of queries and keys: the part without positions and the part that rotates."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class GatedDeltaNetConfig:
    """A Gated-DeltaNet layer (arXiv 2412.06464) as Qwen3-Next and Qwen3.5 have it.

    Attributes:
        split_projections: qkv, z, b and a have a tensor each (Qwen3.5), not one of q, k, v, z and one of b, a, whose
            rows go by key heads (Qwen3-Next).
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_size: int
    split_projections: bool = True

    @property
    def qkvz_rows(self) -> tuple[int, int, int, int]:
        """Return rows of one key head in an interleaved projection: of its query, key, values and their z."""
        wide = self.num_value_heads // self.num_key_heads * self.value_head_dim
        return self.key_head_dim, self.key_head_dim, wide, wide

    @property
    def ba_rows(self) -> tuple[int, int]:
        """Return rows of one key head in an interleaved projection: b and a of its values."""
        values = self.num_value_heads // self.num_key_heads
        return values, values

    @property
    def value_size(self) -> int:
        """Count numbers of all value heads, and of z."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_dim(self) -> int:
        """Count channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_head_dim + self.value_size

    @property
    def projection_size(self) -> int:
        """Count rows of the input projections in one: the channels, z, b and a."""
        return self.conv_dim + self.value_size + 2 * self.num_value_heads


@dataclass(frozen=True, slots=True)
class MLPConfig:
    """A gated feed-forward part: ``down(activation(gate(x)) * up(x))``."""

    intermediate_size: int
    activation: str = "silu"
    bias: bool = False


Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """gpt-oss's ``(up + 1) * gate * sigmoid(alpha * gate)``, gate clamped to ``limit`` from above, up on both sides."""

    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """A mixture of experts.

    Attributes:
        num_experts_per_tok: None where it is not given. intermediate_size: of a routed expert.
        shared_intermediate_size: of the expert that every token takes; 0 is none. shared_gate: its result is weighed
            by a sigmoid of the token. expert_bias, router_bias: of their products.
        activation: a word of transformers' ``hidden_act``, whose result multiplies up's; or both in one.
        interleaved: files hold all of a layer's experts in one tensor, rows of gate and up by turns; of plain weights
            the transposed matrices (gpt-oss). router: its module's name.
        scoring: what makes probabilities of the router's logits. norm_topk_prob: those of the chosen experts are
            divided by their sum.
    """

    num_experts: int
    num_experts_per_tok: int | None
    intermediate_size: int
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    expert_bias: bool = False
    router_bias: bool = False
    activation: str | ClampedSwiGLU = "silu"
    scoring: Scoring = "softmax"
    norm_topk_prob: bool = True
    interleaved: bool = False
    router: str = "gate"


Mixer = AttentionConfig | LatentAttentionConfig | GatedDeltaNetConfig
FeedForward = MLPConfig | MoEConfig


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """A decoder layer. ``sandwich_norms``: results of both parts are normed before they are added (Gemma 2)."""

    mixer: Mixer
    mlp: FeedForward
    sandwich_norms: bool = False


@dataclass(frozen=True)  # no slots: what is worked out once has its place in the instance
class ModelConfig:
    """A target's text model; towers and multi-token-prediction layers are not loaded and not described.

    Attributes:
        source: where it was read, for messages. family: for screens and for the loader's own tables; no feature is
            read off it later.
        rms_norm_eps: None where it is not given. norm_plus_one: norms count their weight from zero and round after it.
        rope: None where it is not given, or of a kind that only transformers computes. rope_type: its kind in any case.
        stored_dtype: of the published weights. quantization: how they are quantised; None for plain ones.
        embedding_scale: what embeddings are multiplied by. final_logit_softcap: as of attention's scores.
        inferred: of the values that sizes and limits depend on, names of those that are likely but quoted by no source.
        first_layer: number of the first of ``layers`` in the checkpoint; over 0 where those before it are not here.
    """

    source: str
    family: str
    hidden_size: int
    vocab_size: int
    tie_word_embeddings: bool
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float | None
    norm_plus_one: bool
    rope: RopeParameters | None
    max_position_embeddings: int | None
    rope_type: str = "default"
    stored_dtype: str = "bfloat16"
    quantization: Quantization | None = None
    embedding_scale: float = 1.0
    final_logit_softcap: float | None = None
    inferred: tuple[str, ...] = ()
    first_layer: int = 0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Compute the hash once: a plan looks a model of many layers up thousands of times."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def layer_kinds(self) -> Mapping[LayerConfig, int]:
        """Return layers that differ, in order, and how many there are of each."""
        return Counter(self.layers)

    @property
    def norm_eps(self) -> float:
        """Return ``rms_norm_eps``. Raises UnknownValue: it is not given."""
        if self.rms_norm_eps is None:
            raise UnknownValue("rms_norm_eps", self.source)
        return self.rms_norm_eps

    @property
    def rotation(self) -> RopeParameters:
        """Return ``rope``. Raises UnknownValue: it is not given, or of a kind that only transformers computes."""
        if self.rope is None:
            raise UnknownValue("rope_theta", self.source)
        return self.rope

    @property
    def recurrent(self) -> bool:
        """Return True when a layer carries a state that cannot be cut back."""
        return any(isinstance(layer.mixer, GatedDeltaNetConfig) for layer in self.layer_kinds)

    @property
    def takes_snapshots(self) -> bool:
        """Return True when committed tokens may have to be forgotten by going back to a snapshot."""
        return self.recurrent or any(getattr(layer.mixer, "sliding_window", None) for layer in self.layer_kinds)

    @property
    def dense(self) -> bool:
        """Return True when no layer has experts."""
        return not any(isinstance(layer.mlp, MoEConfig) for layer in self.layer_kinds)
