"""Describe the layer for multi-token prediction that a target's own checkpoint carries under ``mtp.*``.

One decoder layer of the target's own kind, over the embedding of the next token and the target's hidden state beside
it; further drafts take its own output in place of the hidden state. Embedding and head are the target's. Torch-free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from dflash_local.checkpoint_files.config_values import ConfigFields
from dflash_local.config.features import AttentionConfig, FeedForward, LayerConfig, MLPConfig, ModelConfig
from dflash_local.config.fused_support import fused_refusal
from dflash_local.config.read_model import read_model
from dflash_local.drafters.dflash.layout import GROUP, OWNER, draft_logits
from dflash_local.drafters.drafter import FULL, MIN_BLOCK, Drafter, Shapes
from dflash_local.errors import CheckpointError
from dflash_local.layout import target
from dflash_local.layout.attention import AttentionLayout
from dflash_local.layout.buffer import ITEM_BYTES, Buffer
from dflash_local.layout.cycle import choice_buffers
from dflash_local.layout.draft_head import drafted_ids
from dflash_local.layout.linear import (
    UNQUANTIZED,
    FormatOf,
    Fp8Blocks,
    LinearSpec,
    MatrixPart,
    WeightFormat,
    eight_bits,
    stored_formats,
    unquantized,
)
from dflash_local.layout.moe import MoELayout
from dflash_local.layout.part_layout import EngineSpec, WeightSpec
from dflash_local.layout.target import layer_buffers, part_layout
from dflash_local.layout.traffic import ProductTraffic, Traffic, draft_head, kv_traffic, layer_traffic, product_traffic
from dflash_local.load_config import DrafterPrecision, LoadConfig

# Published targets have been measured with 2 to 5 drafts; behind the fourth few are accepted.
BLOCK, MAX_BLOCK = 5, 6
PREFIX = "mtp."
FINAL_NORM = "mtp_final_norm"  # the key that says whether hidden states are taken behind the target's final norm
LAYER, FC = f"{PREFIX}layers.0", f"{PREFIX}fc"
NORMS = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
WHOLE = "the mtp layer attends as its target does: --draft-window and --attention-factor are left out"
# Blocks of hidden states that the fused engine keeps: those of cycles on their way, and what a text goes back by.
ON_THEIR_WAY, GONE_BACK = 3, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPConfig(Drafter):
    """The layer, by its target's configuration. Two keys may be added to that: ``mtp_block_size`` (2 to 6, 5 where it
    is not given), and ``mtp_final_norm`` false where the layer takes the target's hidden states from before the final
    norm; without it ``dflash check`` measures that (``check.first_cycles``).

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
        fields = ConfigFields(config, source)
        block = fields.optional_integer("mtp_block_size", MIN_BLOCK, MAX_BLOCK)
        normed = fields.optional_flag(FINAL_NORM) is not False
        return cls.of_model(read_model(config, source), BLOCK if block is None else block, normed)

    @classmethod
    def of_model(cls, model: ModelConfig, block_size: int = BLOCK, normed: bool = True) -> MTPConfig:
        """Return the layer of a target as published. CheckpointError: no layer of it has full attention."""
        mixer = next((each.mixer for each in model.layers if isinstance(each.mixer, AttentionConfig)), None)
        if mixer is None:
            why = f"{model.source}: no layer has full attention, as an mtp layer has"
            raise CheckpointError(why, "take another drafter")
        return cls(
            block_size=block_size,
            taps=(model.num_layers - 1,),
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            max_position_embeddings=model.max_position_embeddings,
            num_target_layers=model.num_layers,
            target_hidden_size=model.hidden_size,
            quantization=model.quantization,
            source=model.source,
            inferred=model.inferred,
            model=replace(model, layers=(LayerConfig(mixer, model.layers[-1].mlp),)),
            normed=normed,
        )

    @property
    def passes(self) -> int:
        """Count one for each draft: it takes the one before."""
        return self.draft_rows

    def notices(self, options: LoadConfig) -> tuple[str, ...]:
        return (WHOLE,) * (options.draft_window is not None or options.attention_factor is not None)

    def fused_refusal(self) -> str:
        return fused_refusal(self.model)

    @property
    def layer(self) -> LayerConfig:
        return self.model.layers[0]

    @property
    def attention(self) -> AttentionConfig:
        mixer = self.layer.mixer
        assert isinstance(mixer, AttentionConfig)
        return mixer

    def tensors(self, target_hidden: int) -> Shapes:
        """Return them with all experts of a mixture in one tensor; files may have one for each expert."""
        of_layer = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm")
        return {
            f"{FC}.weight": (target_hidden, 2 * target_hidden),
            **{f"{PREFIX}{name}.weight": (target_hidden,) for name in (*NORMS, *of_layer)},
            **_attention(self.attention, target_hidden),
            **_feed_forward(self.layer.mlp, target_hidden),
        }

    @property
    def context_size(self) -> int:
        """Count keys and values, and the target's hidden state, which is taken again with another token behind it."""
        return 2 * self.attention.kv_size + self.model.hidden_size

    @property
    def prefill_size(self) -> int:
        """Count what is joined and its result, or that with the projections and queries."""
        hidden, part = self.model.hidden_size, self.attention
        return max(3 * hidden, hidden + part.qkv_size + part.output_size)

    def snapshot_bytes(self, spec: EngineSpec) -> int:
        """Return the hidden state of the last token."""
        return self.model.hidden_size * ITEM_BYTES[spec.dtype]

    @property
    def stored_name(self) -> str:
        coded = isinstance(self.formats(f"{LAYER}.self_attn.q_proj"), Fp8Blocks)
        return self.quantization.name if coded and self.quantization is not None else ""

    @property
    def formats(self) -> FormatOf:
        """Return them as published files have them, whatever configurations forget: fp8 but for ``fc``, or plain."""
        of_target = stored_formats(self.quantization)

        def form(module: str) -> WeightFormat:
            stored = of_target(module)
            return stored if isinstance(stored, Fp8Blocks) and module != FC else UNQUANTIZED

        return form

    def weights(
        self, target_hidden: int, dtype: str, format_of: FormatOf = unquantized, precision: DrafterPrecision = FULL
    ) -> Iterator[Buffer]:
        spec = weight_spec(self, dtype, self._formats(format_of, precision))
        yield from spec.linear(joining(self))
        yield from norms(spec).values()
        yield from layer_buffers(LAYER, self.layer, spec)

    def buffers(self, vocab_size: int, spec: EngineSpec) -> Iterator[Buffer]:
        """Return them with the rows that the layer shares with the target's."""
        for part in (self.layer.mixer, self.layer.mlp):
            yield from part_layout(part).activations(target.OWNER, spec)
        for buffer in part_layout(self.layer.mixer).state(f"{OWNER}.mixer", spec):
            yield replace(buffer, group="drafter KV")
        yield from own_buffers(self, vocab_size, spec).all()
        yield draft_logits(self.block_size, drafted_ids(spec, vocab_size), spec.dtype)

    def traffic(self, target: ModelConfig, spec: EngineSpec) -> Traffic:
        """Count the layer and the head once for each draft, and what a cycle's context rows go through."""
        layer, context = layer_traffic(LAYER, self.layer, self._weight_spec(spec)), self.context_traffic(spec)
        once = [*layer.products.elements(), context[0], draft_head(target, spec)]
        found = Counter(self.passes * once)
        found.update(context)
        experts = {each: count * self.passes for each, count in layer.experts.items()}
        parts = {each: count * self.passes for each, count in layer.parts.items()}
        kv_bytes, windows, group = kv_traffic((self.attention,), spec.cache_dtype)
        return Traffic(found, experts, parts, self.passes * kv_bytes, windows, group)

    def context_traffic(self, spec: EngineSpec) -> tuple[ProductTraffic, ProductTraffic]:
        """Describe what a cycle's context rows go through: ``fc``, then queries, keys and values."""
        weights = self._weight_spec(spec)
        projection, _ = AttentionLayout(self.attention).projections(f"{LAYER}.self_attn", weights.hidden_size)
        return product_traffic(joining(self), weights), product_traffic(projection, weights)

    def _weight_spec(self, spec: EngineSpec) -> WeightSpec:
        return weight_spec(self, spec.dtype, self._formats(self.formats, spec.precision))

    def _formats(self, format_of: FormatOf, precision: DrafterPrecision) -> FormatOf:
        """Return the formats of its matrices: plain ones but experts and their router may be kept in eight bits."""
        if precision.weights != "8bit":
            return format_of
        feed = part_layout(self.layer.mlp)
        of_feed = feed.projections(f"{LAYER}.{feed.module}", self.model.hidden_size)
        if isinstance(feed, MoELayout):
            of_feed = () if feed.fuses_shared_expert(f"{LAYER}.{feed.module}", format_of) else of_feed[1:]
        of_mixer = AttentionLayout(self.attention).projections(f"{LAYER}.self_attn", self.model.hidden_size)
        coarse = {
            part.module: eight_bits(product.in_features)
            for product in (joining(self), *of_mixer, *of_feed)
            for part in product.parts
        }

        def form(module: str) -> WeightFormat:
            stored = format_of(module)
            return coarse.get(module, stored) if stored == UNQUANTIZED else stored

        return form


