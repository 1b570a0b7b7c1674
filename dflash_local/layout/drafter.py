"""Every tensor of a drafter in the fused engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dflash_local.config.dflash2 import (
    BASE,
    CONVOLVED,
    KERNELS,
    PREDECESSORS,
    PROJECTION,
    SELECTOR,
    SUCCESSORS,
    SelectorConfig,
)
from dflash_local.config.drafter_config import DrafterConfig
from dflash_local.config.dspark import FOLLOWING, PREVIOUS
from dflash_local.config.features import AttentionConfig
from dflash_local.layout import attention, mlp
from dflash_local.layout.buffer import Buffer, Group
from dflash_local.layout.cycle import CHOICE_BLOCK
from dflash_local.layout.linear import (
    UNQUANTIZED,
    FormatOf,
    LinearSpec,
    Part,
    WeightFormat,
    eight_bits,
    linear_buffers,
    segments,
    unquantized,
)
from dflash_local.layout.spec import EngineSpec
from dflash_local.load_config import FREQUENT, DrafterPrecision

OWNER = "drafter"
LOGITS = f"{OWNER}.logits"
GROUP: Group = "drafter weights"
FULL = DrafterPrecision()
MARKOV_BLOCK = 64  # ids of one program of ``kernels.markov_walk``


def heads_of(config: DrafterConfig) -> AttentionConfig:
    return config.attention(0)


class LayerProducts(NamedTuple):
    """``attention_conv``, ``mlp_conv``: what rows add to the kernels of a DFlash 2 drafter's convolutions."""

    qkv: LinearSpec
    output: LinearSpec
    gate_up: LinearSpec
    down: LinearSpec
    attention_conv: LinearSpec | None
    mlp_conv: LinearSpec | None


class Products(NamedTuple):
    """Products of a drafter's own.

    Attributes:
        context_kv: the keys of all layers, then the values of all layers, so that context rows cost one product; these
            rows also stand in each layer's ``qkv`` (about 3 % more memory).
        selector: a DFlash 2 drafter's projection of hidden rows.
    """

    fc: LinearSpec
    context_kv: LinearSpec
    layers: tuple[LayerProducts, ...]
    selector: LinearSpec | None

    def all(self) -> tuple[LinearSpec, ...]:
        found = (self.fc, self.context_kv, *(product for layer in self.layers for product in layer), self.selector)
        return tuple(product for product in found if product is not None)


