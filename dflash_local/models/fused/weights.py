"""A target's tensors in the layout its forward wants, streamed from a checkpoint straight to their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch

from dflash_local.checkpoint_files.tensor_info import TensorInfo
from dflash_local.config.features import (
    AttentionConfig,
    GatedDeltaNetConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
)
from dflash_local.kernels.allocate import Tensors, dtype_name, on_device
from dflash_local.layout import target as layout
from dflash_local.layout.linear import FormatOf, LinearSpec, stored_formats, unquantized
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fill_places import fill_places, text_tensors
from dflash_local.models.fused.attention import AttentionWeights
from dflash_local.models.fused.formats import FORMATS, Weight
from dflash_local.models.fused.gated_delta_net import GatedDeltaNetWeights
from dflash_local.models.fused.linear import GateUp, JoinedLinear, Linear, finish, randomize
from dflash_local.models.fused.mlp import MLPWeights
from dflash_local.models.fused.moe import MoEWeights
from dflash_local.models.fused.part import FeedForward, Mixer, PartWeights
from dflash_local.models.fused.weight_tensors import RMSNorm, WeightTensors
from dflash_local.models.place import Places
from dflash_local.models.stored_formats import formats_in
from dflash_local.models.target_facts import TargetFacts

RANDOM_ROWS = 8192  # of an embedding that are made at a time
# The kinds of layer parts, as ``layout.target.PARTS`` has them.
PARTS: Mapping[type, Any] = {
    AttentionConfig: AttentionWeights,
    GatedDeltaNetConfig: GatedDeltaNetWeights,
    MLPConfig: MLPWeights,
    MoEConfig: MoEWeights,
}


class Front(NamedTuple):
    """Say that a target's first ``layers`` lie on another GPU than the rest."""

    layers: int
    device: torch.device


class LayerNorms(NamedTuple):
    """Hold norms of the inputs of a layer's two parts and, of sandwich layers, of their results."""

    mixer_input: RMSNorm
    mlp_input: RMSNorm
    mixer_output: RMSNorm | None = None
    mlp_output: RMSNorm | None = None

    def present(self) -> tuple[RMSNorm, ...]:
        return tuple(norm for norm in self if norm is not None)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    mixer: PartWeights[Mixer]
    mlp: PartWeights[FeedForward]
    norms: LayerNorms

    @property
    def device(self) -> torch.device:
        return self.norms.mixer_input.weight.device

    @property
    def products(self) -> tuple[Linear | GateUp, ...]:
        return (*self.mixer.products, *self.mlp.products)

    def finish(self) -> None:
        self.mixer.finish()
        self.mlp.finish()
        for norm in self.norms.present():
            norm.finish()

    def randomize(self, generator: torch.Generator) -> None:
        self.mixer.randomize(generator)
        self.mlp.randomize(generator)
        for norm in self.norms.present():
            norm.reset()


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """The whole target.

    Attributes:
        table: the embedding, never multiplied where it is not the head, which it may be; else it may lie in pinned host
            memory.
        places: where tensors are read to. front_places: of those of the first layers, ``front`` of them, which lie on
            another GPU than the rest.
    """

    table: Linear
    layers: tuple[LayerWeights, ...]
    norm: RMSNorm
    head: Linear
    places: Places
    front: int = 0
    front_places: Places = field(default_factory=dict)

    @property
    def embedding(self) -> Weight:
        return self.table.weight

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def products(self) -> tuple[Linear | GateUp, ...]:
        return tuple(product for layer in self.layers for product in layer.products)

    @property
    def parts(self) -> Iterator[PartWeights[Mixer] | PartWeights[FeedForward]]:
        return (part for layer in self.layers for part in (layer.mixer, layer.mlp))

    @property
    def measured(self) -> tuple[Linear | GateUp, ...]:
        """Return products whose kernel is to be chosen; a plain head stays the library's, and nothing is faster."""
        coded = () if isinstance(self.head.weight, torch.Tensor) else (self.head,)
        return (*self.products, *coded)

    def finish(self) -> None:
        for layer in self.layers:
            with on_device(layer.device):
                layer.finish()
        self.norm.finish()
        finish([self.head] if self.head is self.table else [self.head, self.table])


def read_weights(
    checkpoint: Checkpoint,
    facts: TargetFacts,
    device: torch.device,
    dtype: torch.dtype,
    on_fraction: Callable[[float], None] = lambda _: None,
    format_of: FormatOf | None = None,
    host_embedding: bool = False,
    front: Front | None = None,
) -> TargetWeights:
    """Allocate, then stream; beside the weights at most one tensor is held.

    Args:
        format_of: the format of each matrix by its module's name; None for the one that it is stored in.
        host_embedding: an embedding that is not also the head lies in pinned host memory.
        front: layers that lie elsewhere.

    Raises:
        CheckpointError: a tensor is missing, left over, of the wrong shape or not finite.
    """
    if format_of is None:
        format_of = formats_in(checkpoint, facts.model.quantization)
    weights = allocate(
        *(facts.model, facts.prefix, facts.embedding_rows, device, dtype, format_of, host_embedding),
        stored=checkpoint.tensors,
        front=front,
    )
    names = text_tensors(checkpoint, facts)
    ahead = [name for name in names if name in weights.front_places]
    share = weights.front / len(weights.layers)
    if front is not None:
        with on_device(front.device):
            fill_places(checkpoint, ahead, weights.front_places, lambda part: on_fraction(share * part))
    rest = [name for name in names if name not in weights.front_places]
    fill_places(checkpoint, rest, weights.places, lambda part: on_fraction(share + (1 - share) * part))
    weights.finish()
    return weights