class MTPBuffers(NamedTuple):
    """Hold what drafts and context rows work on.

    Attributes:
        rows: the embeddings and what follows from them, the norm beside, both joined. last: [1, H], a draft's row
            behind ``norm``. kept: [rows, H], hidden states of the last tokens: position ``p`` has row ``p % rows``.
        at: [1], the position of the row that comes next. steps: [rows], numbers from zero. choice: of one row.
    """

    rows: tuple[Buffer, Buffer, Buffer]
    last: Buffer
    kept: Buffer
    at: Buffer
    steps: Buffer
    choice: tuple[Buffer, ...]

    def all(self) -> tuple[Buffer, ...]:
        return (*self.rows, self.last, self.kept, self.at, self.steps, *self.choice)


def own_buffers(config: MTPConfig, vocab_size: int, spec: EngineSpec) -> MTPBuffers:
    rows, hidden = spec.rows, config.model.hidden_size

    def buffer(name: str, *shape: int, dtype: str = spec.dtype, zeroed: bool = False) -> Buffer:
        return Buffer(f"{OWNER}.{name}", shape, dtype, "buffers", zeroed)

    return MTPBuffers(
        (buffer("x", rows, hidden), buffer("normed", rows, hidden), buffer("joined", rows, 2 * hidden)),
        last=buffer("last", 1, hidden),
        kept=buffer("kept", (ON_THEIR_WAY + GONE_BACK) * rows, hidden, zeroed=True),
        at=buffer("at", 1, dtype="int32"),
        steps=buffer("steps", rows, dtype="int64"),
        choice=choice_buffers(f"{OWNER}.choice", 1, vocab_size),
    )


def weight_spec(config: MTPConfig, dtype: str, format_of: FormatOf) -> WeightSpec:
    return replace(target.weight_spec(config.model, dtype, format_of), group=GROUP)


def joining(config: MTPConfig) -> LinearSpec:
    """Return the product with an embedding and a hidden state, one behind the other."""
    hidden = config.model.hidden_size
    return LinearSpec(FC, 2 * hidden, (MatrixPart(FC, hidden),))


def norms(spec: WeightSpec) -> dict[str, Buffer]:
    """Describe the norms around the layer."""
    return {name: spec.norm(f"{PREFIX}{name}", spec.hidden_size) for name in NORMS}


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
