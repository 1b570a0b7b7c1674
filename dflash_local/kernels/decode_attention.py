"""Attention of a few rows over a long cache whose length only the device knows.

The keys are cut in pieces, each a program's; a second launch joins them in order. A row's result depends on the cut,
never on the other rows or on its place among them. The cut is even, or fixed once for all lengths (``Pieces``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dflash_local.kernels.attention_cut import (
    FEWEST,
    LEAST,
    OCTAVE,
    PIECES,
    READS_EIGHT,
    Cut,
    card_of,
    cut_of,
    fixed_pieces,
)
from dflash_local.kernels.jit import jit, power_of_two, runs_kernels, tl
from dflash_local.kernels.place_heads import as_bytes

NARROWEST = 16  # what a tensor core takes of a head at least
JOINED = 16  # pieces that are joined at a time


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
    """Room for the pieces of one attention: sums [pieces, M, heads, width] and (largest, total) [pieces, M, heads, 2].

    One of these serves all layers, one after the other.

    Attributes:
        fixed: the cut is a function of the position alone, the pieces growing with it, so that a row's result is
            bitwise the same in any block of as many rows; otherwise it is even, and moves with ``start`` and reach.
    """

    sums: torch.Tensor
    scales: torch.Tensor
    fixed: bool = False

    @classmethod
    def for_(
        cls, rows: int, heads: int, width: int, capacity: int, device: torch.device, fixed: bool = False
    ) -> Pieces:
        """Room for caches of ``capacity`` rows."""
        count = fixed_pieces(capacity) if fixed else min(math.ceil(capacity / FEWEST), PIECES)
        return cls(
            torch.empty(count, rows, heads, width, device=device),
            torch.empty(count, rows, heads, 2, device=device),
            fixed,
        )

    def count(self, reach: int, least: int, most: int) -> int:
        """Pieces for caches that reach so far: of an even cut at most so many, of at least so many keys."""
        if self.fixed:
            return min(fixed_pieces(reach), len(self.sums))
        return max(min(math.ceil(reach / least), len(self.sums), most), 1)


def decode_attention(
    queries: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    start: torch.Tensor,
    out: torch.Tensor,
    pieces: Pieces,
    reach: int,
    sight: Sight,
    gates: torch.Tensor | None = None,
    cut: Cut | None = None,
) -> torch.Tensor:
    """Attention of rows at positions ``start ..`` over the cache, their own keys included.

    Args:
        queries: [M, heads, width]. cache: keys and values [key heads, capacity, width], of the queries' dtype or
            float8_e4m3fn, which is widened to it exactly (cards that cannot read it take NaN for 480).
        start: [1] int32 on the device. out: [M, heads * width], written. reach: no key is at or behind this.
        gates: [M, columns] whose first columns are each head's query and gate by turns; None gates nothing.
        cut: in place of the measured one.
    """
    if not runs_kernels(queries):
        return decode_attention_twin(queries, cache, start, out, sight, gates)
    rows, heads, width = queries.shape
    card = card_of(queries.device)
    keys, values = cache if card.capability >= READS_EIGHT else (as_bytes(part) for part in cache)
    key_heads = keys.shape[0]
    lines = max(power_of_two(rows * (heads // key_heads)), 16)
    room, wide = pieces.sums.shape[1], max(power_of_two(width), NARROWEST)
    see = (sight.causal, sight.window, sight.last)
    parts = (pieces.sums, pieces.scales)
    cut = cut or cut_of(lines, wide, keys.element_size(), card.shared_memory)
    count = pieces.count(reach, cut.least, cut.programs * card.processors // key_heads)
    least, shares = (LEAST, (OCTAVE, cut.step)) if pieces.fixed else (cut.least, (0, cut.step))
    sizes = (rows, room, width**-0.5, keys.shape[1], least, heads, key_heads, width, wide, lines)
    launch = {"num_warps": cut.warps, "num_stages": cut.stages}
    _attend_kernel[(key_heads, count)](queries, keys, values, start, *parts, *sizes, *shares, *see, **launch)
    gated = (out, 0) if gates is None else (gates, gates.shape[1])
    shape = (rows, room, count, least, heads, width, wide, *shares, JOINED, *see[1:], gates is not None)
    _join_kernel[(rows, heads)](*parts, start, out, *gated, *shape, num_warps=4)
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


@jit
def _piece(piece, pieces, first, end, least, OCTAVE: tl.constexpr, STEP: tl.constexpr):
    """First key and size of a piece."""
    if OCTAVE > 0:
        octave = tl.maximum(piece // OCTAVE - 1, 0)
        return ((piece - octave * OCTAVE) * least) << octave, least << octave
    else:  # not behind the return, for that would be compiled too
        low = first // STEP * STEP
        size = (end - low + pieces - 1) // pieces
        size = tl.maximum((size + STEP - 1) // STEP * STEP, least)
        return low + piece * size, piece * 0 + size


@jit
def _widened(raw, kind: tl.constexpr):
    """Numbers of a cache in the dtype of the queries; bytes are e4m3 codes."""
    if raw.dtype == tl.uint8:
        # Sign and seven bits to where float32 has its sign, exponent and mantissa: then only the exponent's bias is
        # wrong. Codes without a leading one become float32's own small numbers, which the product makes right too.
        bits = (raw.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -2014314496  # 0x87f00000
        return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(kind)  # 2 ** 120
    else:
        return raw.to(kind)


# fmt: off
@jit
def _attend_kernel(
    queries, keys, values, start, sums, scales, rows, room, scale, capacity, least, HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr, width: tl.constexpr, WIDTH: tl.constexpr, LINES: tl.constexpr, OCTAVE: tl.constexpr,
    STEP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, LAST: tl.constexpr,
):
    # fmt: on
    key_head = tl.program_id(0)
    pieces = tl.num_programs(1)
    piece = pieces - 1 - tl.program_id(1)  # of a fixed cut the largest first
    begin = tl.load(start)
    end = begin + rows
    first = _first_key(begin, WINDOW, LAST)
    low, size = _piece(piece, pieces, first, end, least, OCTAVE, STEP)
    if low >= end or low + size <= first:
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
    kind = queries.dtype.element_ty
    largest = tl.full((LINES,), -1e30, tl.float32)
    total = tl.zeros((LINES,), tl.float32)
    summed = tl.zeros((LINES, WIDTH), tl.float32)
    position = begin + row
    step = tl.arange(0, STEP)
    rows_of_head = key_head.to(tl.int64) * capacity
    for offset in range(low, tl.minimum(low + size, end), STEP):
        key = offset + step
        here = key < end
        if LAST > 0:
            here = here & (key >= begin - LAST)
        place = rows_of_head + key
        k = tl.load(keys + place[None, :] * width + at[:, None], mask=here[None, :] & wide[:, None], other=0.0)
        score = tl.dot(query, _widened(k, kind), input_precision="ieee") * scale
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
        v = tl.load(values + place[:, None] * width + at[None, :], mask=here[:, None] & wide[None, :], other=0.0)
        summed = summed * shrink[:, None] + tl.dot(weight.to(kind), _widened(v, kind), input_precision="ieee")
        largest = top
    part = (piece * room + row) * HEADS + head
    tl.store(sums + part[:, None] * width + at[None, :], summed, mask=inside[:, None] & wide[None, :])
    tl.store(scales + part * 2, largest, mask=inside)
    tl.store(scales + part * 2 + 1, total, mask=inside)


# fmt: off
@jit
def _join_kernel(
    sums, scales, start, out, gates, columns, rows, room, pieces, least, HEADS: tl.constexpr, width: tl.constexpr,
    WIDTH: tl.constexpr, OCTAVE: tl.constexpr, STEP: tl.constexpr, JOINED: tl.constexpr,
    WINDOW: tl.constexpr, LAST: tl.constexpr, GATED: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.arange(0, WIDTH)
    wide = at < width
    begin = tl.load(start)
    end = begin + rows
    first = _first_key(begin, WINDOW, LAST)
    largest = -1e30
    total = 0.0
    summed = tl.zeros((WIDTH,), tl.float32)
    for offset in range(0, pieces, JOINED):
        piece = offset + tl.arange(0, JOINED)
        low, size = _piece(piece, pieces, first, end, least, OCTAVE, STEP)
        # Pieces that nothing was written for, and those that this row saw nothing of, add exact zeros.
        there = (piece < pieces) & (low < end) & (low + size > first)
        part = (piece * room + row) * HEADS + head
        top = tl.load(scales + part * 2, mask=there, other=-1e30)
        next_top = tl.maximum(largest, tl.max(top, 0))
        old = tl.exp(largest - next_top)
        new = tl.where(there, tl.exp(top - next_top), 0.0)
        portion = tl.load(sums + part[:, None] * width + at[None, :], mask=there[:, None] & wide[None, :], other=0.0)
        summed = summed * old + tl.sum(portion * new[:, None], 0)
        total = total * old + tl.sum(tl.load(scales + part * 2 + 1, mask=there, other=0.0) * new, 0)
        largest = next_top
    kind = out.dtype.element_ty
    result = (summed / total).to(kind)
    if GATED:
        gate = tl.load(gates + row * columns + (2 * head + 1) * width + at, mask=wide, other=0.0).to(tl.float32)
        opened = (1.0 / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
        result = (result.to(tl.float32) * opened).to(kind)
    tl.store(out + (row * HEADS + head) * width + at, result, mask=wide)
