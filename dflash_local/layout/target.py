"""Every tensor of a target in the fused engine: weights, what it keeps of the sequence, and a block's rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from dflash_local.config.features import (
    AttentionConfig,
    GatedDeltaNetConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
)
from dflash_local.config.module_names import HEAD, HEAD_MODULES
from dflash_local.layout.attention import AttentionLayout
from dflash_local.layout.buffer import Buffer, Group, group_bytes
from dflash_local.layout.gated_delta_net import GatedDeltaNetLayout
from dflash_local.layout.linear import (
    UNQUANTIZED,
    FormatOf,
    GgufBlocks,
    LinearSpec,
    MatrixPart,
    Segment,
    WeightFormat,
    stored_formats,
    unquantized,
)
from dflash_local.layout.mlp import MLPLayout
from dflash_local.layout.moe import MoELayout, most_launches
from dflash_local.layout.part_layout import EngineSpec, PartLayout, WeightSpec

OWNER = "target"
EMBEDDING = "embed_tokens"
# The kinds of layer parts that the fused engine has.
PARTS: Mapping[type, Callable[[Any], PartLayout]] = {
    AttentionConfig: AttentionLayout,
    GatedDeltaNetConfig: GatedDeltaNetLayout,
    MLPConfig: MLPLayout,
    MoEConfig: MoELayout,
}


def part_layout(config: object) -> PartLayout:
    """Return the layout of a mixer or of a feed-forward part. Raises KeyError: the fused engine has no such part."""
    return PARTS[type(config)](config)


def weight_spec(
    model: ModelConfig, dtype: str, format_of: FormatOf = unquantized, host_embedding: bool = False
) -> WeightSpec:
    return WeightSpec(model.hidden_size, dtype, model.norm_plus_one, format_of, host_embedding=host_embedding)


def layer_norms(at: str, layer: LayerConfig, spec: WeightSpec) -> dict[str, Buffer]:
    """Describe the norms of the inputs of a layer's parts and, of sandwich layers, of their results.

    Returns:
        by their names in ``models.fused.weights.LayerNorms``; buffers are named as in published checkpoints.
    """
    names = {"mixer_input": "input_layernorm", "mlp_input": "post_attention_layernorm"}
    if layer.sandwich_norms:
        names = {
            "mixer_input": "input_layernorm",
            "mlp_input": "pre_feedforward_layernorm",
            "mixer_output": "post_attention_layernorm",
            "mlp_output": "post_feedforward_layernorm",
        }
    return {role: spec.norm(f"{at}.{name}", spec.hidden_size) for role, name in names.items()}


class EndBuffers(NamedTuple):
    """Hold what stands before and behind the layers, but for the head."""

    embedding: Segment
    embedding_group: Group
    norm: Buffer

    def all(self, spec: WeightSpec) -> tuple[Buffer, ...]:
        return (*self.embedding.buffers(spec.hidden_size, spec.dtype, self.embedding_group), self.norm)


def end_buffers(model: ModelConfig, prefix: str, embedding_rows: int, spec: WeightSpec) -> EndBuffers:
    """Return embedding and norm, under the names that published checkpoints have for them."""
    on_host = spec.host_embedding and not model.tie_word_embeddings
    group: Group = "embedding in host memory" if on_host else spec.group
    module = f"{prefix}{EMBEDDING}"
    form = UNQUANTIZED if on_host else embedding_format(spec.format_of, prefix)
    table = Segment(module, form, (MatrixPart(module, embedding_rows),))
    return EndBuffers(table, group, spec.norm(f"{prefix}norm", model.hidden_size))


def embedding_format(format_of: FormatOf, prefix: str = "") -> WeightFormat:
    """Return the format of the embedding: GGUF blocks stay, and rows are decoded one by one; others are plain."""
    form = format_of(f"{prefix}{EMBEDDING}")
    return form if isinstance(form, GgufBlocks) else UNQUANTIZED


def head_format(model: ModelConfig, format_of: FormatOf) -> WeightFormat:
    """Return the format of the head, which may be the embedding."""
    return embedding_format(format_of) if model.tie_word_embeddings else format_of(HEAD)


def head_spec(spec: WeightSpec) -> WeightSpec:
    """Return what a head's weight depends on: it is a line of its own in the memory breakdown."""
    return replace(spec, group="head")


def head_product(model: ModelConfig, prefix: str, embedding_rows: int) -> LinearSpec | None:
    """Return the head of its own; None where it is the embedding."""
    if model.tie_word_embeddings:
        return None
    module = HEAD_MODULES[prefix.startswith("language_model.")]
    return LinearSpec(module, model.hidden_size, (MatrixPart(module, embedding_rows),))


def weight_buffers(
    model: ModelConfig,
    prefix: str,
    embedding_rows: int,
    dtype: str,
    format_of: FormatOf = unquantized,
    host_embedding: bool = False,
) -> Iterator[Buffer]:
    """Describe embedding, layers, norm and head. ``prefix``: of the text model. ``embedding_rows``: with padding."""
    spec = weight_spec(model, dtype, format_of, host_embedding)
    yield from beside_layers(model, prefix, embedding_rows, spec)
    yield from layers_buffers(model, prefix, spec)


def beside_layers(model: ModelConfig, prefix: str, embedding_rows: int, spec: WeightSpec) -> Iterator[Buffer]:
    """Describe embedding, norm and head."""
    yield from end_buffers(model, prefix, embedding_rows, spec).all(spec)
    head = head_product(model, prefix, embedding_rows)
    if head is not None:
        yield from head_spec(spec).linear(head)