def random_weights(
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    host_embedding: bool = False,
    front: Front | None = None,
) -> TargetWeights:
    """Return weights of the true shape and of sensible scale, made where they lie: for measuring without a download."""
    formats = stored_formats(model.quantization)
    weights = allocate(model, "model.", model.vocab_size, device, dtype, formats, host_embedding, front=front)
    generator = torch.Generator(device).manual_seed(seed)
    if isinstance(weights.embedding, torch.Tensor):
        for rows in weights.embedding.split(RANDOM_ROWS):
            rows.copy_(torch.empty_like(rows, device=device).normal_(generator=generator))
    else:
        randomize([weights.table], generator)
    for index, layer in enumerate(weights.layers):  # a layer's numbers are the same on whichever GPU it lies
        with on_device(layer.device):
            layer.randomize(torch.Generator(layer.device).manual_seed(seed + 1 + index))
    weights.norm.reset()
    if weights.head is not weights.table:
        randomize([weights.head], generator)
    weights.finish()
    return weights


def allocate(
    model: ModelConfig,
    prefix: str,
    embedding_rows: int,
    device: torch.device,
    dtype: torch.dtype,
    format_of: FormatOf = unquantized,
    host_embedding: bool = False,
    stored: Mapping[str, TensorInfo] | None = None,
    front: Front | None = None,
) -> TargetWeights:
    """Return uninitialised weights.

    Args:
        prefix: of the text model's tensors in its checkpoint. embedding_rows: ids, padding included.
        host_embedding, front: see ``read_weights``. stored: the checkpoint's tensors by name.
    """
    kind = dtype_name(dtype)
    spec = layout.weight_spec(model, kind, format_of, host_embedding)
    first, elsewhere = front or (0, device)
    beside = layout.beside_layers(model, prefix, embedding_rows, spec)
    tensors = Tensors(chain(beside, layout.layers_buffers(model, prefix, spec, first)), device, joined=True)
    ahead = Tensors(layout.layers_buffers(model, prefix, spec, 0, first), elsewhere, joined=True)
    source = WeightTensors(tensors, spec, model.norm_eps, stored or {})
    ends = layout.end_buffers(model, prefix, embedding_rows, spec)
    places: Places = {ends.norm.name: tensors[ends.norm.name]}
    table = _table(ends, source, places)
    head = _head(layout.head_product(model, prefix, embedding_rows), table, source, places)
    front_source, front_places = replace(source, tensors=ahead), Places()
    layers = tuple(
        layer_weights(f"{prefix}layers.{i}", layer, *((front_source, front_places) if i < first else (source, places)))
        for i, layer in enumerate(model.layers)
    )
    return TargetWeights(table, layers, source.norm(ends.norm), head, places, first, front_places)


def _table(ends: layout.EndBuffers, source: WeightTensors, places: Places) -> Linear:
    """Return the embedding; adds where it is read to."""
    spec, table = source.spec, ends.embedding
    form, buffers = FORMATS[type(table.format)], table.buffers(spec.hidden_size, spec.dtype, ends.embedding_group)
    weight = form.weight(table.format, source.tensors.take(buffers), getattr(torch, spec.dtype))
    places |= form.places(weight, table.format, table.parts)
    return Linear(weight)


def _head(product: LinearSpec | None, table: Linear, source: WeightTensors, places: Places) -> Linear:
    """Return the embedding, or a matrix of its own; adds where that is read to."""
    if product is None:
        return table
    joined = JoinedLinear.of(product, replace(source, spec=layout.head_spec(source.spec)))
    places |= joined.places
    (head,) = joined.products
    return head


def layer_weights(at: str, layer: LayerConfig, source: WeightTensors, places: Places) -> LayerWeights:
    """Return one layer's weights; adds where its tensors are read to."""
    mixer, mlp = (
        PARTS[type(config)].of(config, f"{at}.{layout.part_layout(config).module}", source)
        for config in (layer.mixer, layer.mlp)
    )
    norms = layout.layer_norms(at, layer, source.spec)
    places |= {**mixer.places, **mlp.places}
    places |= {norm.name: source.tensors[norm.name] for norm in norms.values()}
    return LayerWeights(mixer, mlp, LayerNorms(**{role: source.norm(norm) for role, norm in norms.items()}))
