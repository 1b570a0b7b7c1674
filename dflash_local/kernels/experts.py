"""Products of a mixture of experts in plain PyTorch, for CPUs: the host reads which experts occur.

M rows, E experts, S slots (experts of a row), H wide, I wide inside. An expert that every row takes may be the last of
the E; a row's last slot is its.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dflash_local.config.features import ClampedSwiGLU
from dflash_local.kernels.fragment_packing import TILE_N, FragmentWeight
from dflash_local.kernels.quantized_weight import Fp4Weight, Fp8Weight, GgufWeight, IntWeight, slices

Activation = str | ClampedSwiGLU  # of ``config.features.MoEConfig``
StackedWeight = torch.Tensor | IntWeight | Fp8Weight | Fp4Weight | GgufWeight | FragmentWeight


class Routing(NamedTuple):
    """Hold what rows take: ``experts`` [M, S] int32, the likeliest first, and their ``weights`` [M, S] float32."""

    weights: torch.Tensor
    experts: torch.Tensor


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """Describe how experts follow from a router's logits.

    Attributes:
        num_experts: those that are chosen from, of which the first columns of the logits are. norm_topk_prob: the
            weights of a row's chosen ones are divided by their sum.
        shared: the last slot is the expert ``num_experts``, which every row takes. shared_gate: its weight is the
            sigmoid of the logits' last column, and 1 without.
        bias: [num_experts] of the router, of the logits' dtype.
    """

    num_experts: int
    norm_topk_prob: bool = True
    shared: bool = False
    shared_gate: bool = False
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """Every expert's matrix. ``weight``: [E * N, K]; of gate and up the gate's rows above up's. ``bias``: [E, N]."""

    weight: StackedWeight
    experts: int
    bias: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0] // self.experts

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    def rows(self, expert: int, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return some rows [n, K] of an expert, decoded where they are codes; of fragments from a tile's first row."""
        first, weight = expert * self.out_features, self.weight
        part = slice(first + rows.start, first + rows.stop)
        return weight[part] if isinstance(weight, torch.Tensor) else weight.dequantized(part).to(dtype)

    def product(self, x: torch.Tensor, expert: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute ``out`` [M, N] = ``x`` [M, K] @ the expert's matrix.T (+ bias); codes are decoded by slices."""
        out = x.new_empty(len(x), self.out_features) if out is None else out
        for rows in self._slices():
            columns = self.rows(expert, rows, x.dtype).t()
            if self.bias is None:
                torch.mm(x, columns, out=out[:, rows])
            else:
                torch.addmm(self.bias[expert, rows], x, columns, out=out[:, rows])
        return out

    def _slices(self) -> Iterator[slice]:
        """Return the rows of one expert, in parts that take little memory decoded."""
        if isinstance(self.weight, torch.Tensor):
            return iter((slice(0, self.out_features),))
        return slices(self.out_features, self.in_features, TILE_N)


def route(logits: torch.Tensor, options: RoutingOptions, out: Routing) -> Routing:
    """Return the likeliest experts of each row, of equally likely ones the first; ``out`` filled.

    The softmax is float32 and goes over all experts; weights are rounded to the dtype of the logits, as transformers
    does.

    Args:
        logits: [M, E] without the shared expert, and perhaps a last column, its gate.
    """
    routed = logits[:, : options.num_experts]
    if options.bias is not None:
        routed = routed.float() + options.bias
    order = torch.sort(torch.softmax(routed, -1, dtype=torch.float32), dim=-1, descending=True, stable=True)
    chosen = out.experts.shape[1] - options.shared
    weights = order.values[:, :chosen]
    weights = weights / weights.sum(-1, keepdim=True) if options.norm_topk_prob else weights
    out.weights[:, :chosen] = weights.to(logits.dtype)
    out.experts[:, :chosen] = order.indices[:, :chosen]
    if options.shared:
        out.weights[:, chosen] = logits[:, -1].sigmoid() if options.shared_gate else 1.0
        out.experts[:, chosen] = options.num_experts
    return out


def experts_swiglu(
    x: torch.Tensor, gate_up: ExpertWeight, routing: Routing, intermediate: torch.Tensor, activation: Activation
) -> torch.Tensor:
    """Compute ``intermediate`` [M, S, I]: x @ gate.T and x @ up.T, gated, of a few rows ``x`` [M, H] by their experts;
    one row at a time, so that its bits do not depend on which others chose its expert.
    """
    for row, chosen in enumerate(routing.experts.tolist()):
        for slot, expert in enumerate(chosen):
            intermediate[row, slot] = gated(gate_up.product(x[row : row + 1], expert), activation)[0]
    return intermediate


def experts_down(
    intermediate: torch.Tensor,
    down: ExpertWeight,
    routing: Routing,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``out`` [M, H]: the weighed float32 sum of ``intermediate`` [M, S, I] over slots (+ residual)."""
    for row, chosen in enumerate(routing.experts.tolist()):
        total = torch.zeros(out.shape[1], device=out.device, dtype=torch.float32)
        for slot, expert in enumerate(chosen):
            result = down.product(intermediate[row, slot : slot + 1], expert)[0]
            total += result.float() * routing.weights[row, slot]
        out[row] = total if residual is None else total + residual[row]
    return out


def gated(both: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Gate [M, 2 I], gate and up side by side, to [M, I]; the memory may be used."""
    gate, up = both.chunk(2, -1)
    if isinstance(activation, ClampedSwiGLU):
        gate.clamp_(max=activation.limit)
        up.clamp_(-activation.limit, activation.limit)
        return gate.mul_(torch.sigmoid(gate * activation.alpha)) * up.add_(1)
    if activation != "silu":
        raise ValueError(f"no experts with the activation {activation}")
    return F.silu(gate) * up
