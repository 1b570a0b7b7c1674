"""PyTorch's products in place of the kernels of a mixture of experts: what they read and write, the kernels do."""

from __future__ import annotations

import torch

from dflash_local.kernels import experts
from dflash_local.kernels.expert_check import activation_of, list_of, routing_options
from dflash_local.kernels.expert_gemm import ExpertConfig, Mixture
from dflash_local.kernels.experts import ExpertWeight, Routing


def route(
    logits: torch.Tensor,
    mixture: Mixture,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    expert_list: torch.Tensor,
    bias: torch.Tensor | None = None,
    distinct: torch.Tensor | None = None,
) -> None:
    """See ``expert_gemm.route``."""
    experts.route(logits, routing_options(mixture, bias), Routing(weights, chosen))
    expert_list.copy_(list_of(chosen, mixture))
    if distinct is not None:
        distinct.fill_(int(expert_list[0]) - (mixture.shared > 0))


def listed(expert_list: torch.Tensor, mixture: Mixture, rows: int) -> torch.Tensor:
    """The experts [rows, S] that a list says."""
    found = torch.full((rows * mixture.slots,), -1, dtype=torch.int32)
    words, starts, slots = expert_list.tolist(), 1 + mixture.all_experts, 2 + 2 * mixture.all_experts
    for i in range(words[0]):
        found[words[slots + words[starts + i] : slots + words[starts + i + 1]]] = words[1 + i]
    return found.view(rows, -1)


def gate_up(
    x: torch.Tensor,
    weight: ExpertWeight,
    mixture: Mixture,
    expert_list: torch.Tensor,
    intermediate: torch.Tensor,
    config: ExpertConfig,
) -> torch.Tensor:
    """See ``expert_gemm.gate_up``."""
    taken = Routing(torch.empty(0), listed(expert_list, mixture, len(x)))
    return experts.experts_swiglu(x, weight, taken, intermediate, activation_of(mixture))


def down(
    intermediate: torch.Tensor,
    weight: ExpertWeight,
    mixture: Mixture,
    routed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    config: ExpertConfig,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``expert_gemm.down``."""
    taken = Routing(routed[0], listed(routed[2], mixture, len(out)))
    return experts.experts_down(intermediate, weight, taken, out, residual)
