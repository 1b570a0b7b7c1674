"""A drafter's tensors in the fused layout its forward wants, streamed from a checkpoint or random."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch

from dflash_local.drafters.dflash import layout
from dflash_local.drafters.dflash.layout import DFlashConfig
from dflash_local.kernels.allocate import Tensors, dtype_name
from dflash_local.layout.linear import UNQUANTIZED, FormatOf, LinearSpec, unquantized
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.drafter_codes import check_codes, decode_codes
from dflash_local.models.drafter_tensors import WEIGHT, check_tensors, coded_matrices, target_hidden_of
from dflash_local.models.fused.formats import FORMATS
from dflash_local.models.fused.formats import format_of as format_of_weight
from dflash_local.models.fused.linear import in_eight_bits
from dflash_local.models.place import Place
from dflash_local.models.stored_formats import formats_in

Places = dict[str, list[torch.Tensor]]  # by the tensors' names
Codes = dict[str, list[Place]]
Matrix = Any  # a tensor; in the fused engine it may be a weight of a coarser format
MATRICES = ("qkv", "output", "gate_up", "down")  # of a layer


@dataclass(frozen=True, slots=True)
class DrafterLayerWeights:
    """One decoder layer. qkv: [q; k; v] rows; query_key_norm: [q heads + kv heads, head_dim]."""

    input_norm: torch.Tensor
    qkv: Matrix
    qkv_bias: torch.Tensor | None
    query_key_norm: torch.Tensor
    output: Matrix
    output_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class DrafterWeights:
    """The whole drafter. ``context_kv``: keys, then values, of all layers, [2 x layers x kv_dim, hidden], so that
    context costs one GEMM; these rows also stand in each ``qkv``. ``context_key_norm``: [layers x kv heads, head_dim].
    ``own_matrices``, ``own_tensors``: of the kind, by the names of its ``own_products`` and ``own_weights``.
    """

    fc: Matrix
    hidden_norm: torch.Tensor
    norm: torch.Tensor
    context_kv: Matrix
    context_kv_bias: torch.Tensor | None
    context_key_norm: torch.Tensor
    layers: tuple[DrafterLayerWeights, ...]
    own_matrices: Mapping[str, Matrix] = field(default_factory=dict)
    own_tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        plain = (self.hidden_norm, self.norm, self.context_kv_bias, self.context_key_norm)
        own = (*self.own_matrices.values(), *self.own_tensors.values())
        layers = (getattr(layer, each.name) for layer in self.layers for each in fields(layer))
        return sum(part.nbytes for part in (self.fc, self.context_kv, *plain, *own, *layers) if part is not None)

    def coded(self) -> DrafterWeights:
        """Return the same drafter with its matrices in eight bits, beside what it is made of; those in codes stay."""
        return with_matrices(self, in_eight_bits)


class Allocated(NamedTuple):
    """A drafter's tensors, uninitialised, and where those of its checkpoint go: plain ones, and codes that are kept."""

    weights: DrafterWeights
    places: Places
    codes: Codes

    def finished(self) -> DrafterWeights:
        """Return the weights once all places are filled: codes as they are used."""
        if not self.codes:
            return self.weights
        return with_matrices(self.weights, lambda weight: format_of_weight(weight).finish(weight))


def with_matrices(weights: DrafterWeights, change: Callable[[Matrix], Matrix]) -> DrafterWeights:
    """Return the same drafter with other matrices, made one after the other."""

    def layer(old: DrafterLayerWeights) -> DrafterLayerWeights:
        return replace(old, **{name: change(getattr(old, name)) for name in MATRICES})

    return replace(
        weights,
        fc=change(weights.fc),
        context_kv=change(weights.context_kv),
        layers=tuple(map(layer, weights.layers)),
        own_matrices={name: change(matrix) for name, matrix in weights.own_matrices.items()},
    )


def read_weights(
    checkpoint: Checkpoint,
    config: DFlashConfig,
    device: torch.device,
    dtype: torch.dtype,
    on_notice: Callable[[str], None],
    keeps_codes: bool = False,
) -> DrafterWeights:
    """Check, allocate, stream.

    Args:
        on_notice: called with suspicious but usable tensors. keeps_codes: a matrix that the file has as codes stays
            so, as the fused engine multiplies it; else, and where a product joins several formats, it is decoded.
    """
    target_hidden = target_hidden_of(checkpoint, config)
    check_tensors(checkpoint, config, target_hidden)
    check_codes(checkpoint, config, target_hidden)
    formats = formats_in(checkpoint, config.quantization) if keeps_codes else unquantized
    room = allocate(config, target_hidden, device, dtype, formats)
    coded = coded_matrices(checkpoint, config)
    plain = {name: at for name, at in room.places.items() if name.removesuffix(WEIGHT) not in coded}
    checkpoint.fill(plain, on_notice)
    checkpoint.fill({name: at for name, at in room.codes.items() if name in checkpoint.tensors})
    decoded = {module: form for module, form in coded.items() if f"{module}{WEIGHT}" in room.places}
    decode_codes(checkpoint, decoded, room.places, dtype)
    return room.finished()


