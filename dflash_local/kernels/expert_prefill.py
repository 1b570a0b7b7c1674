"""A mixture of experts for a prompt's rows: the rows of each expert together, multiplied tile by tile.

M rows of S experts each, R = M * S, E experts, H wide, I wide inside. Nothing waits for the host: which tiles there
are only the device knows. Coded experts are decoded some at a time (``layout.moe.experts_at_once``), before each of the
two products; ``layout.moe`` also says how many rows are taken at a time, and what they take.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from dflash_local.config.features import ClampedSwiGLU
from dflash_local.kernels import fragment_decode
from dflash_local.kernels.experts import Activation, ExpertWeight, Routing, gated
from dflash_local.kernels.fragment_packing import FragmentWeight
from dflash_local.kernels.jit import jit, power_of_two, runs_kernels, tl
from dflash_local.kernels.skinny_gemm import RESERVED_SHARED_MEMORY
from dflash_local.kernels.split_kv import device_properties
from dflash_local.layout.moe import experts_at_once, rows_at_once

SUM_BLOCK = 1024  # columns of a program that sums a row's results


class Groups(NamedTuple):
    """Slots by experts.

    Attributes:
        order: [R], the slots of the first expert, then of the next. begins: [E + 1] int32, where each expert's begin in
            it, and R. tile_begins: [E + 1] int32, the same of tiles of ``block_m`` slots.
    """

    order: torch.Tensor
    begins: torch.Tensor
    tile_begins: torch.Tensor
    block_m: int

    @classmethod
    def of(cls, experts: torch.Tensor, count: int) -> Groups:
        """Group slots [R] by their experts, ``count`` in all."""
        block_m = 64 if len(experts) < FEW_ROWS * count else 128
        every = torch.arange(count + 1, device=experts.device, dtype=torch.int32)
        by_expert, order = torch.sort(experts, stable=True)
        begins = torch.searchsorted(by_expert, every, out_int32=True)
        tile_begins = torch.zeros_like(begins)
        torch.cumsum((begins.diff() + (block_m - 1)) // block_m, 0, dtype=torch.int32, out=tile_begins[1:])
        return cls(order, begins, tile_begins, block_m)


class TileConfig(NamedTuple):
    """A program's features, of a pair those of either half, and how it is launched."""

    block_n: int
    num_warps: int
    num_stages: int


FEW_ROWS = 96  # of an expert in the mean, below which half a tile of 128 would stay empty
BLOCK_K = 64  # numbers of a step along K
WIDTHS = ((256, 8), (128, 4))  # features of a tile, and its warps


