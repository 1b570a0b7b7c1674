"""The matrices of a mixture's experts: read from a checkpoint that has them one by one or together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from dflash_local.config.features import MoEConfig
from dflash_local.config.quantization import MXFP4
from dflash_local.errors import CheckpointError
from dflash_local.kernels import expert_gemm
from dflash_local.kernels.expert_gemm import DownConfig, GateUpConfig, Mixture, slice_rows
from dflash_local.kernels.experts import ExpertWeight, Routing, RoutingOptions
from dflash_local.kernels.quantize_weight import quantize
from dflash_local.kernels.quantized_weight import Fp4Weight, Fp8Weight, IntWeight
from dflash_local.layout.linear import Fp4Groups, Segment, matrix_rows
from dflash_local.layout.moe import MoELayout
from dflash_local.models.fused.formats import FORMATS, format_of
from dflash_local.models.fused.quantized_formats import check_exponents
from dflash_local.models.fused.weight_tensors import WeightTensors
from dflash_local.models.place import Conversion, Place, Places

Put = Callable[[torch.Tensor, torch.Tensor], None]  # a tensor as it is stored, to the rows that it is kept as
BLOCK_BYTES = 16  # of gpt-oss's MXFP4: 32 codes that share a scale


@dataclass(slots=True)
class RoutedExperts:
    """Hold the routed experts of one layer.

    Attributes:
        gate_up: N = 2 I, the gate's rows above up's. down: N = H. joined: the last one is the shared expert.
        places: where the checkpoint's tensors are read to. kernels: of a card, once they are chosen; a block's rows go
            through PyTorch's products without.
    """

    gate_up: ExpertWeight
    down: ExpertWeight
    joined: bool
    places: Places
    kernels: ExpertKernels | None = None

    @classmethod
    def of(cls, layout: MoELayout, at: str, source: WeightTensors) -> RoutedExperts:
        """Build it over the tensors of ``MoELayout.expert_buffers`` and of ``expert_biases``."""
        segments = layout.experts(at, source.spec)
        count = layout.config.num_experts + segments.joined
        biases = source.tensors.take(layout.expert_biases(at, source.spec)) or (None, None)
        weights: list[ExpertWeight] = []
        places: Places = {}
        buffers = layout.expert_buffers(at, source.spec)
        for segment, each, bias in zip(segments[:2], buffers, biases, strict=True):
            form = FORMATS[type(segment.format)]
            stacked = form.weight(segment.format, source.tensors.take(each), getattr(torch, source.spec.dtype))
            weights.append(ExpertWeight(stacked, count, bias))
            places |= _places(segment, weights[-1], layout.config, at, source)
        gate_up, down = weights
        return cls(gate_up, down, segments.joined, places)

    @property
    def device(self) -> torch.device:
        return self.gate_up.weight.device

    @property
    def matrices(self) -> Matrices:
        return Matrices(self.gate_up, self.down)

    def finish(self) -> None:
        self.gate_up, self.down = (
            replace(each, weight=format_of(each.weight).finish(each.weight)) for each in (self.gate_up, self.down)
        )

    def randomize(self, generator: torch.Generator) -> None:
        for each in (self.gate_up, self.down):
            format_of(each.weight).randomize(each.weight, generator)
            if each.bias is not None:
                each.bias.zero_()


def _places(segment: Segment, weight: ExpertWeight, config: MoEConfig, at: str, source: WeightTensors) -> Places:
    """Return where one matrix of every expert is read to, as the checkpoint has it, and its biases."""
    name = segment.name
    if f"{segment.parts[0].module}.weight" in source.stored:
        _check_formats(segment, source)
        places = FORMATS[type(segment.format)].places(weight.weight, segment.format, segment.parts)
        return {**places, **_biases_one_by_one(segment, weight)}
    put = _put_by_turns if config.interleaved and name.endswith(".gate_up_proj") else _put
    found: Places = {}
    if weight.bias is not None:
        found[f"{name}_bias"] = Conversion(tuple(weight.bias.shape), weight.bias.dtype, partial(put, weight.bias))
    if isinstance(segment.format, Fp4Groups) and segment.format.stored.dialect == MXFP4:
        assert isinstance(weight.weight, Fp4Weight)
        return {**found, **_blocks(name, weight, weight.weight, put)}
    if config.interleaved and isinstance(weight.weight, torch.Tensor):
        return {**found, name: _transposed(weight, weight.weight, put)}
    _check_formats(segment, source)
    places = FORMATS[type(segment.format)].places(weight.weight, segment.format, segment.parts)
    if name not in source.stored:
        return {**found, **places}
    of_shared = {each: place for each, place in places.items() if each.startswith(f"{at}.shared_expert.")}
    return {**found, name: _together(weight, config.num_experts), **of_shared}


def _biases_one_by_one(segment: Segment, weight: ExpertWeight) -> Places:
    if weight.bias is None:
        return {}
    rows = weight.bias.flatten()
    return {f"{part.module}.bias": rows[at] for part, at in matrix_rows(segment.parts)}


def _check_formats(segment: Segment, source: WeightTensors) -> None:
    """Refuse experts in another format than the first, or that begin within a block of scales."""
    for part in segment.parts if source.stored else ():
        if source.spec.format_of(part.module) != segment.format:
            raise CheckpointError(
                f"{part.module} is not stored as {segment.format.name} like the other experts of its layer, "
                "which the fused engine does not take",
                "load it with --engine reference",
            )
        if not segment.format.can_concat(part.out_features):
            raise CheckpointError(
                f"{part.module}: blocks of {segment.format.name} do not divide its {part.out_features} rows, "
                "which the fused engine does not take",
                "load it with --engine reference",
            )


def _together(weight: ExpertWeight, count: int) -> Place:
    """Return the place of a tensor [E, N, K] that holds the matrices of the first ``count`` experts."""
    shape = count, weight.out_features, weight.in_features
    stacked = weight.weight
    if isinstance(stacked, torch.Tensor):
        return stacked[: shape[0] * shape[1]].view(shape)
    assert isinstance(stacked, (IntWeight, Fp8Weight)), "what plain tensors are rounded to"
    routed = format_of(stacked).rows(stacked, shape[0] * shape[1])
    return Conversion(shape, stacked.dtype, lambda stored: quantize(stored.flatten(0, 1), routed))


def _blocks(name: str, weight: ExpertWeight, coded: Fp4Weight, put: Put) -> Places:
    """Return the places of codes [E, N, K / 32, 16], two to a byte, and of exponents [E, N, K / 32]."""
    shape = weight.experts, weight.out_features, coded.scales.shape[1]
    codes = coded.codes.view(torch.uint8).view(*shape[:2], -1)
    scales = coded.scales.view(shape)
    blocks = *shape, BLOCK_BYTES

    def take_scales(stored: torch.Tensor) -> None:
        check_exponents(f"{name}_scales", stored)
        put(scales, stored)

    of_codes: Place = Conversion(blocks, torch.uint8, partial(put, codes))
    if put is _put:
        of_codes = codes.view(blocks)
    return {f"{name}_blocks": of_codes, f"{name}_scales": Conversion(shape, torch.uint8, take_scales)}


def _transposed(weight: ExpertWeight, rows: torch.Tensor, put: Put) -> Conversion:
    """Return the place of plain matrices [E, K, N]."""
    stacked = rows.view(weight.experts, weight.out_features, weight.in_features)
    shape = weight.experts, weight.in_features, weight.out_features
    return Conversion(shape, rows.dtype, lambda stored: put(stacked, stored.transpose(1, 2)))


def _put(rows: torch.Tensor, stored: torch.Tensor) -> None:
    rows.copy_(stored.view(rows.shape))


def _put_by_turns(rows: torch.Tensor, stored: torch.Tensor) -> None:
    """Put rows of gate and up by turns into [E, 2 I, ...] with the gate's above up's."""
    rows.unflatten(1, (2, -1)).copy_(stored.view(rows.shape).unflatten(1, (-1, 2)).transpose(1, 2))


class Matrices(NamedTuple):
    gate_up: ExpertWeight
    down: ExpertWeight


class ExpertBlock(NamedTuple):
    """A block's rows between the launches: M rows of S experts.

    Attributes:
        routing: weights and experts [M, S]. lists: [launches, words] int32, the experts that occur in each.
        intermediate: [M, S, I].
    """

    routing: Routing
    lists: torch.Tensor
    intermediate: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExpertKernels:
    """Run one layer's experts. ``configs``: by the rows of a launch."""

    mixture: Mixture
    configs: Mapping[int, tuple[GateUpConfig, DownConfig]]

    def run(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        matrices: Matrices,
        block: ExpertBlock,
        out: torch.Tensor,
        residual: torch.Tensor | None,
        router_bias: torch.Tensor | None = None,
        distinct: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute ``out`` [M, H] = the weighed sum of each row's experts (+ residual): three launches for 16 rows.

        Args:
            x: [M, H]. logits: [M, >= experts]. distinct: [launches] int32, gets how many routed experts occur.
        """
        step = max(self.configs)
        for launch, at in enumerate(range(0, len(x), step)):
            rows = slice(at, min(at + step, len(x)))
            first, second = self.configs[slice_rows(rows.stop - rows.start)]
            weights, experts, expert_list = (*(each[rows] for each in block.routing), block.lists[launch])
            counted = None if distinct is None else distinct[launch : launch + 1]
            expert_gemm.route(logits[rows], self.mixture, weights, experts, expert_list, router_bias, counted)
            between = block.intermediate[rows]
            expert_gemm.gate_up(x[rows], matrices.gate_up, self.mixture, expert_list, between, first)
            routed, added = (weights, experts, expert_list), None if residual is None else residual[rows]
            expert_gemm.down(between, matrices.down, self.mixture, routed, out[rows], second, added)
        return out


def mixture_of(routing: RoutingOptions, slots: int, clamp: tuple[float, float] | None = None) -> Mixture:
    """Return what kernels ask of a layer whose rows choose so. ``slots``: experts of a row, with a shared one."""
    shared = (2 if routing.shared_gate else 1) if routing.shared else 0
    return Mixture(routing.num_experts, slots - routing.shared, shared, routing.norm_topk_prob, clamp)
