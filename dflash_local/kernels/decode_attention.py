"""Attention of a few rows over a long cache whose length only the device knows.

Split over the keys in pieces, each a program; a second launch joins the pieces in order. A row's result depends on
the size of a piece, which follows from the reach, and not on the other rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from dflash_local.kernels.jit import jit, power_of_two, runs_kernels, tl

SPLIT = 128  # keys of one program, at least
PIECES = 64  # about so many pieces keep a large GPU busy; more would only be more to join
STEP = 32  # keys at a time
ROOMY = 140 * 1024  # bytes of shared memory that the widest heads take at that step
NOTHING = -1e30


@dataclass(frozen=True, slots=True)
class Sight:
    """Which keys a block's rows see: ``start`` committed rows, and the block behind them.

    Attributes:
        causal: a row is blind to later rows of the block. window: keys a row sees including its own, the distance
            counted in both directions; 0 is all. last: only so many committed rows count; 0 is all.
    """

    causal: bool = True
    window: int = 0
    last: int = 0


@dataclass(frozen=True, slots=True)
class Pieces:
    """Room for the pieces of one attention: sums [splits, M, heads, width] and (largest, total) [splits, M, heads, 2].

    One of these serves all layers, one after the other.
    """

    sums: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def for_(cls, rows: int, heads: int, width: int, capacity: int, device: torch.device) -> Pieces:
        """Room for caches of ``capacity`` rows."""
        splits = max(math.ceil(reach / split_of(reach)) for reach in (capacity, min(capacity, SPLIT * PIECES)))
        return cls(
            torch.empty(splits, rows, heads, width, device=device), torch.empty(splits, rows, heads, 2, device=device)
        )


def split_of(reach: int) -> int:
    """Keys of one program for caches that reach so far: a power of two, so that few reaches differ."""
    return max(SPLIT, power_of_two(reach) // PIECES)


def step_of(lines: int, width: int, shared_memory: int) -> int:
    """Keys at a time: fewer for many lines of wide heads on a card with little shared memory (bytes a program)."""
    return STEP if lines * width <= 64 * 256 or shared_memory >= ROOMY else STEP // 2


@cache
def _shared_memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def decode_attention(
    queries: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    start: torch.Tensor,
    out: torch.Tensor,
    pieces: Pieces,
    reach: int,
    sight: Sight,
    gates: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of rows at positions ``start ..`` over the cache, their own keys included.

    Args:
        queries: [M, heads, width]. cache: keys and values [key heads, capacity, width].
        start: [1] int32 on the device. out: [M, heads * width], written. reach: no key is at or behind this.
        gates: [M, columns] whose first columns are each head's query and gate by turns; None gates nothing.
    """
    if not runs_kernels(queries):
        return decode_attention_twin(queries, cache, start, out, sight, gates)
    rows, heads, width = queries.shape
    keys, values = cache
    key_heads, split = keys.shape[0], split_of(reach)
    lines = max(power_of_two(rows * (heads // key_heads)), 16)
    room, wide = pieces.sums.shape[1], power_of_two(width)
    see = (sight.causal, sight.window, sight.last)
    parts = (pieces.sums, pieces.scales)
    step = step_of(lines, wide, _shared_memory(queries.device))
    sizes = (rows, room, width**-0.5, keys.shape[1], heads, key_heads, width, wide, lines, split, step)
    grid = (key_heads, math.ceil(reach / split))
    _attend_kernel[grid](queries, keys, values, start, *parts, *sizes, *see, num_warps=4, num_stages=2)
    gated = (out, 0) if gates is None else (gates, gates.shape[1])
    shape = (rows, room, heads, width, wide, split, *see[1:], gates is not None)
    _join_kernel[(rows, heads)](*parts, start, out, *gated, *shape, num_warps=1)
    return out


def decode_attention_twin(
    queries: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    start: torch.Tensor,
    out: torch.Tensor,
    sight: Sight,
    gates: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain PyTorch, in float32."""
    rows, heads, width = queries.shape
    end = int(start) + rows
    keys, values = (part[:, :end].float().repeat_interleave(heads // part.shape[0], 0) for part in cache)
    scores = torch.einsum("mhd,hkd->hmk", queries.float(), keys) * width**-0.5
    at = torch.arange(int(start), end, device=out.device).unsqueeze(1)
    key = torch.arange(end, device=out.device).unsqueeze(0)
    hidden = torch.zeros_like(key > at)
    if sight.causal:
        hidden |= key > at
    if sight.window:
        hidden |= (at - key).abs() >= sight.window
    if sight.last:
        hidden |= key < int(start) - sight.last
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    attended = torch.einsum("hmk,hkd->mhd", weights, values).to(out.dtype)
    if gates is not None:
        attended = attended * gates[:, : heads * 2 * width].view(rows, heads, 2, width)[:, :, 1].sigmoid()
    return out.copy_(attended.reshape(rows, -1))


@jit
def _first_key(start, WINDOW: tl.constexpr, LAST: tl.constexpr):
    first = start * 0
    if WINDOW > 0:
        first = tl.maximum(first, start - WINDOW + 1)
    if LAST > 0:
        first = tl.maximum(first, start - LAST)
    return first


# fmt: off
@jit
def _attend_kernel(
    queries, keys, values, start, sums, scales, rows, room, scale, capacity, HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr, width: tl.constexpr, WIDTH: tl.constexpr, LINES: tl.constexpr, SPLIT: tl.constexpr,
    STEP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, LAST: tl.constexpr,
):
    # fmt: on
    key_head = tl.program_id(0)
    piece = tl.program_id(1)
    begin = tl.load(start)
    end = begin + rows
    low = piece * SPLIT
    if low >= end or low + SPLIT <= _first_key(begin, WINDOW, LAST):
        return
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    line = tl.arange(0, LINES)  # the query heads of one key head, row by row
    row = line // GROUP
    head = key_head * GROUP + line % GROUP
    inside = row < rows
    at = tl.arange(0, WIDTH)
    wide = at < width
    query = tl.load(
        queries + (row * HEADS + head)[:, None] * width + at[None, :],
        mask=inside[:, None] & wide[None, :],
        other=0.0,
    )
    largest = tl.full((LINES,), -1e30, tl.float32)
    total = tl.zeros((LINES,), tl.float32)
    summed = tl.zeros((LINES, WIDTH), tl.float32)
    position = begin + row
    step = tl.arange(0, STEP)
    rows_of_head = key_head.to(tl.int64) * capacity
    for offset in range(0, SPLIT, STEP):
        key = low + offset + step
        here = key < end
        if LAST > 0:
            here = here & (key >= begin - LAST)
        k = tl.load(
            keys + (rows_of_head + key)[None, :] * width + at[:, None], mask=here[None, :] & wide[:, None], other=0.0
        )
        score = tl.dot(query, k, input_precision="ieee") * scale
        seen = here[None, :] & inside[:, None]
        if CAUSAL:
            seen = seen & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            distance = position[:, None] - key[None, :]
            seen = seen & (distance < WINDOW) & (-distance < WINDOW)
        score = tl.where(seen, score, -1e30)
        top = tl.maximum(largest, tl.max(score, 1))
        weight = tl.where(seen, tl.exp(score - top[:, None]), 0.0)
        shrink = tl.exp(largest - top)
        total = total * shrink + tl.sum(weight, 1)
        v = tl.load(
            values + (rows_of_head + key)[:, None] * width + at[None, :], mask=here[:, None] & wide[None, :], other=0.0
        )
        summed = summed * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        largest = top
    place = (piece * room + row) * HEADS + head
    tl.store(sums + place[:, None] * width + at[None, :], summed, mask=inside[:, None] & wide[None, :])
    tl.store(scales + place * 2, largest, mask=inside)
    tl.store(scales + place * 2 + 1, total, mask=inside)


# fmt: off
@jit
def _join_kernel(
    sums, scales, start, out, gates, columns, rows, room, HEADS: tl.constexpr, width: tl.constexpr, WIDTH: tl.constexpr,
    SPLIT: tl.constexpr, WINDOW: tl.constexpr, LAST: tl.constexpr, GATED: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.arange(0, WIDTH)
    wide = at < width
    begin = tl.load(start)
    first = _first_key(begin, WINDOW, LAST) // SPLIT
    pieces = (begin + rows + SPLIT - 1) // SPLIT
    largest = -1e30
    total = 0.0
    summed = tl.zeros((WIDTH,), tl.float32)
    for piece in range(first, pieces):
        place = (piece * room + row) * HEADS + head
        top = tl.load(scales + place * 2)
        part = tl.load(sums + place * width + at, mask=wide, other=0.0)
        next_top = tl.maximum(largest, top)
        old = tl.exp(largest - next_top)
        new = tl.exp(top - next_top)
        summed = summed * old + part * new
        total = total * old + tl.load(scales + place * 2 + 1) * new
        largest = next_top
    kind = out.dtype.element_ty
    result = (summed / total).to(kind)
    if GATED:
        gate = tl.load(gates + row * columns + (2 * head + 1) * width + at, mask=wide, other=0.0).to(tl.float32)
        opened = (1.0 / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
        result = (result.to(tl.float32) * opened).to(kind)
    tl.store(out + (row * HEADS + head) * width + at, result, mask=wide)
