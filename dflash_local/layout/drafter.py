"""Every tensor of a drafter in the fused engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dflash_local.config.dflash2 import CONVOLVED, SELECTOR
from dflash_local.config.drafter_config import DrafterConfig
from dflash_local.config.features import AttentionConfig
from dflash_local.layout import attention, mlp
from dflash_local.layout.buffer import Buffer, Group
from dflash_local.layout.linear import UNQUANTIZED, LinearSpec, Part, eight_bits, linear_buffers
from dflash_local.layout.spec import EngineSpec
from dflash_local.load_config import FREQUENT, DrafterPrecision

OWNER = "drafter"
LOGITS = f"{OWNER}.logits"
GROUP: Group = "drafter weights"
FULL = DrafterPrecision()


def heads_of(config: DrafterConfig) -> AttentionConfig:
    return config.attention(0)


class LayerProducts(NamedTuple):
    qkv: LinearSpec
    output: LinearSpec
    gate_up: LinearSpec
    down: LinearSpec


class Products(NamedTuple):
    """Products of a drafter's own.

    Attributes:
        context_kv: the keys of all layers, then the values of all layers, so that context rows cost one product; these
            rows also stand in each layer's ``qkv`` (about 3 % more memory).
    """

    fc: LinearSpec
    context_kv: LinearSpec
    layers: tuple[LayerProducts, ...]

    def all(self) -> tuple[LinearSpec, ...]:
        return (self.fc, self.context_kv, *(product for layer in self.layers for product in layer))


def products(config: DrafterConfig, target_hidden: int) -> Products:
    hidden, kv_rows = config.hidden_size, 2 * config.num_layers * heads_of(config).kv_size

    def layer(at: str) -> LayerProducts:
        heads = attention.AttentionLayout(heads_of(config)).projections(f"{at}.self_attn", hidden)
        return LayerProducts(*heads, *mlp.MLPLayout(config.mlp).projections(f"{at}.mlp", hidden))

    return Products(
        LinearSpec("fc", len(config.taps) * target_hidden, (Part("fc", hidden),)),
        LinearSpec("context_kv", hidden, (Part("context_kv", kv_rows),)),
        tuple(layer(f"layers.{index}") for index in range(config.num_layers)),
    )


class LayerVectors(NamedTuple):
    """Norms and biases of one layer. ``qk_norm``: a row for each query head and each key head."""

    input_norm: Buffer
    post_norm: Buffer
    qk_norm: Buffer
    qkv_bias: Buffer | None
    output_bias: Buffer | None


class Vectors(NamedTuple):
    """Norms and biases. ``context_key_norm``: a row for each key head of all layers."""

    hidden_norm: Buffer
    norm: Buffer
    context_key_norm: Buffer
    context_kv_bias: Buffer | None
    layers: tuple[LayerVectors, ...]

    def all(self) -> tuple[Buffer, ...]:
        found = (*self[:4], *(vector for layer in self.layers for vector in layer))
        return tuple(vector for vector in found if isinstance(vector, Buffer))


def vectors(config: DrafterConfig, dtype: str) -> Vectors:
    hidden, heads = config.hidden_size, heads_of(config)

    def vector(name: str, *shape: int) -> Buffer:
        return Buffer(name, shape, dtype, GROUP)

    def layer(at: str) -> LayerVectors:
        return LayerVectors(
            vector(f"{at}.input_layernorm.weight", hidden),
            vector(f"{at}.post_attention_layernorm.weight", hidden),
            vector(f"{at}.self_attn.qk_norm.weight", heads.num_heads + heads.num_kv_heads, heads.head_dim),
            vector(f"{at}.self_attn.qkv_proj.bias", heads.qkv_size) if heads.qkv_bias else None,
            vector(f"{at}.self_attn.o_proj.bias", hidden) if heads.output_bias else None,
        )

    return Vectors(
        vector("hidden_norm.weight", hidden),
        vector("norm.weight", hidden),
        vector("context_key_norm.weight", config.num_layers * heads.num_kv_heads, heads.head_dim),
        vector("context_kv.bias", 2 * config.num_layers * heads.kv_size) if heads.qkv_bias else None,
        tuple(layer(f"layers.{index}") for index in range(config.num_layers)),
    )


class SelectorBuffers(NamedTuple):
    """Of the selector of candidates: a row of each codebook for every id, and the projection of hidden rows."""

    predecessors: Buffer
    successors: Buffer
    projection: Buffer


class ConvolutionBuffers(NamedTuple):
    """Of one convolution: the kernels of all rows, and the projection that gives those of each row."""

    base: Buffer
    projection: Buffer


class DFlash2Buffers(NamedTuple):
    """What a DFlash 2 drafter has beside. ``layers``: around attention, around the feed-forward part."""

    selector: SelectorBuffers
    layers: tuple[tuple[ConvolutionBuffers, ConvolutionBuffers], ...]

    def all(self) -> tuple[Buffer, ...]:
        return (*self.selector, *(buffer for layer in self.layers for each in layer for buffer in each))


def dflash2_buffers(config: DrafterConfig, dtype: str) -> DFlash2Buffers | None:
    """Named and shaped as in the checkpoint; None for a DFlash drafter."""
    if config.dflash2 is None:
        return None
    shapes = config.dflash2.tensor_shapes(config.num_layers, config.hidden_size)

    def buffer(name: str) -> Buffer:
        return Buffer(name, shapes[name], dtype, GROUP)

    def convolution(at: str) -> ConvolutionBuffers:
        return ConvolutionBuffers(buffer(f"{at}.base_kernel"), buffer(f"{at}.kernel_projection.weight"))

    attention_conv, mlp_conv = CONVOLVED
    return DFlash2Buffers(
        SelectorBuffers(
            buffer(f"{SELECTOR}.predecessor_codebook"),
            buffer(f"{SELECTOR}.successor_codebook"),
            buffer(f"{SELECTOR}.hidden_projection.weight"),
        ),
        tuple(
            (convolution(f"layers.{index}.{attention_conv}"), convolution(f"layers.{index}.{mlp_conv}"))
            for index in range(config.num_layers)
        ),
    )


def weight_buffers(
    config: DrafterConfig, target_hidden: int, dtype: str, precision: DrafterPrecision = FULL
) -> Iterator[Buffer]:
    """Matrices (of that ``precision``), norms and biases. ``target_hidden``: numbers of a tap."""
    for product in products(config, target_hidden).all():
        yield from _matrix(product, precision, dtype)
    yield from vectors(config, dtype).all()
    found = dflash2_buffers(config, dtype)
    yield from () if found is None else found.all()


def _matrix(product: LinearSpec, precision: DrafterPrecision, dtype: str) -> Iterator[Buffer]:
    form = eight_bits(product.in_features) if precision.weights == "8bit" else UNQUANTIZED
    return linear_buffers(product, lambda _module: form, dtype, GROUP)


class SharedBuffers(NamedTuple):
    """What a drafter's block and its context rows work on.

    Attributes:
        caches: keys and values of all layers. rows: the residual stream, its norm, the rows behind the last norm.
        context: the taps joined, and all layers' keys and values of them.
    """

    caches: tuple[Buffer, Buffer]
    ids: Buffer
    rows: tuple[Buffer, Buffer, Buffer]
    context: tuple[Buffer, Buffer]


def shared_buffers(config: DrafterConfig, spec: EngineSpec) -> SharedBuffers:
    heads = heads_of(config)
    caches = (config.num_layers, heads.num_kv_heads, spec.drafter_capacity, heads.head_dim)

    def cache(name: str) -> Buffer:
        return Buffer(f"{OWNER}.{name}", caches, spec.cache_dtype, "drafter KV", zeroed=True)

    def rows(name: str, count: int, size: int) -> Buffer:
        return Buffer(f"{OWNER}.{name}", (count, size), spec.dtype, "buffers")

    block, hidden = config.block_size, config.hidden_size
    most = max(block, spec.rows)
    return SharedBuffers(
        (cache("keys"), cache("values")),
        Buffer(f"{OWNER}.ids", (block,), "int64", "buffers"),
        (rows("x", block, hidden), rows("normed", block, hidden), rows("hidden", block, hidden)),
        (rows("feature", most, hidden), rows("context_kv", most, 2 * config.num_layers * heads.kv_size)),
    )


def run_buffers(config: DrafterConfig, vocab_size: int, spec: EngineSpec) -> Iterator[Buffer]:
    """What a bound drafter takes beside its weights. ``vocab_size``: rows of the target's head."""
    block, heads = config.block_size, heads_of(config)
    shared = shared_buffers(config, spec)
    yield from (*shared.caches, shared.ids, *shared.rows, *shared.context)
    yield from attention.rotation_buffers(OWNER, heads.rotary_dim, spec.drafter_capacity, spec.dtype)
    yield from partial_buffers(config, spec)
    yield from attention.block_buffers(OWNER, heads, block, spec.dtype)
    yield from mlp.block_buffers(OWNER, config.mlp, block, spec.dtype)
    yield draft_logits(block, drafted_ids(spec, vocab_size), spec.dtype)


def partial_buffers(config: DrafterConfig, spec: EngineSpec) -> tuple[Buffer, Buffer]:
    heads = heads_of(config)
    return attention.partial_buffers(OWNER, heads.num_heads, heads.head_dim, config.block_size, spec.drafter_capacity)


def drafted_ids(spec: EngineSpec, vocab_size: int) -> int:
    """Ids that can be drafted: the first so many."""
    return min(vocab_size, FREQUENT) if spec.precision.head == "frequent" else vocab_size


def draft_logits(block_size: int, drafted_ids: int, dtype: str) -> Buffer:
    return Buffer(LOGITS, (block_size - 1, drafted_ids), dtype, "buffers")


def head_buffers(vocab_size: int, hidden_size: int, dtype: str, precision: DrafterPrecision) -> Iterator[Buffer]:
    """A copy of the target's head for drafting, where there is one."""
    form = eight_bits(hidden_size) if precision.head == "8bit" else UNQUANTIZED
    if form != UNQUANTIZED:
        yield from form.buffers("draft_head", vocab_size, hidden_size, dtype, "head for drafting")