def products(config: DrafterConfig, target_hidden: int) -> Products:
    hidden, second = config.hidden_size, config.dflash2
    context = [
        Part(f"layers.{index}.self_attn.{name}", heads_of(config).kv_size)
        for name in ("k_proj", "v_proj")
        for index in range(config.num_layers)
    ]

    def product(name: str, rows: int) -> LinearSpec:
        return LinearSpec(name, hidden, (Part(name, rows),))

    def layer(at: str) -> LayerProducts:
        heads = attention.AttentionLayout(heads_of(config)).projections(f"{at}.self_attn", hidden)
        attention_conv, mlp_conv = (
            None if second is None else product(f"{at}.{module}.{KERNELS}", second.convolution.kernels(hidden))
            for module in CONVOLVED
        )
        feed_forward = mlp.MLPLayout(config.mlp).projections(f"{at}.mlp", hidden)
        return LayerProducts(*heads, *feed_forward, attention_conv, mlp_conv)

    return Products(
        LinearSpec("fc", len(config.taps) * target_hidden, (Part("fc", hidden),)),
        LinearSpec("context_kv", hidden, tuple(context)),
        tuple(layer(f"layers.{index}") for index in range(config.num_layers)),
        None if second is None else product(f"{SELECTOR}.{PROJECTION}", second.selector.rank),
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


class DFlash2Buffers(NamedTuple):
    """What a DFlash 2 drafter has beside, but for products.

    Attributes:
        predecessors, successors: the selector's codebooks. kernels: of all rows, of the convolution around attention
            and of that around the feed-forward part, by layer.
    """

    predecessors: Buffer
    successors: Buffer
    kernels: tuple[tuple[Buffer, Buffer], ...]

    def all(self) -> tuple[Buffer, ...]:
        return (self.predecessors, self.successors, *(kernel for layer in self.kernels for kernel in layer))


def dflash2_buffers(config: DrafterConfig, dtype: str) -> DFlash2Buffers | None:
    """Named and shaped as in the checkpoint; None for a DFlash drafter."""
    if config.dflash2 is None:
        return None
    shapes = config.dflash2.tensor_shapes(config.num_layers, config.hidden_size)

    def buffer(name: str) -> Buffer:
        return Buffer(name, shapes[name], dtype, GROUP)

    around, behind = CONVOLVED
    return DFlash2Buffers(
        buffer(f"{SELECTOR}.{PREDECESSORS}"),
        buffer(f"{SELECTOR}.{SUCCESSORS}"),
        tuple(
            (buffer(f"layers.{index}.{around}.{BASE}"), buffer(f"layers.{index}.{behind}.{BASE}"))
            for index in range(config.num_layers)
        ),
    )


def markov_matrices(config: DrafterConfig, dtype: str) -> tuple[Buffer, ...]:
    """A DSpark drafter's: by the id before, and by the one behind it; none where it has no Markov head."""
    shapes = {} if config.dspark is None else config.dspark.tensor_shapes()
    return tuple(Buffer(name, shapes[name], dtype, GROUP) for name in (PREVIOUS, FOLLOWING) if name in shapes)


def weight_buffers(
    config: DrafterConfig,
    target_hidden: int,
    dtype: str,
    format_of: FormatOf = unquantized,
    precision: DrafterPrecision = FULL,
) -> Iterator[Buffer]:
    """Matrices, norms and biases. ``target_hidden``: numbers of a tap. ``format_of``, ``precision``: of
    ``matrix_format``.
    """
    for product in products(config, target_hidden).all():
        yield from matrix_buffers(product, matrix_format(product, format_of, precision), dtype)
    yield from vectors(config, dtype).all()
    found = dflash2_buffers(config, dtype)
    yield from () if found is None else found.all()
    yield from markov_matrices(config, dtype)


def matrix_format(product: LinearSpec, format_of: FormatOf, precision: DrafterPrecision = FULL) -> WeightFormat:
    """A product's one format: that in which the checkpoint has all of its parts (``format_of``), else as ``precision``
    says. What the checkpoint has in several is decoded.
    """
    first, *others = segments(product, format_of)
    if first.format != UNQUANTIZED and not others:
        return first.format
    return eight_bits(product.in_features) if precision.weights == "8bit" else UNQUANTIZED


def matrix_buffers(product: LinearSpec, form: WeightFormat, dtype: str) -> Iterator[Buffer]:
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

    block, hidden = config.draft_rows, config.hidden_size
    most = max(block, spec.rows)
    return SharedBuffers(
        (cache("keys"), cache("values")),
        Buffer(f"{OWNER}.ids", (block,), "int64", "buffers"),
        (rows("x", block, hidden), rows("normed", block, hidden), rows("hidden", block, hidden)),
        (rows("feature", most, hidden), rows("context_kv", most, 2 * config.num_layers * heads.kv_size)),
    )


def run_buffers(config: DrafterConfig, vocab_size: int, spec: EngineSpec) -> Iterator[Buffer]:
    """What a bound drafter takes beside its weights. ``vocab_size``: rows of the target's head."""
    block, heads = config.draft_rows, heads_of(config)
    shared = shared_buffers(config, spec)
    yield from (*shared.caches, shared.ids, *shared.rows, *shared.context)
    yield from attention.rotation_buffers(OWNER, heads.rotary_dim, spec.drafter_capacity, spec.dtype)
    yield from partial_buffers(config, spec)
    yield from attention.block_buffers(OWNER, heads, block, spec.dtype)
    yield from mlp.block_buffers(OWNER, config.mlp, block, spec.dtype)
    own = dflash2_run_buffers(config, vocab_size, spec.dtype)
    yield from () if own is None else own.all()
    yield from markov_buffers(config, vocab_size)
    yield draft_logits(config.block_size, drafted_ids(spec, vocab_size), spec.dtype)


class DFlash2RunBuffers(NamedTuple):
    """What a DFlash 2 drafter's block works on beside.

    Attributes:
        kernels: what rows add to a convolution's. projected: what they contribute to the choice. candidates: of each
            block of the vocabulary their scores and ids, of all of it their scores, ids and codebook rows.
    """

    kernels: Buffer
    projected: Buffer
    candidates: tuple[Buffer, ...]

    def all(self) -> tuple[Buffer, ...]:
        return (self.kernels, self.projected, *self.candidates)


def dflash2_run_buffers(config: DrafterConfig, vocab_size: int, dtype: str) -> DFlash2RunBuffers | None:
    """None for a DFlash drafter."""
    second, rows = config.dflash2, config.draft_rows - config.first_draft
    if second is None:
        return None
    return DFlash2RunBuffers(
        Buffer(
            f"{OWNER}.kernels", (config.draft_rows, second.convolution.kernels(config.hidden_size)), dtype, "buffers"
        ),
        Buffer(f"{OWNER}.projected", (rows, second.selector.rank), dtype, "buffers"),
        candidate_buffers(second.selector, rows, vocab_size),
    )


def candidate_buffers(selector: SelectorConfig, rows: int, vocab_size: int) -> tuple[Buffer, ...]:
    """Of ``kernels.candidate_walk``."""
    blocks, wide = -(-vocab_size // CHOICE_BLOCK), 1 << (selector.top_k - 1).bit_length()

    def buffer(name: str, dtype: str, *shape: int) -> Buffer:
        return Buffer(f"{OWNER}.candidate_{name}", shape, dtype, "buffers")

    return (
        buffer("block_scores", "float32", rows, blocks, wide),
        buffer("block_ids", "int32", rows, blocks, wide),
        buffer("scores", "float32", rows, wide),
        buffer("ids", "int32", rows, wide),
        buffer("followers", "float32", rows, wide, selector.rank),
    )


def markov_buffers(config: DrafterConfig, vocab_size: int) -> tuple[Buffer, ...]:
    """Of ``kernels.markov_walk``: of each block of the vocabulary the best score of a row, and its id."""
    if config.dspark is None or not config.dspark.markov_rank:
        return ()
    blocks = (-(-vocab_size // MARKOV_BLOCK),)
    return (
        Buffer(f"{OWNER}.markov_scores", blocks, "float32", "buffers"),
        Buffer(f"{OWNER}.markov_ids", blocks, "int32", "buffers"),
    )


def partial_buffers(config: DrafterConfig, spec: EngineSpec) -> tuple[Buffer, Buffer]:
    heads = heads_of(config)
    return attention.partial_buffers(OWNER, heads.num_heads, heads.head_dim, config.draft_rows, spec.drafter_capacity)


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
