"""A mixture of experts: a router, routed experts, and an expert that every token takes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from dflash_local.config.features import MoEConfig
from dflash_local.kernels.experts import Routing, experts_down, experts_prefill, experts_swiglu, route
from dflash_local.layout.moe import MoELayout
from dflash_local.models.fused.linear import GateUp, JoinedLinear, Linear
from dflash_local.models.fused.mlp import MLPWeights
from dflash_local.models.fused.part import RunState
from dflash_local.models.fused.weight_tensors import WeightTensors
from dflash_local.models.place import Places


@dataclass(frozen=True, slots=True)
class MoEWeights:
    """The loaded weights of one layer.

    Attributes:
        router: the shared expert's gate is its last row. gate_up: [E, 2I, H], gate above up. down: [E, H, I].
        shared: the expert that every token takes.
    """

    config: MoEConfig
    router: JoinedLinear
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: MLPWeights | None
    places: Places = field(default_factory=dict)

    @classmethod
    def of(cls, config: MoEConfig, at: str, source: WeightTensors) -> MoEWeights:
        """Over the tensors of ``MoELayout.weights``."""
        layout = MoELayout(config)
        router = JoinedLinear.of(layout.router(at, source.spec.hidden_size), source)
        gate_up, down = source.tensors.take(layout.experts(at, source.spec))
        shared = layout.shared
        part = None if shared is None else MLPWeights.of(shared.config, f"{at}.shared_expert", source)
        places = {**router.places, **_expert_places(f"{at}.experts", gate_up, down, source.stored)}
        return cls(config, router, gate_up, down, part, {**places, **({} if part is None else part.places)})

    @property
    def products(self) -> tuple[Linear | GateUp, ...]:
        """Its products with matrices that every row is multiplied with."""
        return (*self.router.products, *(() if self.shared is None else self.shared.products))

    def finish(self) -> None:
        """Once all places are filled."""
        self.router.finish()
        if self.shared is not None:
            self.shared.finish()

    def randomize(self, generator: torch.Generator) -> None:
        """Random matrices."""
        self.router.randomize(generator)
        for experts in (self.gate_up, self.down):
            for matrix in experts:
                matrix.normal_(generator=generator).mul_(matrix.shape[1] ** -0.5)
        if self.shared is not None:
            self.shared.randomize(generator)

    def bind(self, at: str, run: RunState) -> MoE:
        """The part over the model's buffers."""
        layout = MoELayout(self.config)
        routed = RoutedRows(*run.tensors.take(layout.routed(run.owner, run.spec)))
        shared = layout.shared
        buffers = () if shared is None else run.tensors.take(shared.activations(run.owner, run.spec))
        return MoE(self, routed, buffers[0] if buffers else None)


def _expert_places(at: str, gate_up: torch.Tensor, down: torch.Tensor, stored: Collection[str]) -> Places:
    """Where the routed experts are read to: all at once, or each matrix by itself where a checkpoint stores them so.

    Args:
        stored: names of the checkpoint's tensors; none where there is no checkpoint.
    """
    if not stored or f"{at}.gate_up_proj" in stored:
        return {f"{at}.gate_up_proj": gate_up, f"{at}.down_proj": down}
    places: Places = {}
    for index, (both, result) in enumerate(zip(gate_up, down, strict=True)):
        gate, up = both.chunk(2)
        matrices = {"gate": gate, "up": up, "down": result}
        places |= {f"{at}.{index}.{name}_proj.weight": matrix for name, matrix in matrices.items()}
    return places


class RoutedRows(NamedTuple):
    """The tensors of ``layout.moe.RoutedBuffers``."""

    logits: torch.Tensor
    weights: torch.Tensor
    experts: torch.Tensor
    intermediate: torch.Tensor


class MoE:
    """One layer's.

    Args:
        routed: room for a block's rows between the products. shared: the same of the expert that every token takes.
    """

    def __init__(self, weights: MoEWeights, routed: RoutedRows, shared: torch.Tensor | None) -> None:
        self.weights, self._routed, self._shared = weights, routed, shared

    def block(self, normed: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """``out`` [M, H] = its result (+ residual) of a block's rows."""
        weights = self.weights
        logits, chosen, experts, intermediate = (buffer[: len(normed)] for buffer in self._routed)
        weights.router(normed, logits)
        routing = self._route(logits, Routing(chosen, experts))
        if weights.shared is not None and self._shared is not None:
            inner = weights.shared.gate_up(normed, self._shared[: len(normed)])
            residual = weights.shared.down(self._weighed(inner, logits), out, residual)
        experts_swiglu(normed, weights.gate_up, routing.experts, intermediate)
        return experts_down(intermediate, weights.down, routing, out, residual)

    def prefill(self, normed: torch.Tensor) -> torch.Tensor:
        """Its result [M, H] of a prompt's rows."""
        weights = self.weights
        logits = weights.router.prefill(normed)
        shape = len(normed), self._routed.experts.shape[1]
        routing = self._route(logits, Routing(normed.new_empty(shape), normed.new_empty(shape, dtype=torch.int64)))
        result = experts_prefill(normed, weights.gate_up, weights.down, routing)
        if weights.shared is not None:
            inner = self._weighed(weights.shared.gate_up.prefill(normed), logits)
            result += weights.shared.down.prefill(inner)
        return result

    def _route(self, logits: torch.Tensor, out: Routing) -> Routing:
        config = self.weights.config
        return route(logits[:, : config.num_experts], config.norm_topk_prob, out)

    def _weighed(self, inner: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The shared expert's rows between its products times their gate, in place: down is linear, and H is wider."""
        return inner.mul_(logits[:, -1:].sigmoid()) if self.weights.config.shared_gate else inner
