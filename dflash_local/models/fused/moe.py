"""A mixture of experts: a router, routed experts, and an expert that every token takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from dflash_local.config.features import ClampedSwiGLU, MoEConfig
from dflash_local.kernels.expert_gemm import Mixture
from dflash_local.kernels.expert_prefill import experts_prefill
from dflash_local.kernels.experts import Routing, RoutingOptions, experts_down, experts_swiglu, route
from dflash_local.layout.mlp import MLPLayout
from dflash_local.layout.moe import MoELayout
from dflash_local.models.fused.linear import JoinedGateUp, JoinedLinear
from dflash_local.models.fused.mlp import MLPWeights
from dflash_local.models.fused.part import PartWeights, RunState, UsedRows
from dflash_local.models.fused.routed_experts import ExpertBlock, RoutedExperts, mixture_of
from dflash_local.models.fused.weight_tensors import WeightTensors
from dflash_local.models.place import Places


@dataclass(frozen=True, slots=True)
class MoEWeights(PartWeights["MoE"]):
    """The loaded weights of one layer.

    Attributes:
        router: the shared expert's gate is its last row. router_bias: [E], or None.
        shared: the expert that every token takes, where it is not joined to the routed ones.
    """

    config: MoEConfig
    router: JoinedLinear
    router_bias: torch.Tensor | None
    experts: RoutedExperts
    shared: MLPWeights | None
    places: Places = field(default_factory=dict)

    @classmethod
    def of(cls, config: MoEConfig, at: str, source: WeightTensors) -> MoEWeights:
        """Build it over the tensors of ``MoELayout.weights``."""
        layout = MoELayout(config)
        router = JoinedLinear.of(layout.router(at, source.spec.hidden_size), source)
        experts = RoutedExperts.of(layout, at, source)
        biases = layout.router_bias(at, source.spec)
        found = {buffer.name: source.tensors[buffer.name] for buffer in biases}
        bias = next(iter(found.values()), None)
        places: Places = {**router.places, **found, **experts.places}
        if layout.shared is None or experts.joined:
            return cls(config, router, bias, experts, None, places)
        shared = MLPWeights.of(layout.shared.config, f"{at}.shared_expert", source)
        return cls(config, router, bias, experts, shared, {**places, **shared.places})

    @property
    def joined(self) -> tuple[JoinedLinear | JoinedGateUp, ...]:
        """Return its products with matrices that every row is multiplied with."""
        return (self.router, *(() if self.shared is None else self.shared.joined))

    @property
    def slots(self) -> int:
        return MoELayout(self.config).top_k + self.experts.joined

    @property
    def routing(self) -> RoutingOptions:
        config, joined = self.config, self.experts.joined
        return RoutingOptions(
            num_experts=config.num_experts,
            norm_topk_prob=config.norm_topk_prob,
            shared=joined,
            shared_gate=joined and config.shared_gate,
            bias=self.router_bias,
        )

    @property
    def mixture(self) -> Mixture:
        """Return what the kernels of a card ask of it."""
        activation = self.config.activation
        clamp = (activation.limit, activation.alpha) if isinstance(activation, ClampedSwiGLU) else None
        return mixture_of(self.routing, self.slots, clamp)

    def finish(self) -> None:
        PartWeights.finish(self)
        self.experts.finish()

    def forget_places(self) -> None:
        PartWeights.forget_places(self)
        if self.shared is not None:
            self.shared.forget_places()

    def randomize(self, generator: torch.Generator) -> None:
        PartWeights.randomize(self, generator)
        if self.router_bias is not None:
            self.router_bias.zero_()
        self.experts.randomize(generator)

    def bind(self, at: str, run: RunState) -> MoE:
        layout = MoELayout(self.config)
        routed = RoutedRows(*run.tensors.take(layout.routed(run.owner, run.spec)))
        between: torch.Tensor | None = None
        if self.shared is not None and layout.may_join:
            routed, between = routed.without_last_slot()
        elif self.shared is not None:
            (between,) = run.tensors.take(MLPLayout(self.shared.config).activations(run.owner, run.spec))
        return MoE(self, routed, between, run.used)


class RoutedRows(NamedTuple):
    """The tensors of ``layout.moe.RoutedBuffers``."""

    logits: torch.Tensor
    weights: torch.Tensor
    experts: torch.Tensor
    intermediate: torch.Tensor
    lists: torch.Tensor

    def without_last_slot(self) -> tuple[RoutedRows, torch.Tensor]:
        """Return the memory with a slot less for each row, contiguous, and the intermediate [M, I] that this leaves."""
        rows, slots, size = self.intermediate.shape
        first = rows * (slots - 1)
        weights, experts = (each.view(-1)[:first].view(rows, -1) for each in (self.weights, self.experts))
        taken, left = self.intermediate.view(-1).split([first * size, rows * size])
        routed = self._replace(weights=weights, experts=experts, intermediate=taken.view(rows, -1, size))
        return routed, left.view(rows, size)


class MoE:
    """One layer's.

    Args:
        routed: room for a block's rows between the products. shared: the same of the shared expert, where that is not
            joined to the routed ones. used: rows of a block that hold tokens.

    Attributes:
        distinct_experts: [launches] int32, gets how many routed experts occur among the rows of each launch of a block;
            None where nobody counts.
        fixed_logits: [rows, E], or [rows, E + 1] with the shared expert's gate: what a block's rows are routed by
            instead of the router's, for measuring; the router runs all the same.
    """

    def __init__(self, weights: MoEWeights, routed: RoutedRows, shared: torch.Tensor | None, used: UsedRows) -> None:
        self.weights, self._routed, self._shared, self._used = weights, routed, shared, used
        self.distinct_experts: torch.Tensor | None = None
        self.fixed_logits: torch.Tensor | None = None

    def launches(self, rows: int) -> int:
        kernels = self.weights.experts.kernels
        return 1 if kernels is None else -(-rows // max(kernels.configs))

    def block(self, normed: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Compute ``out`` [M, H] = result (+ residual) of a block's rows; rows without a token may hold anything."""
        weights = self.weights
        weights.router(normed, self._routed.logits[: len(normed)])
        if weights.shared is not None and self._shared is not None:
            inner = weights.shared.gate_up(normed, self._shared[: len(normed)])
            inner = self._weighed(inner, self._routed.logits[: len(normed)])
            residual = weights.shared.down(inner, out, residual)
        rows = slice(self._used.count or len(normed))  # experts that only rows without a token take are not read
        logits = self._routed.logits if self.fixed_logits is None else self.fixed_logits
        x = normed[rows]
        self.routed(x, logits[: len(x)], out[rows], None if residual is None else residual[rows])
        return out

    def routed(
        self, x: torch.Tensor, logits: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute ``out`` [M, H] = the weighed sum of rows' experts (+ residual) by ``logits`` [M, E] or [M, E + 1]."""
        weights, matrices = self.weights, self.weights.experts
        chosen, experts, intermediate = (buffer[: len(x)] for buffer in self._routed[1:4])
        routing = Routing(chosen, experts)
        if matrices.kernels is not None:
            block, bias = ExpertBlock(routing, self._routed.lists, intermediate), weights.router_bias
            return matrices.kernels.run(x, logits, matrices.matrices, block, out, residual, bias, self.distinct_experts)
        route(logits, weights.routing, routing)
        if self.distinct_experts is not None:
            self.distinct_experts[0] = routing.experts.unique().numel() - matrices.joined
        experts_swiglu(x, matrices.gate_up, routing, intermediate, weights.config.activation)
        return experts_down(intermediate, matrices.down, routing, out, residual)

    def prefill(self, normed: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        weights = self.weights
        logits = weights.router.prefill(normed)
        result = self.prefill_routed(normed, self.routing(logits))
        if weights.shared is not None:
            inner = self._weighed(weights.shared.gate_up.prefill(normed), logits)
            result += weights.shared.down.prefill(inner)
        return result if residual is None else residual.add_(result)

    def routing(self, logits: torch.Tensor) -> Routing:
        """Return what rows take by their logits [M, E] or [M, E + 1]."""
        shape = len(logits), self.weights.slots
        empty = Routing(logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32))
        return route(logits, self.weights.routing, empty)

    def prefill_routed(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Return the weighed sum [M, H] of a prompt's rows' experts; a routing may have fewer slots than its own."""
        matrices = self.weights.experts
        return experts_prefill(x, matrices.gate_up, matrices.down, routing, self.weights.config.activation)

    def _weighed(self, inner: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Multiply the shared expert's inner rows with their gate, in place: down is linear, and H is wider."""
        return inner.mul_(logits[:, -1:].sigmoid()) if self.weights.config.shared_gate else inner


FixedRouting = Literal["uniform", "correlated", "same"]
EXPONENTS = {"correlated": 0.75, "same": 0.0}  # of rows, in the experts that they choose among
FAVOUR = 20.0  # of these, in logits of about one


@contextmanager
def fixed_routing(parts: Sequence[MoE], rows: int, routing: FixedRouting) -> Iterator[None]:
    """Route blocks of so many rows by drawn logits within; what is recorded reads tensors gone afterwards."""
    before = [part.fixed_logits for part in parts]
    try:
        for seed, part in enumerate(parts):
            part.fixed_logits = _logits(part, rows, routing, seed)
        yield
    finally:
        for part, logits in zip(parts, before, strict=True):
            part.fixed_logits = logits


def _logits(part: MoE, rows: int, routing: FixedRouting, seed: int) -> torch.Tensor:
    config, device = part.weights.config, part.weights.experts.device
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(rows, config.num_experts + config.shared_gate, device=device, generator=generator)
    if routing in EXPONENTS:
        chosen = torch.randperm(config.num_experts, device=device, generator=generator)
        logits[:, chosen[: round(part.weights.mixture.top_k * rows ** EXPONENTS[routing])]] += FAVOUR
    return logits.to(part.weights.router.products[0].weight.dtype)
