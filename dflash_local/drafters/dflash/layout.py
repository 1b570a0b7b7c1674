"""Describe what a DFlash drafter is, which tensors it has, and every buffer of it in the fused engine.

The other kinds are DFlash drafters that have more: they override the methods named ``own_``. Torch-free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

from dflash_local.checkpoint_files import text_config
from dflash_local.checkpoint_files.config_values import ConfigFields
from dflash_local.checkpoint_files.text_config import MAX_POSITION, MAX_VOCAB, MAX_WIDTH
from dflash_local.config import drafter_fields
from dflash_local.config.features import AttentionConfig, MLPConfig, ModelConfig
from dflash_local.config.rope_parameters import RopeParameters
from dflash_local.drafters.drafter import FULL, MAX_BLOCK, MIN_BLOCK, Drafter, Servers, Shapes
from dflash_local.layout import attention, mlp
from dflash_local.layout.buffer import Buffer, Group
from dflash_local.layout.draft_head import drafted_ids
from dflash_local.layout.linear import (
    UNQUANTIZED,
    FormatOf,
    LinearSpec,
    MatrixPart,
    WeightFormat,
    eight_bits,
    linear_buffers,
    segments,
    unquantized,
)
from dflash_local.layout.part_layout import EngineSpec
from dflash_local.layout.traffic import PartKind, ProductTraffic, Traffic, draft_head, kv_traffic, weight_product
from dflash_local.load_config import DrafterPrecision

# Options of other trainers that change the forward pass, with the value at which they change nothing.
NOT_SUPPORTED = {"sample_from_anchor": False, "noise_embed_scale": 1}
# What sizes and limits depend on, and what is therefore noted where it is only likely.
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "attention_bias", "block_size", "target_layer_ids", "layer_types", "sliding_window"),
    "max_position_embeddings",
)
Decoder = TypeVar("Decoder", bound="DFlashConfig")
OWNER = "drafter"
LOGITS = f"{OWNER}.logits"
GROUP: Group = "drafter weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(Drafter):
    """A small Qwen3-style decoder over a block and the target's taps.

    Attributes:
        windows: per layer, how many keys a row sees including its own; None is all.
        causal: per layer, whether a row of the block is blind to later rows of the block.
    """

    kind: ClassVar[str] = "dflash"
    servers: ClassVar[Servers | None] = Servers("dflash", "DFLASH", "--speculative-num-draft-tokens")
    not_supported: ClassVar[Mapping[str, object]] = NOT_SUPPORTED | {"output_multiplier": 1}
    own_sizes: ClassVar[tuple[str, ...]] = ()  # as ``SIZES``

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    layer_types: tuple[str, ...]
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    attention_bias: bool
    mask_token_id: int
    taps: tuple[int, ...]
    rope: RopeParameters

    @classmethod
    def from_config(
        cls: type[Decoder], config: Mapping[str, Any], source: str, inferred: Collection[str] = ()
    ) -> Decoder:
        """Read a ``config.json``; ``dflash_config`` comes first. Raises as ``Drafter.from_config``."""
        nested = ConfigFields(config, source).inner("dflash_config")
        fields = ConfigFields({**config, **{k: v for k, v in nested.items() if v is not None}}, source)
        drafter_fields.refuse_variants(fields, cls.not_supported)
        layers = fields.integer("num_hidden_layers", 1, drafter_fields.MAX_LAYERS)
        hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
        heads, kv_heads, head_dim = drafter_fields.heads(fields, hidden)
        types, windows, causal = drafter_fields.attention_pattern(
            fields, ConfigFields(config, source), ConfigFields(nested, source), layers
        )
        eps = fields.optional_number("rms_norm_eps", 1e-12, 0.1)
        block = cls.read_block(fields)
        known: dict[str, Any] = {
            "hidden_size": hidden,
            "intermediate_size": fields.integer("intermediate_size", 1, 4 * MAX_WIDTH),
            "num_layers": layers,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "rms_norm_eps": 1e-6 if eps is None else eps,
            "layer_types": types,
            "windows": windows,
            "causal": causal,
            "attention_bias": bool(fields.optional_flag("attention_bias")),
            "block_size": block,
            "mask_token_id": fields.integer("mask_token_id", 0, MAX_VOCAB),
            "taps": drafter_fields.taps(fields),
            "rope": RopeParameters.from_json(config, source),
            "vocab_size": fields.optional_integer("vocab_size", 1, MAX_VOCAB),
            "max_position_embeddings": fields.optional_integer("max_position_embeddings", 1, MAX_POSITION),
            "num_target_layers": fields.optional_integer("num_target_layers", 1, text_config.MAX_LAYERS),
            "target_hidden_size": fields.optional_integer("target_hidden_size", 1, MAX_WIDTH),
            "quantization": drafter_fields.quantization(ConfigFields(config, source)),
            "source": source,
            "inferred": tuple(sorted(set(inferred) & {*SIZES, *cls.own_sizes})),
        }
        return cls(**{**known, **cls.own_values(fields, known)})

    @classmethod
    def read_block(cls, fields: ConfigFields) -> int:
        """Read ``block_size``."""
        return fields.integer("block_size", MIN_BLOCK, MAX_BLOCK)

    @classmethod
    def own_values(cls, fields: ConfigFields, known: Mapping[str, Any]) -> dict[str, Any]:
        """Read what the kind has beside, or otherwise than ``known``. Raises UnknownValue, CheckpointError."""
        return {}

    def own_tensors(self) -> Shapes:
        """Return shapes of the kind's own tensors, as ``tensors``."""
        return {}

    def own_products(self) -> tuple[LinearSpec, ...]:
        """Return products of the kind's own."""
        return ()

    def own_weights(self, dtype: str) -> tuple[Buffer, ...]:
        """Return buffers of the kind's own tensors that are no products, named and shaped as in the checkpoint."""
        return ()

    def own_buffers(self, vocab_size: int, dtype: str) -> tuple[Buffer, ...]:
        """Return what the kind's block works on beside; the arguments are those of ``buffers``."""
        return ()

    def own_traffic(self, ids: int, dtype: str) -> Mapping[ProductTraffic, int]:
        """Return products that the choice of a block's drafts reads beside, and how often; ``ids`` can be drafted."""
        return {}

    def fused_refusal(self) -> str:
        return ""

    def training_refusal(self) -> str:
        if self.attention_bias:
            return "drafters with biases are not trained"
        return "" if self.rope.kind == "default" else "drafters whose rope is scaled are not trained"

    @property
    def mlp(self) -> MLPConfig:
        return MLPConfig(self.intermediate_size)

    def attention(self, layer: int) -> AttentionConfig:
        return AttentionConfig(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rotary_dim=self.head_dim,
            qk_norm=True,
            qkv_bias=self.attention_bias,
            output_bias=self.attention_bias,
            sliding_window=self.windows[layer],
        )

    def with_attention_factor(self, attention_factor: float | None) -> DFlashConfig:
        """Return the same drafter with another rope amplitude; None changes nothing."""
        if attention_factor is None:
            return self
        return replace(self, rope=replace(self.rope, attention_factor=attention_factor))

    def tensors(self, target_hidden: int) -> Shapes:
        """Return 3 and 11 for each layer, 4 more with biases, and the kind's own."""
        hidden, inner, head = self.hidden_size, self.intermediate_size, self.head_dim
        queries, keys = self.num_heads * head, self.num_kv_heads * head
        shapes: Shapes = {
            "fc.weight": (hidden, len(self.taps) * target_hidden),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        for layer in range(self.num_layers):
            at = f"layers.{layer}"
            shapes |= {
                f"{at}.input_layernorm.weight": (hidden,),
                f"{at}.post_attention_layernorm.weight": (hidden,),
                f"{at}.self_attn.q_proj.weight": (queries, hidden),
                f"{at}.self_attn.k_proj.weight": (keys, hidden),
                f"{at}.self_attn.v_proj.weight": (keys, hidden),
                f"{at}.self_attn.o_proj.weight": (hidden, queries),
                f"{at}.self_attn.q_norm.weight": (head,),
                f"{at}.self_attn.k_norm.weight": (head,),
                f"{at}.mlp.gate_proj.weight": (inner, hidden),
                f"{at}.mlp.up_proj.weight": (inner, hidden),
                f"{at}.mlp.down_proj.weight": (hidden, inner),
            }
            if self.attention_bias:
                shapes |= {
                    f"{at}.self_attn.q_proj.bias": (queries,),
                    f"{at}.self_attn.k_proj.bias": (keys,),
                    f"{at}.self_attn.v_proj.bias": (keys,),
                    f"{at}.self_attn.o_proj.bias": (hidden,),
                }
        return shapes | self.own_tensors()

    def fingerprint(self) -> dict[str, object]:
        window = next((w for w in self.windows if w is not None), None)
        return {
            "layers": self.num_layers,
            "taps": list(self.taps),
            "mask_id": self.mask_token_id,
            "block": self.draft_rows,
            "window": window,
        }

    @property
    def repeated_size(self) -> int:
        """Count key and value projections, which stand twice, and norms: a row for each head, keys' in two places."""
        layers, keys = self.num_layers, self.num_kv_heads * self.head_dim
        projections = 2 * layers * keys * self.hidden_size + (2 * layers * keys if self.attention_bias else 0)
        return projections + layers * (self.num_heads + 2 * self.num_kv_heads - 2) * self.head_dim

    @property
    def context_size(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def rotation_size(self) -> int:
        return 2 * self.head_dim

    def weights(
        self, target_hidden: int, dtype: str, format_of: FormatOf = unquantized, precision: DrafterPrecision = FULL
    ) -> Iterator[Buffer]:
        for product in products(self, target_hidden).all():
            yield from matrix_buffers(product, matrix_format(product, format_of, precision), dtype)
        yield from vectors(self, dtype).values()
        yield from self.own_weights(dtype)

    def buffers(self, vocab_size: int, spec: EngineSpec) -> Iterator[Buffer]:
        block, heads = self.draft_rows, heads_of(self)
        shared = shared_buffers(self, spec)
        yield from (*shared.caches, shared.rings, shared.ids, *shared.rows, *shared.context)
        yield from attention.rotation_buffers(OWNER, heads.rotary_dim, spec.drafter_capacity, spec.dtype)
        yield from partial_buffers(self, spec)
        yield from attention.block_buffers(OWNER, heads, block, spec.dtype)
        yield from mlp.block_buffers(OWNER, self.mlp, block, spec.dtype)
        yield from self.own_buffers(vocab_size, spec.dtype)
        yield draft_logits(self.block_size, drafted_ids(spec, vocab_size), spec.dtype)

    def snapshot_bytes(self, spec: EngineSpec) -> int:
        rows = len(ring_layers(self, spec)) * look_back(self, spec)
        return rows * attention.position_bytes(heads_of(self), spec.cache_dtype)

    def traffic(self, target: ModelConfig, spec: EngineSpec) -> Traffic:
        found: Counter[ProductTraffic] = Counter()
        for product in products(self, target.hidden_size).all():
            form = matrix_format(product, self.formats, spec.precision)
            found[weight_product(form, product.out_features, product.in_features, spec.dtype)] += 1
        found[draft_head(target, spec)] += 1
        found.update(self.own_traffic(drafted_ids(spec, target.vocab_size), spec.dtype))
        parts: Counter[PartKind] = Counter({"attention": self.num_layers, "MLP": self.num_layers})
        attentions = (self.attention(index) for index in range(self.num_layers))
        return Traffic(found, {}, parts, *kv_traffic(attentions, spec.cache_dtype))


def heads_of(config: DFlashConfig) -> AttentionConfig:
    return config.attention(0)


class LayerProducts(NamedTuple):
    """Products of one layer."""

    qkv: LinearSpec
    output: LinearSpec
    gate_up: LinearSpec
    down: LinearSpec


class DrafterProducts(NamedTuple):
    """Products of a drafter's own.

    Attributes:
        context_kv: the keys of all layers, then the values of all layers, so that context rows cost one product; these
            rows also stand in each layer's ``qkv`` (about 3 % more memory).
        own: the kind's.
    """

    fc: LinearSpec
    context_kv: LinearSpec
    layers: tuple[LayerProducts, ...]
    own: tuple[LinearSpec, ...]

    def all(self) -> tuple[LinearSpec, ...]:
        return (self.fc, self.context_kv, *(product for layer in self.layers for product in layer), *self.own)


def products(config: DFlashConfig, target_hidden: int) -> DrafterProducts:
    hidden = config.hidden_size
    context = [
        MatrixPart(f"layers.{index}.self_attn.{name}", heads_of(config).kv_size)
        for name in ("k_proj", "v_proj")
        for index in range(config.num_layers)
    ]

    def layer(at: str) -> LayerProducts:
        heads = attention.AttentionLayout(heads_of(config)).projections(f"{at}.self_attn", hidden)
        return LayerProducts(*heads, *mlp.MLPLayout(config.mlp).projections(f"{at}.mlp", hidden))

    return DrafterProducts(
        LinearSpec("fc", len(config.taps) * target_hidden, (MatrixPart("fc", hidden),)),
        LinearSpec("context_kv", hidden, tuple(context)),
        tuple(layer(f"layers.{index}") for index in range(config.num_layers)),
        config.own_products(),
    )


def vectors(config: DFlashConfig, dtype: str) -> dict[str, Buffer]:
    """Describe the norms and biases by their names.

    ``qk_norm`` has a row for each query head and each key head of a layer, ``context_key_norm`` one for each key head
    of all layers.
    """
    hidden, heads = config.hidden_size, heads_of(config)
    shapes: Shapes = {
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "context_key_norm.weight": (config.num_layers * heads.num_kv_heads, heads.head_dim),
    }
    if heads.qkv_bias:
        shapes["context_kv.bias"] = (2 * config.num_layers * heads.kv_size,)
    for index in range(config.num_layers):
        at = f"layers.{index}"
        shapes |= {
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.self_attn.qk_norm.weight": (heads.num_heads + heads.num_kv_heads, heads.head_dim),
        }
        if heads.qkv_bias:
            shapes |= {f"{at}.self_attn.qkv_proj.bias": (heads.qkv_size,), f"{at}.self_attn.o_proj.bias": (hidden,)}
    return {name: Buffer(name, shape, dtype, GROUP) for name, shape in shapes.items()}


def matrix_format(product: LinearSpec, format_of: FormatOf, precision: DrafterPrecision = FULL) -> WeightFormat:
    """Return a product's one format: what all of its parts have in the checkpoint (``format_of``), else by
    ``precision``. What the checkpoint has in several is decoded.
    """
    first, *others = segments(product, format_of)
    if first.format != UNQUANTIZED and not others:
        return first.format
    return eight_bits(product.in_features) if precision.weights == "8bit" else UNQUANTIZED


def matrix_buffers(product: LinearSpec, form: WeightFormat, dtype: str) -> Iterator[Buffer]:
    return linear_buffers(product, lambda _module: form, dtype, GROUP)


class DrafterBuffers(NamedTuple):
    """Hold what a drafter's block and its context rows work on.

    Attributes:
        caches: ``cache_buffers`` of all layers, [rows of ``cache_rows``, head_dim]. rings: the first row and the
            number of rows of each key head, layer by layer. rows: the residual stream, its norm, the rows behind the
            last norm. context: the taps joined, and all layers' keys and values of them.
    """

    caches: tuple[Buffer, ...]
    rings: Buffer
    ids: Buffer
    rows: tuple[Buffer, Buffer, Buffer]
    context: tuple[Buffer, Buffer]


def shared_buffers(config: DFlashConfig, spec: EngineSpec) -> DrafterBuffers:
    heads = heads_of(config)
    caches = (heads.num_kv_heads * sum(cache_rows(config, spec)), heads.head_dim)

    def rows(name: str, count: int, size: int) -> Buffer:
        return Buffer(f"{OWNER}.{name}", (count, size), spec.dtype, "buffers")

    block, hidden = config.draft_rows, config.hidden_size
    most = max(block, spec.rows)
    return DrafterBuffers(
        tuple(attention.cache_buffers(OWNER, caches, spec.cache_dtype, "drafter KV")),
        Buffer(f"{OWNER}.rings", (config.num_layers * heads.num_kv_heads, 2), "int64", "buffers"),
        Buffer(f"{OWNER}.ids", (block,), "int64", "buffers"),
        (rows("x", block, hidden), rows("normed", block, hidden), rows("hidden", block, hidden)),
        (rows("feature", most, hidden), rows("context_kv", most, 2 * config.num_layers * heads.kv_size)),
    )


def cache_rows(config: DFlashConfig, spec: EngineSpec) -> list[int]:
    """Count rows of a key head's cache in each layer; the caches lie one behind the other, layer by layer."""
    return [attention.ring_rows(window, spec.drafter_capacity) for window in config.windows]


def ring_layers(config: DFlashConfig, spec: EngineSpec) -> dict[int, int]:
    """Return the layers whose caches do not hold every position, and the rows of these."""
    return {index: rows for index, rows in enumerate(cache_rows(config, spec)) if rows < spec.drafter_capacity}


def look_back(config: DFlashConfig, spec: EngineSpec) -> int:
    """Count rows before a block that layers with rings see at most; 0 where no layer has one."""
    return max((config.windows[index] or 0 for index in ring_layers(config, spec)), default=0)


def partial_buffers(config: DFlashConfig, spec: EngineSpec) -> tuple[Buffer, Buffer]:
    heads = heads_of(config)
    return attention.partial_buffers(OWNER, heads.num_heads, heads.head_dim, config.draft_rows, spec.drafter_capacity)


def draft_logits(block_size: int, drafted_ids: int, dtype: str) -> Buffer:
    return Buffer(LOGITS, (block_size - 1, drafted_ids), dtype, "buffers")


CONFIG = DFlashConfig
