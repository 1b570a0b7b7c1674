"""A dense gated feed-forward part."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dflash_local.config.features import MLPConfig
from dflash_local.layout.mlp import MLPLayout
from dflash_local.models.fused.linear import JoinedGateUp, JoinedLinear
from dflash_local.models.fused.part import PartWeights, RunState
from dflash_local.models.fused.weight_tensors import WeightTensors
from dflash_local.models.place import Places


@dataclass(frozen=True, slots=True)
class MLPWeights(PartWeights["MLP"]):
    config: MLPConfig
    gate_up: JoinedGateUp
    down: JoinedLinear
    places: Places = field(default_factory=dict)

    @classmethod
    def of(cls, config: MLPConfig, at: str, source: WeightTensors) -> MLPWeights:
        """Build it over the tensors of ``MLPLayout.weights``."""
        first, second = MLPLayout(config).projections(at, source.spec.hidden_size)
        gate_up, down = JoinedGateUp.of(first, source), JoinedLinear.of(second, source)
        return cls(config, gate_up, down, {**gate_up.places, **down.places})

    @property
    def joined(self) -> tuple[JoinedGateUp, JoinedLinear]:
        return self.gate_up, self.down

    def bind(self, at: str, run: RunState) -> MLP:
        (intermediate,) = run.tensors.take(MLPLayout(self.config).activations(run.owner, run.spec))
        return MLP(self, intermediate)


class MLP:
    """One layer's. ``intermediate``: room for a block's rows between the products."""

    def __init__(self, weights: MLPWeights, intermediate: torch.Tensor) -> None:
        self.weights, self._intermediate = weights, intermediate

    def block(self, normed: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        intermediate = self._intermediate[: len(normed)]
        return self.weights.down(self.weights.gate_up(normed, intermediate), out, residual)

    def prefill(self, normed: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return self.weights.down.prefill(self.weights.gate_up.prefill(normed), residual)
