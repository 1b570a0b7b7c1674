"""A mixture of experts for a prompt's rows: each expert's rows together, by grouped products of the library.

Shapes: M rows of S experts each, H wide, I wide inside. What lies between the products is at most ``SCRATCH`` for some
rows at a time, beside a slice of the experts where they are decoded; what a chunk takes is ``layout.moe``'s to say.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dflash_local.kernels import fragment_decode
from dflash_local.kernels.experts import Activation, ExpertWeight, Routing, gated
from dflash_local.kernels.fragment_packing import FragmentWeight
from dflash_local.layout.linear import DECODED_SLICE
from dflash_local.layout.moe import prefill_rows


def experts_prefill(
    x: torch.Tensor, gate_up: ExpertWeight, down: ExpertWeight, routing: Routing, activation: Activation
) -> torch.Tensor:
    """The weighed sum [M, H] of what each row's experts make of it; sums of a row are float32, by its slots."""
    out = torch.empty_like(x)
    step = prefill_rows(routing.experts.shape[1], x.shape[1], down.in_features, x.element_size())
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
    slots = routing.experts.shape[1]
    of_slot = routing.experts.flatten()
    order = torch.argsort(of_slot, stable=True)
    ends = torch.searchsorted(
        of_slot[order], torch.arange(gate_up.experts, device=x.device, dtype=torch.int32), right=True, out_int32=True
    )
    gathered = x[order // slots]
    both = grouped(gathered, gate_up, ends)
    del gathered
    inner = gated(both, gate_up, of_slot[order], activation)
    del both
    results = grouped(inner, down, ends)
    del inner
    if down.bias is not None:
        results += down.bias[of_slot[order]]
    by_slot = torch.empty_like(results)
    by_slot[order] = results
    del results
    weights = routing.weights.to(x.dtype).unsqueeze(1)
    torch.bmm(weights, by_slot.view(len(x), slots, -1), out=out.unsqueeze(1))


def grouped(x: torch.Tensor, weight: ExpertWeight, ends: torch.Tensor) -> torch.Tensor:
    """Rows [R, K], an expert's behind the other's, each times its expert's matrix: [R, N].

    Args:
        ends: [E] int32, behind the last row of each expert.
    """
    if isinstance(weight.weight, torch.Tensor):
        matrices = weight.weight.view(weight.experts, weight.out_features, weight.in_features)
        return _products(x, matrices, ends)
    out, limits = x.new_empty(len(x), weight.out_features), [0, *ends.tolist()]
    for experts, matrices in _decoded(weight, x.dtype):
        rows = slice(limits[experts.start], limits[experts.stop])
        if rows.start < rows.stop:
            out[rows] = _products(x[rows], matrices, ends[experts] - rows.start)
    return out


def _decoded(weight: ExpertWeight, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """Some experts at a time, and their matrices [n, N, K]."""
    features, columns = weight.out_features, weight.in_features
    step = max(1, DECODED_SLICE // (features * columns))
    coded = weight.weight
    room = torch.empty(min(step, weight.experts) * features, columns, device=coded.device, dtype=dtype)
    for first in range(0, weight.experts, step):
        experts = slice(first, min(first + step, weight.experts))
        rows = slice(experts.start * features, experts.stop * features)
        if isinstance(coded, FragmentWeight):
            part = fragment_decode.decode(coded, rows, room)
        else:
            part = room[: rows.stop - rows.start].copy_(weight.rows_of_all(rows, dtype))
        yield experts, part.view(-1, features, columns)


def _products(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Of rows and matrices [n, N, K], as ``grouped`` has them."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch._grouped_mm(x, matrices.transpose(1, 2), offs=ends)
    out, begin = x.new_empty(len(x), matrices.shape[1]), 0
    for matrix, end in zip(matrices, ends.tolist(), strict=True):
        if end > begin:
            torch.mm(x[begin:end], matrix.t(), out=out[begin:end])
        begin = end
    return out
