"""Each routed expert of a loaded layer by itself against transformers' of the same layer.

A fault of one expert shows in the few rows that choose it, as few as a router's near-tie sends elsewhere; here every
expert is given rows, and no router has a say.
"""

from __future__ import annotations

import torch

from dflash_local.check.streamed_reference import StreamedReference
from dflash_local.kernels.experts import Routing
from dflash_local.models.fused.moe import MoE
from dflash_local.models.fused.target import FusedTarget

ROWS, SHARE = 4, 0.75  # of each expert; of its rows' errors, the one that counts


def expert_errors(
    target: FusedTarget, index: int, mixed: torch.Tensor, reference: StreamedReference, rounding: float
) -> torch.Tensor | None:
    """Relative errors [E] of a layer's routed experts, infinite where a number is not finite; None where it has none.

    While ``reference.layer`` has the layer's tensors.

    Args:
        mixed: [M, H], the residual stream behind the layer's mixer, whose rows the experts take by turns.
        rounding: of the rows' usual size, what may be off in rows that an expert makes little of.
    """
    layer = target.layers[index]
    if not isinstance(layer.mlp, MoE):
        return None
    count = layer.mlp.weights.config.num_experts
    experts = torch.arange(count, device=mixed.device, dtype=torch.int32).repeat_interleave(ROWS)
    rows = layer.mlp_input(mixed, torch.empty_like(mixed))[torch.arange(len(experts), device=mixed.device) % len(mixed)]
    alone = Routing(torch.ones(len(experts), 1, device=mixed.device), experts[:, None])
    wanted = reference.experts(index, rows, experts)
    found = layer.mlp.prefill_routed(rows, alone).to(wanted.device)
    usual = wanted.float().norm(dim=1).median()
    errors = row_errors(found, wanted, usual * rounding).view(count, ROWS)
    return torch.where(errors.isfinite().all(1), errors.quantile(SHARE, 1), torch.inf)


def row_errors(found: torch.Tensor, wanted: torch.Tensor, floor: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Relative error [M] of rows [M, N], float32. ``floor``, [M] or one for all, is added to the norm of ``wanted``."""
    wanted = wanted.float()
    size = wanted.norm(dim=1) + floor
    return (found.float() - wanted).norm(dim=1) / size.clamp(min=torch.finfo(torch.float32).tiny)
