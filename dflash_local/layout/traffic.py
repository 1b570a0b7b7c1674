"""Describe what one pass of the fused engine reads, launch by launch: the weights of each product with their format,
experts, keys and values. Follows from the same layout that the engine loads; knows nothing of cards or times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from dflash_local.config.features import AttentionConfig, GatedDeltaNetConfig, LayerConfig, ModelConfig, MoEConfig
from dflash_local.config.module_names import HEAD
from dflash_local.layout.attention import position_bytes
from dflash_local.layout.draft_head import draft_head_format, drafted_ids
from dflash_local.layout.linear import LinearSpec, WeightFormat, segments, stored_formats
from dflash_local.layout.moe import MoELayout
from dflash_local.layout.part_layout import EngineSpec, WeightSpec
from dflash_local.layout.target import head_format, head_product, part_layout, weight_spec

PartKind = Literal["attention", "Gated-DeltaNet", "MLP", "experts"]
PARTS: tuple[PartKind, ...] = get_args(PartKind)


@dataclass(frozen=True, slots=True)
class ProductTraffic:
    """A matrix that rows are multiplied with in one launch. format: as ``WeightFormat.name``. bytes: of its weight."""

    format: str
    bytes: int


@dataclass(frozen=True, slots=True)
class ExpertTraffic:
    """The routed experts of one layer: two launches over those that occur among the rows.

    Attributes:
        product: gate, up and down of one expert. count, top_k: experts, and those of a row. always: experts that
            every row takes beside them, in the same launches.
    """

    product: ProductTraffic
    count: int
    top_k: int
    always: int

    def distinct(self, rows: int) -> float:
        """Count experts that occur among rows whose choices are independent and even: the most of real texts."""
        return self.count * (1 - (1 - self.top_k / self.count) ** rows) + self.always


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sum one pass.

    Attributes:
        products: launches by product. experts: layers by their experts. parts: how many of each kind.
        kv_bytes: of a token of context in all layers that see all of it. windows: bytes of a token in layers of a
            sliding window, by its length. group: query heads that share a key head, the most of all layers.
    """

    products: Mapping[ProductTraffic, int]
    experts: Mapping[ExpertTraffic, int]
    parts: Mapping[PartKind, int]
    kv_bytes: int
    windows: Mapping[int, int]
    group: int

    def context_bytes(self, context: int) -> int:
        """Sum keys and values that a row of a block reads behind so many tokens."""
        return self.kv_bytes * context + sum(size * min(context, window) for window, size in self.windows.items())


@lru_cache(maxsize=512)
def target_traffic(model: ModelConfig, dtype: str, kv_dtype: str) -> Traffic:
    """Describe the target's traffic, the head included; see ``layers_traffic``."""
    layers, format_of = layers_traffic(model, dtype, kv_dtype), stored_formats(model.quantization)
    head = head_product(model, "", model.vocab_size) or LinearSpec(HEAD, model.hidden_size, ())
    product = weight_product(head_format(model, format_of), model.vocab_size, head.in_features, dtype)
    return replace(layers, products=Counter(layers.products) + Counter([product]))


@lru_cache(maxsize=512)
def layers_traffic(model: ModelConfig, dtype: str, kv_dtype: str) -> Traffic:
    """Describe the traffic of a target's layers alone.

    Args:
        dtype, kv_dtype: of plain weights, and of keys and values.

    Raises:
        KeyError: a layer has a part that the fused engine does not run.
    """
    format_of = stored_formats(model.quantization)
    products: Counter[ProductTraffic] = Counter()
    experts: Counter[ExpertTraffic] = Counter()
    parts: Counter[PartKind] = Counter()
    for index, layer in enumerate(model.layers):
        one = layer_traffic(f"layers.{index}", layer, weight_spec(model, dtype, format_of))
        products.update(one.products)
        experts.update(one.experts)
        parts.update(one.parts)
    attentions = (layer.mixer for layer in model.layers if isinstance(layer.mixer, AttentionConfig))
    return Traffic(products, experts, parts, *kv_traffic(attentions, kv_dtype))


class LayerTraffic(NamedTuple):
    """Count what one layer adds to ``Traffic``."""

    products: Counter[ProductTraffic]
    experts: Counter[ExpertTraffic]
    parts: Counter[PartKind]


def layer_traffic(at: str, layer: LayerConfig, spec: WeightSpec) -> LayerTraffic:
    found = LayerTraffic(Counter(), Counter(), Counter())
    for config in (layer.mixer, layer.mlp):
        part = part_layout(config)
        module = f"{at}.{part.module}"
        found.parts[_kind(config)] += 1
        projections = part.projections(module, spec.hidden_size)
        if isinstance(config, MoEConfig):
            layout = MoELayout(config)
            found.experts[_experts(layout, module, spec)] += 1
            projections = projections[:1] if layout.fuses_shared_expert(module, spec.format_of) else projections
        found.products.update(product_traffic(each, spec) for each in projections)
    return found


def draft_head(target: ModelConfig, spec: EngineSpec) -> ProductTraffic:
    """Describe the head that gives a drafter's logits."""
    form, ids = draft_head_format(target, spec), drafted_ids(spec, target.vocab_size)
    return weight_product(form, ids, target.hidden_size, spec.dtype)


def kv_traffic(attentions: Iterable[AttentionConfig], dtype: str) -> tuple[int, Counter[int], int]:
    """Return ``kv_bytes``, ``windows`` and ``group`` of ``Traffic``."""
    windows: Counter[int] = Counter()
    full, group = 0, 1
    for attention in attentions:
        size = position_bytes(attention, dtype)
        group = max(group, attention.num_heads // attention.num_kv_heads)
        if attention.sliding_window is None:
            full += size
        else:
            windows[attention.sliding_window] += size
    return full, windows, group


def _kind(config: object) -> PartKind:
    if isinstance(config, MoEConfig):
        return "experts"
    if isinstance(config, GatedDeltaNetConfig):
        return "Gated-DeltaNet"
    return "attention" if isinstance(config, AttentionConfig) else "MLP"


def product_traffic(product: LinearSpec, spec: WeightSpec) -> ProductTraffic:
    """Describe one launch: rows of another format ride along in that of the largest part."""
    sizes = {segment.format.name: 0 for segment in segments(product, spec.format_of)}
    for segment in segments(product, spec.format_of):
        buffers = segment.buffers(product.in_features, spec.dtype, "target weights")
        sizes[segment.format.name] += sum(buffer.nbytes for buffer in buffers)
    return ProductTraffic(max(sizes, key=lambda name: sizes[name]), sum(sizes.values()))


def weight_product(form: WeightFormat, rows: int, columns: int, dtype: str) -> ProductTraffic:
    """Return describes a matrix [rows, columns] in one format, for activations of ``dtype``."""
    return ProductTraffic(form.name, sum(buffer.nbytes for buffer in form.buffers("", rows, columns, dtype, "head")))


def _experts(layout: MoELayout, at: str, spec: WeightSpec) -> ExpertTraffic:
    joined = layout.fuses_shared_expert(at, spec.format_of)
    buffers = [buffer for group in layout.expert_buffers(at, spec) for buffer in group]
    count = layout.config.num_experts
    each = sum(buffer.nbytes for buffer in buffers) // (count + joined)
    form = spec.format_of(f"{at}.experts.0.gate_proj").name
    return ExpertTraffic(ProductTraffic(form, each), count, layout.top_k, int(joined))
