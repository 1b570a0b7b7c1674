"""Are a mixture's products right: of one layer of each kind every expert, against float32 over the decoded weights.

Experts take each a Gaussian row, one with an outlier, a one-hot row and one of zeros, few at a time as in blocks and
all at once as in prompts. Given logits route the rows: no router is tried. Letters as in ``kernels.experts``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from dflash_local.check.product_error import DEVIATIONS, RESULT_ERROR, TERM_ERROR, Tried, gated_bound, row_ratios
from dflash_local.kernels.experts import ExpertWeight, Routing
from dflash_local.kernels.product_check import KINDS_OF_ROWS, mixed_rows
from dflash_local.kernels.skinny_gemm import MAX_ROWS
from dflash_local.models.fused.formats import form_of
from dflash_local.models.fused.moe import MoE
from dflash_local.models.fused.target import FusedTarget

FAVOUR, STEP = 32.0, 0.125  # logits of a row's experts, of which each has less than the one before; others have 0
ROUTING_ERROR = 2**-7  # of a row's weights, which are rounded to the logits' dtype


class _Reference(NamedTuple):
    """What rows [M, H] become in float32, and what rounding explains of an error: two [M, H]."""

    want: torch.Tensor
    bound: torch.Tensor


def try_experts(target: FusedTarget) -> Iterator[Tried]:
    """Two of each kind of mixture: with a block's rows at a time, with a prompt's. EngineError: a kernel faulted."""
    kinds: dict[object, MoE] = {}
    for part in target.mixtures:
        kinds.setdefault(_kind(part), part)
    for part in kinds.values():
        yield from try_mixture(part, target.rows)


def _kind(part: MoE) -> object:
    """Equal for layers whose experts are multiplied alike."""
    weights = part.weights
    forms = ((form_of(each.weight), each.weight.shape, each.bias is None) for each in weights.experts.matrices)
    return weights.mixture, weights.config.activation, *forms


@torch.inference_mode()
def try_mixture(part: MoE, rows: int) -> Iterator[Tried]:
    """Of one layer, ``rows`` of a block at a time and all of them together."""
    x, logits = _rows(part), _logits(part)
    routing = part.routing(logits)
    reference = decoded_mixture(part, x, routing)
    blocks = zip(x.split(rows), logits.split(rows))
    few = torch.cat([part.routed(block, given, torch.empty_like(block)) for block, given in blocks])
    yield Tried(_name(part), min(rows, len(x)), _error(few, reference))
    yield Tried(_name(part), len(x), _error(part.prefill_routed(x, routing), reference))


def _error(got: torch.Tensor, reference: _Reference) -> float:
    return float(row_ratios(got, *reference).max())


def _name(part: MoE) -> str:
    """As in ``8 experts, 2 a row, Fp4Weight (32, 16) and (16, 32)``."""
    matrices, mixture = part.weights.experts.matrices, part.weights.mixture
    types: Sequence[str] = list(dict.fromkeys(type(each.weight).__name__ for each in matrices))
    shapes = " and ".join(str((each.out_features, each.in_features)) for each in matrices)
    return f"{mixture.all_experts} experts, {mixture.top_k + bool(mixture.shared)} a row, {'/'.join(types)} {shapes}"


def _groups(part: MoE) -> int:
    """As many as have every expert in one at least, of ``top_k`` experts each; more rows than few-row kernels take."""
    mixture = part.weights.mixture
    return max(-(-mixture.experts // mixture.top_k), MAX_ROWS // KINDS_OF_ROWS + 1)


def _rows(part: MoE) -> torch.Tensor:
    """[M, H]: one after the other the kinds of rows of each group of experts; one-hot rows all over H."""
    gate_up, groups = part.weights.experts.gate_up, _groups(part)
    x = mixed_rows(KINDS_OF_ROWS * groups, gate_up.in_features, gate_up.weight.device)
    one_hot = ((x != 0).sum(1) == 1).nonzero()[:, 0]
    x[one_hot] = 0
    x[one_hot, torch.linspace(0, gate_up.in_features - 1, len(one_hot), device=x.device).long()] = 1
    return x.to(gate_up.weight.dtype)


def _logits(part: MoE) -> torch.Tensor:
    """[M, E], or [M, E + 1] with a shared expert's gate, by which the rows of a group take its experts."""
    mixture, groups = part.weights.mixture, _groups(part)
    device = part.weights.experts.device
    rows, slots = (torch.arange(count, device=device) for count in (KINDS_OF_ROWS * groups, mixture.top_k))
    chosen = (rows[:, None] // KINDS_OF_ROWS * mixture.top_k + slots) % mixture.experts
    logits = torch.zeros(len(rows), mixture.experts + part.weights.config.shared_gate, device=device)
    logits.scatter_(1, chosen, (FAVOUR - STEP * slots).expand(len(rows), -1))
    return logits.to(part.weights.experts.gate_up.weight.dtype)


def decoded_mixture(part: MoE, x: torch.Tensor, routing: Routing) -> _Reference:
    """Of rows ``x`` [M, H], an expert after the other decoded; nothing bounds rows whose inner numbers overflow."""
    gate_up, down = part.weights.experts.matrices
    want, bound = (torch.zeros_like(x, dtype=torch.float32) for _ in range(2))
    for expert in range(gate_up.experts):
        row, slot = (routing.experts == expert).nonzero(as_tuple=True)
        if len(row):
            both = _product(x[row].float(), gate_up, expert)
            inner = gated_bound(*both, part.weights.config.activation)
            result, error = _product(inner[0], down, expert, inner[1])
            error[torch.cat((both[0], inner[0]), 1).abs().amax(1) > torch.finfo(x.dtype).max] = torch.inf
            share = routing.weights[row, slot, None]
            want.index_add_(0, row, share * result)
            bound.index_add_(0, row, share * (error + ROUTING_ERROR * result.abs()))
    return _Reference(want, bound + RESULT_ERROR * want.abs())


def _product(
    x: torch.Tensor, weight: ExpertWeight, expert: int, errors: torch.Tensor | float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` [M, K], off by ``errors``, times an expert's matrix (+ bias), and what rounding explains: two [M, N]."""
    matrix = weight.rows(expert, slice(0, weight.out_features), torch.float32).float()
    result = x @ matrix.t() + (0.0 if weight.bias is None else weight.bias[expert].float())
    single = (x != 0).sum(1, keepdim=True) <= 1  # a single term is rounded once, by no more than the rest of its error
    terms = TERM_ERROR * torch.where(single, 1, DEVIATIONS) * x
    spread = ((terms.square() + errors**2) @ matrix.square().t()).sqrt()
    return result, spread + RESULT_ERROR * result.abs()
