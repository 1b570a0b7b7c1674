"""Products of a mixture of experts: which experts each row takes, and what they make of it.

Plain PyTorch, for CPUs: the host reads which experts occur. Shapes: M rows, E experts, k of them for each row, H wide,
I wide inside.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class Routing(NamedTuple):
    """What rows take: ``experts`` [M, k] int64, the likeliest first, and their ``weights`` [M, k]."""

    weights: torch.Tensor
    experts: torch.Tensor


def route(logits: torch.Tensor, norm_topk_prob: bool, out: Routing) -> Routing:
    """The k likeliest experts of each row, of equally likely ones the first; ``out`` filled.

    The softmax is float32 and goes over all experts; weights are rounded to the dtype of ``out``, as transformers does.

    Args:
        logits: [M, E]. norm_topk_prob: the weights of a row are divided by their sum.
    """
    order = torch.sort(torch.softmax(logits, -1, dtype=torch.float32), dim=-1, descending=True, stable=True)
    chosen = out.experts.shape[1]
    weights = order.values[:, :chosen]
    out.weights.copy_(weights / weights.sum(-1, keepdim=True) if norm_topk_prob else weights)
    out.experts.copy_(order.indices[:, :chosen])
    return out


def experts_swiglu(
    x: torch.Tensor, gate_up: torch.Tensor, experts: torch.Tensor, intermediate: torch.Tensor
) -> torch.Tensor:
    """``intermediate`` [M, k, I] = silu(x @ gate.T) * (x @ up.T) of a few rows ``x`` [M, H] by their experts.

    One row at a time, so that its bits do not depend on which others chose its expert.

    Args:
        gate_up: [E, 2I, H], gate above up. experts: [M, k].
    """
    for row, chosen in enumerate(experts.tolist()):
        for slot, expert in enumerate(chosen):
            intermediate[row, slot] = _swiglu(x[row : row + 1], gate_up[expert])[0]
    return intermediate


def experts_down(
    intermediate: torch.Tensor,
    down: torch.Tensor,
    routing: Routing,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out`` [M, H] = the weighed sum of a few rows' experts (+ residual); ``out`` may be the residual.

    The sum is float32; one row at a time, see ``experts_swiglu``.

    Args:
        intermediate: [M, k, I]. down: [E, H, I].
    """
    for row, chosen in enumerate(routing.experts.tolist()):
        results = torch.cat([F.linear(intermediate[row, slot : slot + 1], down[e]) for slot, e in enumerate(chosen)])
        total = (results.float() * routing.weights[row].float().unsqueeze(1)).sum(0)
        out[row] = total if residual is None else total + residual[row]
    return out


def experts_prefill(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Both products and their weighed sum [M, H] for as many rows as there are: each expert's rows together.

    The sum is float32, in the order of the experts.
    """
    total = torch.zeros(x.shape, device=x.device, dtype=torch.float32)
    for expert in routing.experts.unique().tolist():
        rows, slots = torch.where(routing.experts == expert)
        # No name holds an expert's results: they are gone before the next one's rows are gathered.
        total.index_add_(
            0,
            rows,
            F.linear(_swiglu(x[rows], gate_up[expert]), down[expert]).float().mul_(routing.weights[rows, slots, None]),
        )
    return total.to(x.dtype)


def _swiglu(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    return F.silu(gate) * up
