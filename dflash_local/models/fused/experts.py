"""The matrices of a mixture's experts: read from a checkpoint that has them one by one or together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dflash_local.errors import CheckpointError
from dflash_local.kernels.experts import ExpertWeight
from dflash_local.kernels.quantize_weight import quantize
from dflash_local.kernels.quantized_weight import Fp8Weight, IntWeight
from dflash_local.layout.linear import Segment
from dflash_local.layout.moe import MoELayout
from dflash_local.models.fused.formats import FORMATS, format_of
from dflash_local.models.fused.weight_tensors import WeightTensors
from dflash_local.models.place import Conversion, Place, Places


@dataclass(slots=True)
class Experts:
    """Of one layer.

    Attributes:
        gate_up: N = 2 I, the gate's rows above up's. down: N = H. joined: the last one is the shared expert.
        places: where the checkpoint's tensors are read to.
    """

    gate_up: ExpertWeight
    down: ExpertWeight
    joined: bool
    places: Places

    @classmethod
    def of(cls, layout: MoELayout, at: str, source: WeightTensors) -> Experts:
        """Over the tensors of ``MoELayout.expert_buffers``."""
        segments = layout.experts(at, source.spec)
        count = layout.config.num_experts + segments.joined
        weights: list[ExpertWeight] = []
        places: Places = {}
        for segment, buffers in zip(segments[:2], layout.expert_buffers(at, source.spec), strict=True):
            _check_formats(segment, source)
            form = FORMATS[type(segment.format)]
            weight = form.weight(segment.format, source.tensors.take(buffers), getattr(torch, source.spec.dtype))
            weights.append(ExpertWeight(weight, count))
            found = form.places(weight, segment.format, segment.parts)
            if segment.name in source.stored:
                of_shared = {name: place for name, place in found.items() if name.startswith(f"{at}.shared_expert.")}
                found = {segment.name: _together(weights[-1], layout.config.num_experts), **of_shared}
            places |= found
        gate_up, down = weights
        return cls(gate_up, down, segments.joined, places)

    def finish(self) -> None:
        """Once all places are filled."""
        self.gate_up, self.down = (
            replace(each, weight=format_of(each.weight).finish(each.weight)) for each in (self.gate_up, self.down)
        )

    def randomize(self, generator: torch.Generator) -> None:
        """Random matrices."""
        for each in (self.gate_up, self.down):
            format_of(each.weight).randomize(each.weight, generator)


def _check_formats(segment: Segment, source: WeightTensors) -> None:
    """All experts' matrices must be in the format of the first one's, and none may begin within a block of scales."""
    for part in segment.parts if source.stored else ():
        if source.spec.format_of(part.module) != segment.format:
            raise CheckpointError(
                f"{part.module} is not stored as {segment.format.name} like the other experts of its layer, "
                "which the fused engine does not take",
                "load it with --engine reference",
            )
        if not segment.format.joins(part.out_features):
            raise CheckpointError(
                f"{part.module}: blocks of {segment.format.name} do not divide its {part.out_features} rows, "
                "which the fused engine does not take",
                "load it with --engine reference",
            )


def _together(weight: ExpertWeight, count: int) -> Place:
    """The place of a tensor [E, N, K] that holds the matrices of the first ``count`` experts."""
    shape = count, weight.out_features, weight.in_features
    stacked = weight.weight
    if isinstance(stacked, torch.Tensor):
        return stacked[: shape[0] * shape[1]].view(shape)
    assert isinstance(stacked, (IntWeight, Fp8Weight)), "what plain tensors are rounded to"
    routed = format_of(stacked).rows(stacked, shape[0] * shape[1])
    return Conversion(shape, stacked.dtype, lambda stored: quantize(stored.flatten(0, 1), routed))
