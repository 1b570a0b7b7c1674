"""Products with weight matrices, whatever format they are in; and products that join several matrices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from dflash_local.kernels import fragment_decode, fragment_gemm
from dflash_local.kernels.allocate import Tensors, card_name, dtype_name
from dflash_local.kernels.fragment_gemm import FragmentGemmConfig
from dflash_local.kernels.fragment_packing import MAX_TAIL_ROWS, FragmentFormat, FragmentWeight
from dflash_local.kernels.gather_rows import gather_rows
from dflash_local.kernels.quantize_weight import quantize
from dflash_local.kernels.quantized_weight import IntWeight, slices
from dflash_local.kernels.skinny_gemm import MAX_ROWS
from dflash_local.kernels.timing import LIBRARY
from dflash_local.layout.linear import UNQUANTIZED, LinearSpec, WeightFormat, eight_bits, segments
from dflash_local.models.fused.formats import FORMATS, KernelConfig, Weight, form_of, format_of
from dflash_local.models.fused.fragment_kernels import product_of
from dflash_local.models.fused.quantized_formats import INT
from dflash_local.models.fused.weight_tensors import WeightTensors
from dflash_local.models.place import Places

Kind = tuple[bool, type | FragmentFormat, torch.Size]  # of a product: paired, format and shape of its weight


@dataclass(slots=True)
class _WeightProduct:
    """A weight [N, K]. ``config``: of its product's kernel; None is the library's. ``paired``: gate and up."""

    weight: Weight
    config: KernelConfig | None = LIBRARY
    paired: ClassVar[bool] = False

    @property
    def out_features(self) -> int:
        return self.weight.shape[0] // (2 if self.paired else 1)

    @property
    def kind(self) -> Kind:
        """Return what its kernels depend on: products of one kind run alike."""
        return self.paired, form_of(self.weight), self.weight.shape


@dataclass(slots=True)
class Linear(_WeightProduct):
    """A weight [N, K] with its product."""

    def __call__(
        self, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute ``out = x @ weight.T (+ residual) (+ bias)`` for a few rows; ``out`` may be the residual."""
        if bias is None:
            return format_of(self.weight).linear(x, self.weight, out, self.config, residual)
        product = product_of(self.weight, self.paired)
        if isinstance(self.config, FragmentGemmConfig) and product is not None and len(x) <= MAX_ROWS:
            return fragment_gemm.linear(x, product[0], out, self.config, residual, bias)
        return self(x, out, residual).add_(bias)

    def prefill(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x @ weight.T`` for as many rows as there are; or ``residual`` with that added."""
        return format_of(self.weight).prefill(x, self.weight, residual)


@dataclass(slots=True)
class GateUp(_WeightProduct):
    """The two halves of a gated layer, [2 I, K], with their joint product."""

    paired: ClassVar[bool] = True

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Compute ``out = silu(x @ gate.T) * (x @ up.T)`` for a few rows."""
        return format_of(self.weight).swiglu(x, self.weight, out, self.config)

    def prefill(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(len(x), self.out_features)
        return format_of(self.weight).swiglu(x, self.weight, out, LIBRARY)


@dataclass(slots=True)
class JoinedLinear:
    """Several of a checkpoint's matrices that take one input: a product for each run of one format.

    Attributes:
        products: one below the other; nearly always one. A few plain rows below packed ones become one with them once
            they are read. places: where the checkpoint's tensors are read to.
    """

    products: tuple[Linear, ...]
    places: Places

    @classmethod
    def of(cls, spec: LinearSpec, source: WeightTensors) -> JoinedLinear:
        """Build it over the tensors of ``layout.linear.linear_buffers``."""
        weights, products = source.spec, []
        places: Places = {}
        for segment in segments(spec, weights.format_of):
            form = FORMATS[type(segment.format)]
            buffers = segment.buffers(spec.in_features, weights.dtype, weights.group)
            weight = form.weight(segment.format, source.tensors.take(buffers), getattr(torch, weights.dtype))
            products.append(Linear(weight))
            places |= form.places(weight, segment.format, segment.parts)
        return cls(tuple(products), places)

    def __call__(
        self, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute as ``Linear`` does."""
        if len(self.products) == 1:
            return self.products[0](x, out, residual, bias)
        begin = 0
        for product in self.products:
            end = begin + product.out_features
            of_residual, of_bias = (
                None if residual is None else residual[:, begin:end],
                None if bias is None else bias[begin:end],
            )
            product(x, out[:, begin:end], of_residual, of_bias)
            begin = end
        return out

    def prefill(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Compute as ``Linear`` does."""
        if len(self.products) == 1:
            return self.products[0].prefill(x, residual)
        result = torch.cat([product.prefill(x) for product in self.products], -1)
        return result if residual is None else residual.add_(result)

    def finish(self) -> None:
        finish(self.products)
        joined: list[Linear] = []
        for product in self.products:
            above, below = joined[-1].weight if joined else None, product.weight
            if (
                isinstance(above, FragmentWeight)
                and above.tail is None
                and isinstance(below, torch.Tensor)
                and below.dtype == torch.bfloat16
                and len(below) <= MAX_TAIL_ROWS
            ):
                joined[-1].weight = above.with_tail(below)
            else:
                joined.append(product)
        self.products = tuple(joined)

    def randomize(self, generator: torch.Generator) -> None:
        randomize(self.products, generator)


@dataclass(frozen=True, slots=True)
class JoinedGateUp:
    """Gate and up with what follows them: one product where both have one format, else two and the activation."""

    products: tuple[GateUp] | tuple[Linear, ...]
    places: Places

    @classmethod
    def of(cls, spec: LinearSpec, source: WeightTensors) -> JoinedGateUp:
        """Build it over the tensors of ``layout.linear.linear_buffers``."""
        parts = JoinedLinear.of(spec, source)
        one = len(parts.products) == 1
        return cls((GateUp(parts.products[0].weight),) if one else parts.products, parts.places)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Compute ``out = silu(x @ gate.T) * (x @ up.T)`` for a few rows."""
        first = self.products[0]
        if isinstance(first, GateUp):
            return first(x, out)
        gate, up = (product(x, torch.empty_like(out)) for product in self.products)
        return torch.mul(F.silu(gate), up, out=out)

    def prefill(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.products) == 1:
            return self.products[0].prefill(x)
        gate, up = (product.prefill(x) for product in self.products)
        return F.silu(gate).mul_(up)

    def finish(self) -> None:
        finish(self.products)

    def randomize(self, generator: torch.Generator) -> None:
        randomize(self.products, generator)


def by_kind(products: Iterable[Linear | GateUp]) -> list[list[Linear | GateUp]]:
    """Return products that run alike, in the order of the first of each kind: on cards of one model, perhaps on two."""
    groups: dict[tuple[Kind, str], list[Linear | GateUp]] = {}
    for product in products:
        groups.setdefault((product.kind, card_name(product.weight.device)), []).append(product)
    return list(groups.values())


def finish(products: Sequence[Linear | GateUp]) -> None:
    """Turn each weight from what is stored to what is used, once all places are filled."""
    for product in products:
        product.weight = format_of(product.weight).finish(product.weight)


def randomize(products: Sequence[Linear | GateUp], generator: torch.Generator) -> None:
    """Fill random weights that keep the scale of what is multiplied."""
    for product in products:
        format_of(product.weight).randomize(product.weight, generator)


def quantise_layer(layer: Linear | GateUp) -> None:
    """Give a layer the codes of its weight; its kernel is to be chosen."""
    if (coarse := in_eight_bits(layer.weight)) is not layer.weight:
        layer.weight, layer.config = coarse, LIBRARY


def int8_copy(layer: Linear) -> Linear:
    """Return a layer with the codes of that one's weight beside it; the same one where its weight is coarse already."""
    coarse = in_eight_bits(layer.weight)
    return layer if coarse is layer.weight else Linear(coarse)


def in_eight_bits(plain: Weight) -> Weight:
    """Code a weight as ``layout.linear.eight_bits`` keeps it; beside both a slice is held. What is in codes already
    stays as it is.
    """
    if not isinstance(plain, torch.Tensor):
        return plain
    form = eight_bits(plain.shape[1])
    if form == UNQUANTIZED:
        return plain
    weight = _allocated(form, len(plain), plain)
    quantize(plain, weight)
    finished: Weight = format_of(weight).finish(weight)
    return finished


def gathered_rows(layer: Linear, ids: torch.Tensor, coarse: bool) -> Linear:
    """Return a layer with a copy of that one's rows by ids [n] int64; beside both a slice is held.

    Args:
        coarse: coded as ``layout.linear.eight_bits`` keeps it, else plain.
    """
    table, columns = layer.weight, layer.weight.shape[1]
    weight = _allocated(eight_bits(columns) if coarse else UNQUANTIZED, len(ids), table)
    for rows in slices(len(ids), columns):
        room = torch.empty(rows.stop - rows.start, columns, dtype=table.dtype, device=ids.device)
        plain = embedding_rows(table, ids[rows], room)
        if isinstance(weight, IntWeight):
            quantize(plain, INT.rows_of(weight, rows))
        else:
            weight[rows] = plain
    return Linear(format_of(weight).finish(weight))


def _allocated(form: WeightFormat, rows: int, like: Weight) -> Any:
    """Return a weight of so many rows in one format, else as another one, to be filled."""
    buffers = form.buffers("coarse", rows, like.shape[1], dtype_name(like.dtype), "drafter weights")
    return FORMATS[type(form)].weight(form, Tensors(buffers, like.device).take(buffers), like.dtype)


def embedding_rows(table: Weight, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Compute ``out[i] = table[ids[i]]``, decoded; ids [M] int64 that only the device knows. ``out``: [M, H]."""
    if isinstance(table, torch.Tensor):
        return gather_rows(table, ids, out)
    if isinstance(table, FragmentWeight):
        return fragment_decode.gather(table, ids, out)
    return out.copy_(table.gathered(ids).dequantized())
