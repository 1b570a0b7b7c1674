"""The kernels of a mixture of experts on a card: a block's rows through them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dflash_local.kernels import expert_gemm
from dflash_local.kernels.expert_gemm import DownConfig, GateUpConfig, Mixture, slice_rows
from dflash_local.kernels.experts import ExpertWeight, Routing, RoutingOptions


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
    """Of one layer's experts. ``configs``: by the rows of a launch."""

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
        """``out`` [M, H] = the weighed sum of each row's experts (+ residual): three launches for 16 rows.

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
    """What the kernels ask of a layer whose rows choose so. ``slots``: experts of a row, a shared one included."""
    shared = (2 if routing.shared_gate else 1) if routing.shared else 0
    return Mixture(routing.num_experts, slots - routing.shared, shared, routing.norm_topk_prob, clamp)
