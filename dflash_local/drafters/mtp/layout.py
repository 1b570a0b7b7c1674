"""Describe the layer for multi-token prediction that a target's own checkpoint carries under ``mtp.*``.

One decoder layer of the target's own kind, over the embedding of the next token and the target's hidden state beside
it; further drafts take its own output in place of the hidden state. Embedding and head are the target's. Torch-free.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from dflash_local.checkpoint_files.config_values import ConfigFields
from dflash_local.config.features import AttentionConfig, FeedForward, LayerConfig, MLPConfig, ModelConfig
from dflash_local.config.read_model import read_model
from dflash_local.drafters.drafter import MIN_BLOCK, Drafter, Shapes
from dflash_local.errors import CheckpointError

# Published targets have been measured with 2 to 5 drafts; behind the fourth few are accepted.
BLOCK, MAX_BLOCK = 5, 6
PREFIX = "mtp."
LAYER = f"{PREFIX}layers.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPConfig(Drafter):
    """The layer, by its target's configuration. Two keys may be added to that: ``mtp_block_size`` (2 to 6, 5 where it
    is not given), and ``mtp_final_norm`` false where the layer takes the target's hidden states from before the final
    norm.

    Attributes:
        model: the target's, with this layer in place of its own ones. normed: it takes hidden states behind the norm.
    """

    kind: ClassVar[str] = "mtp"
    first_draft: ClassVar[int] = 0
    prefix: ClassVar[str] = PREFIX
    untapped: ClassVar[int] = 0

    model: ModelConfig
    normed: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str, inferred: Collection[str] = ()) -> MTPConfig:
        model = read_model(config, source)
        fields = ConfigFields(config, source)
        mixer = next((each.mixer for each in model.layers if isinstance(each.mixer, AttentionConfig)), None)
        if mixer is None:
            raise CheckpointError(f"{source}: no layer has full attention, as an mtp layer has", "take another drafter")
        block = fields.optional_integer("mtp_block_size", MIN_BLOCK, MAX_BLOCK)
        return cls(
            block_size=BLOCK if block is None else block,
            taps=(model.num_layers - 1,),
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            max_position_embeddings=model.max_position_embeddings,
            num_target_layers=model.num_layers,
            target_hidden_size=model.hidden_size,
            quantization=model.quantization,
            source=source,
            inferred=model.inferred,
            model=replace(model, layers=(LayerConfig(mixer, model.layers[-1].mlp),)),
            normed=fields.optional_flag("mtp_final_norm") is not False,
        )

    @property
    def passes(self) -> int:
        """Count one for each draft: it takes the one before."""
        return self.draft_rows

    @property
    def attention(self) -> AttentionConfig:
        mixer = self.model.layers[0].mixer
        assert isinstance(mixer, AttentionConfig)
        return mixer

    def tensors(self, target_hidden: int) -> Shapes:
        """Return them with all experts of a mixture in one tensor; files may have one for each expert."""
        norms = ["norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"]
        norms += ["layers.0.input_layernorm", "layers.0.post_attention_layernorm"]
        return {
            f"{PREFIX}fc.weight": (target_hidden, 2 * target_hidden),
            **{f"{PREFIX}{name}.weight": (target_hidden,) for name in norms},
            **_attention(self.attention, target_hidden),
            **_feed_forward(self.model.layers[0].mlp, target_hidden),
        }

    @property
    def context_size(self) -> int:
        """Count keys and values, and the target's hidden state, which is taken again with another token behind it."""
        return 2 * self.attention.kv_size + self.model.hidden_size


def _attention(part: AttentionConfig, hidden: int) -> Shapes:
    sizes = {"q": part.query_size, "k": part.kv_size, "v": part.kv_size}
    shapes: Shapes = {f"{LAYER}.self_attn.{name}_proj.weight": (size, hidden) for name, size in sizes.items()}
    shapes[f"{LAYER}.self_attn.o_proj.weight"] = (hidden, part.output_size)
    if part.qk_norm:
        shapes |= {f"{LAYER}.self_attn.{name}_norm.weight": (part.head_dim,) for name in ("q", "k")}
    if part.qkv_bias:
        shapes |= {f"{LAYER}.self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    if part.output_bias:
        shapes[f"{LAYER}.self_attn.o_proj.bias"] = (hidden,)
    return shapes


def _feed_forward(part: FeedForward, hidden: int) -> Shapes:
    if isinstance(part, MLPConfig):
        return _mlp(f"{LAYER}.mlp", part.intermediate_size, hidden)
    count, inner = part.num_experts, part.intermediate_size
    shapes: Shapes = {
        f"{LAYER}.mlp.{part.router}.weight": (count, hidden),
        f"{LAYER}.mlp.experts.gate_up_proj": (count, 2 * inner, hidden),
        f"{LAYER}.mlp.experts.down_proj": (count, hidden, inner),
    }
    if part.shared_intermediate_size:
        shapes |= _mlp(f"{LAYER}.mlp.shared_expert", part.shared_intermediate_size, hidden)
    if part.shared_gate:
        shapes[f"{LAYER}.mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _mlp(module: str, inner: int, hidden: int) -> Shapes:
    return {
        f"{module}.gate_proj.weight": (inner, hidden),
        f"{module}.up_proj.weight": (inner, hidden),
        f"{module}.down_proj.weight": (hidden, inner),
    }


CONFIG = MTPConfig
