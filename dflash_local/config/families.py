"""The one table from published architectures to features of layers; nobody else reads a feature off a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_local.checkpoint_files.config_values import shown
from dflash_local.config.features import Scoring
from dflash_local.errors import PairError

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
# The first layer that slides where a configuration does not say: Qwen3Config's default.
FIRST_SLIDING = 28
SHARED = "shared_expert_intermediate_size"

# The kinds of so many layers where a configuration does not list them; given the text model's values, of which
# ``sliding_window`` is None where windows are switched off.
Pattern = Callable[[Mapping[str, Any], int], tuple[str, ...]]


def all_full(values: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    return (FULL,) * layers


def all_sliding(values: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Return a window in every layer, if there is one at all."""
    return (SLIDING if values.get("sliding_window") is not None else FULL,) * layers


def last_sliding(values: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Return a window in the layers behind the first ones, if there is one at all."""
    if values.get("sliding_window") is None:
        return (FULL,) * layers
    first = values.get("max_window_layers", FIRST_SLIDING)
    return tuple(SLIDING if layer >= first else FULL for layer in range(layers))


def alternating(values: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Return a window in every other layer, the first one among them."""
    return tuple(FULL if layer % 2 else SLIDING for layer in range(layers))


def fourth_full(values: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Return gated DeltaNet, and full attention in the last of every four layers, or of as many as are given."""
    every = values.get("full_attention_interval") or 4
    return tuple(LINEAR if (layer + 1) % every else FULL for layer in range(layers))


@dataclass(frozen=True, slots=True)
class FamilyExperts:
    """The mixture of a family: under which keys its widths stand.

    Attributes:
        sparse_step: ``decoder_sparse_step`` and ``mlp_only_layers`` leave layers dense; no experts leave all so.
        first_dense: ``first_k_dense_replace`` layers are dense.
        shared: of the width of the expert that every token takes; as many times the width of a routed one where it is
            ``n_shared_experts``. bias: experts and router have biases. scoring: what makes probabilities of the
            router's logits. norm_topk_prob: that flag where it is not given; None for a family without it, whose
            weights of the chosen experts always sum to one.
        interleaved, router: as of ``MoEConfig``. clamped_swiglu: in place of ``hidden_act``.
    """

    width: str = "moe_intermediate_size"
    shared: str | None = None
    shared_gate: bool = False
    sparse_step: bool = False
    first_dense: bool = False
    bias: bool = False
    scoring: Scoring = "softmax"
    norm_topk_prob: bool | None = None
    interleaved: bool = False
    router: str = "gate"
    clamped_swiglu: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """Hold what the architectures of a family have in common.

    Attributes:
        model_types: that a configuration may carry; the first is the text model's.
        layer_types: that its targets may mix. pattern: of them, where they are not listed.
        window: ``sliding_window`` where it is not given; null is none. window_flag: it counts only with
            ``use_sliding_window``.
        attention_bias: what that flag is where it is not given; None for a family without it. mlp_bias: it knows the
            flag. kv_heads_required: where their number is missing it is not known; else as many as query heads.
        partial_rotary_factor: share of a head that rotates where it is not given; None for a family that rotates all.
        split_projections: of Gated DeltaNet, each a tensor of its own.
        tied: ``tie_word_embeddings`` where it is not given. activation: key and value where it is not given.
        scaled_embedding: by the root of ``hidden_size``.
        soft_caps: of scores and of logits, where they are not given; null is none. None for a family without them.
        score_scalar: ``query_pre_attn_scalar`` where it is not given: scores are divided by its root, not by that of a
            head's dimensions. None for a family without it.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    layer_types: tuple[str, ...] = (FULL,)
    pattern: Pattern = all_full
    window: int = 4096
    window_flag: bool = False
    qk_norm: bool = False
    gated: bool = False
    sinks: bool = False
    latent: bool = False
    attention_bias: bool | None = False
    mlp_bias: bool = False
    kv_heads_required: bool = True
    partial_rotary_factor: float | None = None
    split_projections: bool = True
    experts: FamilyExperts | None = None
    norm_plus_one: bool = False
    sandwich_norms: bool = False
    tied: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")
    scaled_embedding: bool = False
    soft_caps: tuple[float, float] | None = None
    score_scalar: int | None = None

    @property
    def fits_sdpa(self) -> bool:
        """Return True where torch's scaled_dot_product_attention computes its attention."""
        return not self.sinks and self.soft_caps is None


TABLE = (
    Family("llama", ("LlamaForCausalLM",), ("llama",), mlp_bias=True, kv_heads_required=False),
    Family(
        "mistral", ("MistralForCausalLM",), ("mistral",), layer_types=(FULL, SLIDING), pattern=all_sliding,
        attention_bias=None,
    ),
    Family(
        "gemma2", ("Gemma2ForCausalLM",), ("gemma2",), layer_types=(FULL, SLIDING), pattern=alternating,
        norm_plus_one=True, sandwich_norms=True, tied=True, activation=("hidden_activation", "gelu_pytorch_tanh"),
        scaled_embedding=True, soft_caps=(50.0, 30.0), score_scalar=256,
    ),
    Family(
        "qwen3", ("Qwen3ForCausalLM",), ("qwen3",), layer_types=(FULL, SLIDING), pattern=last_sliding,
        window_flag=True, qk_norm=True,
    ),
    Family(
        "qwen3_moe", ("Qwen3MoeForCausalLM",), ("qwen3_moe",), layer_types=(FULL, SLIDING), pattern=all_sliding,
        window_flag=True, qk_norm=True, experts=FamilyExperts(sparse_step=True, norm_topk_prob=False),
    ),
    Family(
        "qwen3_next", ("Qwen3NextForCausalLM",), ("qwen3_next",), layer_types=(FULL, LINEAR), pattern=fourth_full,
        qk_norm=True, gated=True, partial_rotary_factor=0.25, split_projections=False, norm_plus_one=True,
        experts=FamilyExperts(shared=SHARED, shared_gate=True, sparse_step=True, norm_topk_prob=True),
    ),
    Family(
        "qwen3_5", ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), ("qwen3_5_text", "qwen3_5"),
        layer_types=(FULL, LINEAR), pattern=fourth_full, qk_norm=True, gated=True, partial_rotary_factor=0.25,
        norm_plus_one=True,
    ),
    Family(
        "qwen3_5_moe", ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        ("qwen3_5_moe_text", "qwen3_5_moe"), layer_types=(FULL, LINEAR), pattern=fourth_full, qk_norm=True, gated=True,
        partial_rotary_factor=0.25, norm_plus_one=True, experts=FamilyExperts(shared=SHARED, shared_gate=True),
    ),
    Family(
        "gpt_oss", ("GptOssForCausalLM",), ("gpt_oss",), layer_types=(FULL, SLIDING), pattern=alternating, window=128,
        sinks=True, attention_bias=True,
        experts=FamilyExperts(
            width="intermediate_size", bias=True, interleaved=True, router="router", clamped_swiglu=True
        ),
    ),
    Family(
        "deepseek_v3", ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        ("deepseek_v3", "kimi_k2", "kimi_k25"), latent=True,
        experts=FamilyExperts(shared="n_shared_experts", first_dense=True, scoring="sigmoid", norm_topk_prob=True),
    ),
)  # fmt: skip

NAMED = {family.name: family for family in TABLE}
ARCHITECTURES = {architecture: family for family in TABLE for architecture in family.architectures}


def of_model_type(model_type: str) -> Family | None:
    """Return the family whose configurations carry it; None for one that is not known."""
    return next((family for family in TABLE if model_type in family.model_types), None)


def family_of(config: Mapping[str, Any], source: str) -> Family:
    """Return the family of a ``config.json``. Raises PairError: its first architecture is none of the table."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if isinstance(name, str) and name in ARCHITECTURES:
        return ARCHITECTURES[name]
    raise PairError(
        f"{source}: target architecture {shown(name)} is not supported", "supported: " + ", ".join(ARCHITECTURES)
    )