@lru_cache(maxsize=1024)
def weight_bytes(model: ModelConfig, prefix: str, dtype: str, host_embedding: bool) -> Mapping[Group, int]:
    """Sum the weights of a published checkpoint. Arguments as of ``weight_buffers``."""
    spec = weight_spec(model, dtype, stored_formats(model.quantization), host_embedding)
    sums: Counter[Group] = Counter(_layer_bytes(model, prefix, dtype))
    sums.update(group_bytes(beside_layers(model, prefix, model.vocab_size, spec)))
    return sums


@lru_cache(maxsize=1024)
def _layer_bytes(model: ModelConfig, prefix: str, dtype: str) -> Mapping[Group, int]:
    """Sum the weights of all layers; those of one kind are worked out once where no rule tells them apart."""
    stored, sums = model.quantization, Counter[Group]()
    alike = stored is None or not (stored.names or stored.patterns or stored.below)
    kinds = model.layer_kinds.items() if alike else [(layer, 1) for layer in model.layers]
    around = replace(model, layers=(), first_layer=0)
    for index, (layer, count) in enumerate(kinds, model.first_layer):
        for group, size in _one_layers_bytes(around, f"{prefix}layers.{index}", layer, dtype).items():
            sums[group] += count * size
    return sums


@lru_cache(maxsize=4096)  # a target of which some layers lie on another GPU has those of the whole one
def _one_layers_bytes(around: ModelConfig, at: str, layer: LayerConfig, dtype: str) -> Mapping[Group, int]:
    """Sum the weights of a layer of a target that is given without its layers."""
    return group_bytes(layer_buffers(at, layer, weight_spec(around, dtype, stored_formats(around.quantization))))


def layers_buffers(
    model: ModelConfig, prefix: str, spec: WeightSpec, first: int = 0, end: int | None = None
) -> Iterator[Buffer]:
    """Describe the weights of layers ``first .. end - 1``."""
    for index, layer in enumerate(model.layers[first:end], first):
        yield from layer_buffers(f"{prefix}layers.{index}", layer, spec)


def layer_buffers(at: str, layer: LayerConfig, spec: WeightSpec) -> Iterator[Buffer]:
    """Describe one layer's weights."""
    for config in (layer.mixer, layer.mlp):
        part = part_layout(config)
        yield from part.weights(f"{at}.{part.module}", spec)
    yield from layer_norms(at, layer, spec).values()


def shared_buffers(model: ModelConfig, vocab_size: int, spec: EngineSpec) -> dict[str, Buffer]:
    """Describe what all layers work on: a block's rows between them.

    ``counters``: committed tokens, rows of the last block to be committed, blocks so far. ``x``: the residual stream.
    ``branch``, where layers norm the results of their parts: such a result before its norm. ``distinct_experts``
    [mixtures, launches], where there are some: how many routed experts occurred in each launch of the last block; of
    all layers together, so that one copy has them.

    Args:
        vocab_size: rows of the head, padding included.
    """
    hidden = model.hidden_size
    widths = {"hidden": hidden, "x": hidden, "normed": hidden, "taps": max(spec.num_taps, 1) * hidden}
    widths["logits"] = vocab_size
    if any(layer.sandwich_norms for layer in model.layer_kinds):
        widths["branch"] = hidden
    integers: dict[str, tuple[tuple[int, ...], str]] = {
        "counters": ((3,), "int32"),
        "tokens": ((spec.rows,), "int64"),
    }
    if mixtures := sum(count for layer, count in model.layer_kinds.items() if isinstance(layer.mlp, MoEConfig)):
        integers["distinct_experts"] = ((mixtures, most_launches(spec.rows)), "int32")
    return {
        **{name: Buffer(f"{OWNER}.{name}", *each, "buffers", zeroed=True) for name, each in integers.items()},
        **{name: Buffer(f"{OWNER}.{name}", (spec.rows, size), spec.dtype, "buffers") for name, size in widths.items()},
    }


def parts(model: ModelConfig) -> list[PartLayout]:
    kinds = dict.fromkeys(config for layer in model.layer_kinds for config in (layer.mixer, layer.mlp))
    return [part_layout(config) for config in kinds]


def front_model(model: ModelConfig, layers: int) -> ModelConfig:
    """Return a target of the first layers alone."""
    return replace(model, layers=model.layers[:layers])


def run_buffers(model: ModelConfig, vocab_size: int, spec: EngineSpec, first: int = 0) -> Iterator[Buffer]:
    """Return what a loaded target takes beside its weights. ``vocab_size``: rows of the head, padding included.
    ``first``: the first layer whose state is here.
    """
    yield from block_buffers(model, vocab_size, spec)
    for index, layer in enumerate(model.layers[first:], first):
        for role, config in (("mixer", layer.mixer), ("mlp", layer.mlp)):
            yield from part_layout(config).state(f"{OWNER}.layers.{index}.{role}", spec)


def block_buffers(model: ModelConfig, vocab_size: int, spec: EngineSpec) -> Iterator[Buffer]:
    """Describe those of them that all layers work on in turn."""
    yield from shared_buffers(model, vocab_size, spec).values()
    for part in parts(model):
        yield from part.activations(OWNER, spec)


def state_bytes(model: ModelConfig, spec: EngineSpec) -> dict[Group, int]:
    """Sum what each layer keeps for itself; layers of one kind are worked out once."""
    sums: Counter[Group] = Counter()
    for layer, count in model.layer_kinds.items():
        for config in (layer.mixer, layer.mlp):
            for group, size in group_bytes(part_layout(config).state(OWNER, spec)).items():
                sums[group] += count * size
    return dict(sums)