def random_weights(
    config: DFlashConfig, target_hidden: int, seed: int, device: torch.device, dtype: torch.dtype
) -> DrafterWeights:
    """Return random weights of sensible scale, a pure function of config and seed."""
    weights, places, _ = allocate(config, target_hidden, device, dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, shape in config.tensors(target_hidden).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            noise = 1 + 0.1 * noise
        elif len(shape) == 2:
            noise = noise / shape[1] ** 0.5
        for place in places[name]:
            place.copy_(noise)
    return weights


def random_on_device(
    config: DFlashConfig, target_hidden: int, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> DrafterWeights:
    """Return random weights made where they lie, for measuring, in the formats of the drafter's own: norms are one,
    matrices keep the scale of their input.
    """
    room = allocate(config, target_hidden, device, dtype, config.formats)
    generator = torch.Generator(device).manual_seed(seed)

    def randomized(weight: Matrix) -> Matrix:
        if not isinstance(weight, torch.Tensor):
            format_of_weight(weight).randomize(weight, generator)
        return weight

    with_matrices(room.weights, randomized)
    for name, shape in config.tensors(target_hidden).items():
        for place in room.places.get(name, ()):
            if name.endswith("norm.weight") or len(shape) == 1:
                place.fill_(1.0)
            else:
                place.normal_(generator=generator).mul_(shape[1] ** -0.5)
    return room.finished()


def allocate(
    config: DFlashConfig,
    target_hidden: int,
    device: torch.device,
    dtype: torch.dtype,
    format_of: FormatOf = unquantized,
) -> Allocated:
    """Allocate tensors in the fused layout. ``format_of``: of the checkpoint's matrices that stay as stored."""
    kind = dtype_name(dtype)
    tensors = Tensors(config.weights(target_hidden, kind, format_of), device)
    products, names = layout.products(config, target_hidden), layout.vectors(config, kind)
    places: Places = {}
    codes: Codes = {}

    def matrix(product: LinearSpec) -> Matrix:
        form = layout.matrix_format(product, format_of)
        reading = FORMATS[type(form)]
        weight = reading.weight(form, tensors.take(layout.matrix_buffers(product, form, kind)), dtype)
        for name, place in reading.places(weight, form, product.parts).items():
            if form == UNQUANTIZED and isinstance(place, torch.Tensor):
                places.setdefault(name, []).append(place)
            elif place is not None:
                codes.setdefault(name, []).append(place)
        return weight

    def bias(name: str) -> torch.Tensor | None:
        return tensors[name] if name in names else None

    def layer(at: str, large: layout.LayerProducts) -> DrafterLayerWeights:
        return DrafterLayerWeights(
            input_norm=tensors[f"{at}.input_layernorm.weight"],
            qkv=matrix(large.qkv),
            qkv_bias=bias(f"{at}.self_attn.qkv_proj.bias"),
            query_key_norm=tensors[f"{at}.self_attn.qk_norm.weight"],
            output=matrix(large.output),
            output_bias=bias(f"{at}.self_attn.o_proj.bias"),
            post_norm=tensors[f"{at}.post_attention_layernorm.weight"],
            gate_up=matrix(large.gate_up),
            down=matrix(large.down),
        )

    weights = DrafterWeights(
        fc=matrix(products.fc),
        hidden_norm=tensors["hidden_norm.weight"],
        norm=tensors["norm.weight"],
        context_kv=matrix(products.context_kv),
        context_kv_bias=bias("context_kv.bias"),
        context_key_norm=tensors["context_key_norm.weight"],
        layers=tuple(layer(f"layers.{index}", large) for index, large in enumerate(products.layers)),
        own_matrices={product.name: matrix(product) for product in products.own},
        own_tensors={buffer.name: tensors[buffer.name] for buffer in config.own_weights(kind)},
    )
    places |= {"hidden_norm.weight": [weights.hidden_norm], "norm.weight": [weights.norm]}
    for index in range(config.num_layers):
        places |= _layer_places(config, weights, index)
    places |= {name: [tensor] for name, tensor in weights.own_tensors.items()}
    return Allocated(weights, places, codes)


def _layer_places(config: DFlashConfig, weights: DrafterWeights, index: int) -> Places:
    """Return where the checkpoint's norms and biases of one layer go, as views into the fused ones."""
    layer, at = weights.layers[index], f"layers.{index}"
    heads, kv_heads = config.num_heads, config.num_kv_heads
    places: Places = {
        f"{at}.input_layernorm.weight": [layer.input_norm],
        f"{at}.post_attention_layernorm.weight": [layer.post_norm],
        f"{at}.self_attn.q_norm.weight": [layer.query_key_norm[:heads]],
        f"{at}.self_attn.k_norm.weight": [
            layer.query_key_norm[heads:],
            weights.context_key_norm[index * kv_heads : (index + 1) * kv_heads],
        ],
    }
    if layer.qkv_bias is None or weights.context_kv_bias is None or layer.output_bias is None:
        return places
    queries, keys, layers = heads * config.head_dim, kv_heads * config.head_dim, config.num_layers
    of_keys, of_values = weights.context_kv_bias.view(2, layers, keys)[:, index]
    return places | {
        f"{at}.self_attn.o_proj.bias": [layer.output_bias],
        f"{at}.self_attn.q_proj.bias": [layer.qkv_bias[:queries]],
        f"{at}.self_attn.k_proj.bias": [layer.qkv_bias[queries : queries + keys], of_keys],
        f"{at}.self_attn.v_proj.bias": [layer.qkv_bias[queries + keys :], of_values],
    }
