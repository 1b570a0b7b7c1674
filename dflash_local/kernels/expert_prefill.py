"""A mixture of experts for a prompt's rows: each expert's rows together, by grouped products of the library.

M rows of S experts each, R = M * S, H wide, I wide inside. ``layout.moe`` says how many rows are taken at a time, and
what they take; beside it coded experts are decoded a slice at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from dflash_local.kernels import fragment_decode
from dflash_local.kernels.experts import Activation, ExpertWeight, Routing, gated
from dflash_local.kernels.fragment_packing import FragmentWeight
from dflash_local.layout.linear import DECODED_SLICE
from dflash_local.layout.moe import prefill_rows


class Groups(NamedTuple):
    """Rows by experts. ``experts``: [R] int32, ascending. ``ends``: [E] int32, behind each expert's last row."""

    experts: torch.Tensor
    ends: torch.Tensor


def experts_prefill(
    x: torch.Tensor, gate_up: ExpertWeight, down: ExpertWeight, routing: Routing, activation: Activation
) -> torch.Tensor:
    """Return the weighed sum [M, H] of what each row's experts make of it, in the order of its slots."""
    out = torch.empty_like(x)
    biased = gate_up.bias is not None
    step = prefill_rows(routing.experts.shape[1], x.shape[1], down.in_features, x.element_size(), biased)
    for begin in range(0, len(x), step):
        rows = slice(begin, begin + step)
        _some_rows(x[rows], gate_up, down, Routing(*(each[rows] for each in routing)), activation, out[rows])
    return out


def _some_rows(
    x: torch.Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    routing: Routing,
    activation: Activation,
    out: torch.Tensor,
) -> None:
    slots, of_slot = routing.experts.shape[1], routing.experts.flatten()
    order = torch.argsort(of_slot, stable=True)
    by_expert = of_slot[order]
    every = torch.arange(gate_up.experts, device=x.device, dtype=torch.int32)
    groups = Groups(by_expert, torch.searchsorted(by_expert, every, right=True, out_int32=True))
    gathered = x[order // slots]
    both = grouped(gathered, gate_up, groups)
    del gathered  # no name holds what is not needed any more
    inner = gated(both, activation)
    del both
    results = grouped(inner, down, groups)
    del inner
    by_slot = torch.empty_like(results)
    by_slot[order] = results
    del results
    weights = routing.weights.to(x.dtype).unsqueeze(1)
    torch.bmm(weights, by_slot.view(len(x), slots, -1), out=out.unsqueeze(1))


def grouped(x: torch.Tensor, weight: ExpertWeight, groups: Groups) -> torch.Tensor:
    """Return rows [R, K], an expert's behind the other's, each times its expert's matrix (+ its bias): [R, N]."""
    coded = weight.weight
    if isinstance(coded, torch.Tensor):
        out = _products(x, coded.view(weight.experts, weight.out_features, weight.in_features), groups.ends)
    elif isinstance(coded, FragmentWeight) and x.is_cuda and x.dtype == torch.bfloat16:
        out = _decoded_products(x, weight, coded, groups.ends)
    else:
        return _by_expert(x, weight, groups.ends)
    if weight.bias is not None:
        out += weight.bias[groups.experts]
    return out


def _by_expert(x: torch.Tensor, weight: ExpertWeight, ends: torch.Tensor) -> torch.Tensor:
    """Multiply by one expert after the other, little of which is decoded at a time."""
    out, begin = x.new_empty(len(x), weight.out_features), 0
    for expert, end in enumerate(ends.tolist()):
        if begin < end:
            weight.product(x[begin:end], expert, out[begin:end])
        begin = end
    return out


def _decoded_products(x: torch.Tensor, weight: ExpertWeight, coded: FragmentWeight, ends: torch.Tensor) -> torch.Tensor:
    """Multiply without the bias; experts that nobody takes are not decoded, and the host reads which."""
    out, limits = x.new_empty(len(x), weight.out_features), [0, *ends.tolist()]
    step = max(1, DECODED_SLICE // (weight.out_features * weight.in_features))  # experts that are decoded at a time
    for first in range(0, weight.experts, step):
        experts = slice(first, min(first + step, weight.experts))
        begin, end = limits[experts.start], limits[experts.stop]
        if begin < end:
            matrices = _decoded(weight, coded, experts, x.dtype)
            out[begin:end] = _products(x[begin:end], matrices, ends[experts] - begin)
            del matrices
    return out


def _decoded(weight: ExpertWeight, coded: FragmentWeight, experts: slice, dtype: torch.dtype) -> torch.Tensor:
    rows = slice(experts.start * weight.out_features, experts.stop * weight.out_features)
    room = torch.empty(rows.stop - rows.start, weight.in_features, device=coded.device, dtype=dtype)
    return fragment_decode.decode(coded, rows, room).view(-1, weight.out_features, weight.in_features)


def _products(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply rows with matrices [n, N, K], by where each matrix's rows end."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return F.grouped_mm(x, matrices.transpose(1, 2), offs=ends)
    out, begin = x.new_empty(len(x), matrices.shape[1]), 0
    for matrix, end in zip(matrices, ends.tolist(), strict=True):
        if end > begin:
            torch.mm(x[begin:end], matrix.t(), out=out[begin:end])
        begin = end
    return out