def tile_config(block_m: int, paired: bool, shared_memory: int) -> TileConfig:
    """Return the widest tile of bfloat16 numbers with at least three steps in the shared memory."""
    room = shared_memory - RESERVED_SHARED_MEMORY
    stages = {width: room // ((block_m + width) * BLOCK_K * 2) for width, _ in WIDTHS}
    width, num_warps = next((each for each in WIDTHS if stages[each[0]] >= 3), WIDTHS[-1])
    return TileConfig(width // (1 + paired), num_warps, max(2, min(4, stages[width])))


def experts_prefill(
    x: torch.Tensor, gate_up: ExpertWeight, down: ExpertWeight, routing: Routing, activation: Activation
) -> torch.Tensor:
    """Return the weighed sum [M, H] of what each row's experts make of it, in the order of its slots."""
    out = torch.empty_like(x)
    step = rows_at_once(len(x), routing.experts.shape[1], x.shape[1], down.in_features, x.element_size())
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
    groups = Groups.of(routing.experts.flatten(), gate_up.experts)
    if _takes(x, gate_up) and _takes(x, down):
        inner = _products(x, gate_up, groups, activation)
        results = _products(inner, down, groups, None)
    else:
        results = _results(x, gate_up, down, groups, activation)
    weighed_sum(results, routing.weights, out)


def _takes(x: torch.Tensor, weight: ExpertWeight) -> bool:
    return runs_kernels(x) and x.dtype == torch.bfloat16 and isinstance(weight.weight, torch.Tensor | FragmentWeight)


def _results(
    x: torch.Tensor, gate_up: ExpertWeight, down: ExpertWeight, groups: Groups, activation: Activation
) -> torch.Tensor:
    """Return each slot's result [R, H] in plain PyTorch, one expert after the other."""
    slots, begins = len(groups.order) // len(x), groups.begins.tolist()
    results = x.new_empty(len(groups.order), down.out_features)
    for expert in range(gate_up.experts):
        taken = groups.order[begins[expert] : begins[expert + 1]]
        if len(taken):
            inner = gated(gate_up.product(x[taken // slots], expert), activation)
            results[taken] = down.product(inner, expert)
    return results


def _products(x: torch.Tensor, weight: ExpertWeight, groups: Groups, activation: Activation | None) -> torch.Tensor:
    """Multiply each expert's rows with its matrix (+ its bias).

    With an activation of the rows ``x`` [M, H], by slot, gate and up, gated: [R, I] as ``groups`` are ordered. Without
    one of rows [R, I] in that order: [R, H], as the slots are ordered.
    """
    paired, taken = activation is not None, len(groups.order)
    features = weight.out_features // (1 + paired)
    out = x.new_empty(taken, features)
    config = tile_config(groups.block_m, paired, device_properties(x.device).shared_memory)
    clamped = activation if isinstance(activation, ClampedSwiGLU) else ClampedSwiGLU(0.0, 0.0)
    for experts, matrices in _matrices(weight, groups, x.dtype):
        most = taken // groups.block_m + experts.stop - experts.start
        _products_kernel[(most, -(-features // config.block_n))](
            x, matrices, matrices if weight.bias is None else weight.bias, groups.order, groups.begins,
            groups.tile_begins, out, experts.start, experts.stop, taken // len(x), features, weight.in_features,
            clamped.alpha, clamped.limit, power_of_two(weight.experts), weight.experts, groups.block_m, config.block_n,
            BLOCK_K, weight.in_features % BLOCK_K == 0, paired, isinstance(activation, ClampedSwiGLU),
            weight.bias is not None, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return out


def _matrices(weight: ExpertWeight, groups: Groups, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield experts with their matrices [n * N, K]: all of them, or some whose codes lie decoded until the next."""
    coded, count = weight.weight, weight.experts
    if isinstance(coded, torch.Tensor):
        yield slice(0, count), coded
        return
    assert isinstance(coded, FragmentWeight)
    rows, in_features = weight.out_features, weight.in_features
    step = experts_at_once(count, rows, in_features, len(groups.order))
    room = torch.empty(step * rows, in_features, device=coded.device, dtype=dtype)
    for first in range(0, count, step):
        experts = slice(first, min(first + step, count))
        fragment_decode.decode(coded, slice(first * rows, experts.stop * rows), room, taken=groups.begins)
        yield experts, room


def weighed_sum(results: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Compute ``out`` [M, H]: the sum of a row's results [M * S, H] by their weights [M, S], rounded to its dtype."""
    rows, slots = weights.shape
    if not runs_kernels(out):
        return torch.bmm(weights.to(out.dtype).unsqueeze(1), results.view(rows, slots, -1), out=out.unsqueeze(1))[:, 0]
    width = out.shape[1]
    _weighed_sum_kernel[(rows, -(-width // SUM_BLOCK))](results, weights, out, slots, width, SUM_BLOCK, num_warps=4)
    return out


# fmt: off
@jit(do_not_specialize=("first", "stop"))
def _products_kernel(
    x, matrices, bias, order, begins, tile_begins, out, first, stop, slots, features, in_features, alpha, limit,
    BLOCK_E: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, PAIRED: tl.constexpr, CLAMPED: tl.constexpr, BIASED: tl.constexpr,
):
    # fmt: on
    # One program: BLOCK_M rows of an expert, BLOCK_N of its features, of a pair those of either half. Both operands are
    # streamed along K; the sums [BLOCK_M, BLOCK_N] stay in registers. Tiles of one expert follow each other, and so the
    # matrix is read once. A program behind the last tile ends at once: how many there are the host does not know.
    tile = tl.load(tile_begins + first) + tl.program_id(0)
    if tile >= tl.load(tile_begins + stop):
        return
    each = tl.arange(0, BLOCK_E)
    expert = tl.sum((tl.load(tile_begins + 1 + each, mask=each < EXPERTS, other=2147483647) <= tile).to(tl.int32), 0)
    end = tl.load(begins + expert + 1)
    at = tl.load(begins + expert) + (tile - tl.load(tile_begins + expert)) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = at < end
    at = tl.minimum(at, end - 1)
    slot = tl.load(order + at)
    source = slot // slots if PAIRED else at.to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = n < features
    feature = tl.minimum(n, features - 1)
    k = tl.arange(0, BLOCK_K)
    left = x + source[:, None] * in_features + k[None, :]
    rows_of_expert = features * (2 if PAIRED else 1)
    row = (expert - first).to(tl.int64) * rows_of_expert + feature
    right = matrices + row[None, :] * in_features + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    ups = right + features.to(tl.int64) * in_features
    up = total
    for step in range(0, in_features, BLOCK_K):
        if EVEN_K:
            part = tl.load(left + step)
            total = tl.dot(part, tl.load(right + step), total)
            if PAIRED:
                up = tl.dot(part, tl.load(ups + step), up)
        else:
            there = k < in_features - step
            part = tl.load(left + step, mask=there[None, :], other=0.0)
            total = tl.dot(part, tl.load(right + step, mask=there[:, None], other=0.0), total)
            if PAIRED:
                up = tl.dot(part, tl.load(ups + step, mask=there[:, None], other=0.0), up)
    kind = out.dtype.element_ty
    if BIASED:
        biases = bias + expert * rows_of_expert + feature
        total += tl.load(biases).to(tl.float32)[None, :]
        if PAIRED:
            up += tl.load(biases + features).to(tl.float32)[None, :]
    total = total.to(kind).to(tl.float32)  # as the product of a layer is rounded
    if PAIRED:
        up = up.to(kind).to(tl.float32)
        if CLAMPED:
            total = tl.minimum(total, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
            total = total / (1.0 + tl.exp(-total * alpha))
        else:
            total = total / (1.0 + tl.exp(-total))
        total *= up
        place = at.to(tl.int64)
    else:
        place = slot
    tl.store(
        out + place[:, None] * features + n[None, :], total.to(kind), mask=inside[:, None] & real[None, :]
    )


@jit
def _weighed_sum_kernel(results, weights, out, slots, width, BLOCK: tl.constexpr):
    # One program: BLOCK columns of a row; its results are added in the order of the slots.
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    kind = out.dtype.element_ty
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in range(slots):
        weight = tl.load(weights + row * slots + slot).to(kind).to(tl.float32)
        place = results + (row * slots + slot) * width + column
        total += weight * tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, total.to(kind), mask=inside)
