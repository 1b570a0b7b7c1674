"""Attention of a few rows over a long KV cache whose length only the device knows: split-KV, two launches.

The first attends over the splits of the cache, a program for each; the second combines partial results in order. A
row's result depends on the splits, never on other rows; splits are even, or fixed for all lengths (``SplitKV``).
Over int8 codes Hopper has a first launch of its own (``attend_codes``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dflash_local.kernels import attend_codes
from dflash_local.kernels.allocate import Tensors
from dflash_local.kernels.jit import (
    jit,
    power_of_two,
    runs_kernels,
    start_next_kernel,
    tl,
)
from dflash_local.kernels.qk_norm_rope_cache import Cache
from dflash_local.kernels.split_kv import MIN_DOT_DIM, decode_config, device_properties
from dflash_local.layout.attention import (
    FIXED_SPLIT_SIZE,
    MAX_SPLITS,
    SPLITS_PER_DOUBLING,
    fixed_splits,
    partial_buffers,
)

MIN_EVEN_SPLIT = 128  # keys of an even split
MOST_SPLIT_EVENLY = MAX_SPLITS * MIN_EVEN_SPLIT  # tokens; a longer text has larger splits, not more
BLOCK_SPLITS = 16  # splits that are combined at a time
LOG2_E = tl.constexpr(math.log2(math.e))


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """Describe which keys a block's rows see: ``start`` committed rows, and the block behind them.

    Attributes:
        causal: a row is blind to later rows of the block. sliding_window: keys a row sees including its own, the
            distance counted in both directions; 0 is all. context_window: only so many committed rows count; 0 is all.
    """

    causal: bool = True
    sliding_window: int = 0
    context_window: int = 0


@dataclass(frozen=True, slots=True)
class SplitKV:
    """Room for the partial results of one attention: all layers use it, one after the other.

    Attributes:
        outputs: [splits, M, heads, head_dim] float32, not yet divided. softmax_stats: [splits, M, heads, 2] float32,
            the largest score, as an exponent of two, and the sum of weights.
        fixed: the splits are a function of the position alone, their size growing with it, so that a row's result is
            bitwise the same in any block of as many rows; otherwise they are even, and move with ``start`` and the
            maximum sequence length.
    """

    outputs: torch.Tensor
    softmax_stats: torch.Tensor
    fixed: bool = False

    @classmethod
    def allocate(
        cls, rows: int, num_heads: int, head_dim: int, capacity: int, device: torch.device, fixed: bool = False
    ) -> SplitKV:
        """Return room for caches of ``capacity`` rows."""
        buffers = partial_buffers("", num_heads, head_dim, rows, capacity, fixed)
        outputs, softmax_stats = Tensors(buffers, device).take(buffers)
        return cls(outputs, softmax_stats, fixed)

    def num_splits(self, max_seq_len: int, max_splits: int) -> int:
        """Count splits up to a length; even ones are at most so many."""
        if self.fixed:
            return min(fixed_splits(max_seq_len), len(self.outputs))
        return max(min(math.ceil(max_seq_len / MIN_EVEN_SPLIT), len(self.outputs), max_splits), 1)


def decode_attention(
    queries: torch.Tensor,
    cache: Cache,
    start: torch.Tensor,
    out: torch.Tensor,
    partials: SplitKV,
    max_seq_len: int,
    mask: AttentionMask,
    gates: torch.Tensor | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention of rows at positions ``start ..`` over the cache, their own keys included.

    Args:
        queries: [M, heads, head_dim]. cache: keys and values [KV heads, capacity, head_dim], a position's row being the
            rest of its division by the capacity (``layout.attention.ring_rows``). Of the queries' dtype; or int8 codes,
            and their scales [KV heads, capacity, 1] float32.
        start: [1] int32 on the device. out: [M, heads * head_dim], written.
        max_seq_len: no key is at or behind this.
        gates: [M, ..] whose first numbers are each head's query and gate by turns; None gates nothing.
        scale: of the scores; None is ``head_dim ** -0.5``.
        sinks: [heads] float32, a logit of each head's own in its softmax, for which there is no value; not scaled.
    """
    if not runs_kernels(queries):
        return decode_attention_reference(queries, cache, start, out, mask, gates, scale, sinks)
    rows, num_heads, head_dim = queries.shape
    device = device_properties(queries.device)
    keys, values = cache[:2]
    num_kv_heads, capacity = keys.shape[:2]
    block_d = max(power_of_two(head_dim), MIN_DOT_DIM)
    max_rows = partials.outputs.shape[1]
    split_size = FIXED_SPLIT_SIZE if partials.fixed else MIN_EVEN_SPLIT
    splits_per_doubling = SPLITS_PER_DOUBLING if partials.fixed else 0
    scale = scale or head_dim**-0.5
    native = None
    if attend_codes.takes(queries, cache) and mask == AttentionMask() and capacity >= max_seq_len:
        native = attend_codes.kernel(queries.device, rows, num_heads, num_kv_heads, splits_per_doubling)
    if native is not None:
        block_kv, count = attend_codes.STEP, partials.num_splits(max_seq_len, device.num_sms // num_kv_heads)
        results = partials.outputs, partials.softmax_stats
        attend_codes.launch(native, queries, cache, start, results, count, split_size, scale)
    else:
        of_group = rows * (num_heads // num_kv_heads)
        config = decode_config(of_group, block_d, keys.element_size(), device.shared_memory)
        tiles = -(-of_group // config.block_m)
        max_splits = config.programs_per_sm * device.num_sms // (num_kv_heads * tiles)
        block_kv, count = config.block_kv, partials.num_splits(max_seq_len, max_splits)
        _attend_split_kernel[(num_kv_heads, count, tiles)](
            queries, keys, values, *(cache[2:] or cache), start, partials.outputs, partials.softmax_stats, rows,
            max_rows, scale, capacity, split_size, num_heads, num_kv_heads, head_dim, block_d, config.block_m,
            splits_per_doubling, block_kv, mask.causal, mask.sliding_window, mask.context_window,
            capacity < max_seq_len, len(cache) > 2, num_warps=config.num_warps, num_stages=config.num_stages,
            enable_fp_fusion=False,  # a row's bits do not depend on which keys need a mask
        )  # fmt: skip
    gate_stride = 0 if gates is None else gates.shape[1]
    _combine_splits_kernel[(rows, num_heads)](
        partials.outputs, partials.softmax_stats, partials.softmax_stats if sinks is None else sinks, start, out,
        out if gates is None else gates, gate_stride, rows, max_rows, count, split_size, num_heads, head_dim, block_d,
        splits_per_doubling, block_kv, BLOCK_SPLITS, mask.sliding_window, mask.context_window,
        gates is not None, sinks is not None, num_warps=4,
    )  # fmt: skip
    return out


def decode_attention_reference(
    queries: torch.Tensor,
    cache: Cache,
    start: torch.Tensor,
    out: torch.Tensor,
    mask: AttentionMask,
    gates: torch.Tensor | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the same in plain PyTorch, in float32."""
    rows, num_heads, head_dim = queries.shape
    begin, capacity = int(start), cache[0].shape[1]
    end = begin + rows
    key = torch.arange(end, device=out.device)
    seen = (part[:, :end] if end <= capacity else part[:, key % capacity] for part in cache)
    keys, values, *scales = (part.float().repeat_interleave(num_heads // part.shape[0], 0) for part in seen)
    if scales:
        keys, values = keys * scales[0], values * scales[1]
    scores = torch.bmm(queries.float().transpose(0, 1), keys.transpose(1, 2)) * (scale or head_dim**-0.5)
    at = key[begin:].unsqueeze(1)
    hidden = key > at if mask.causal else torch.zeros_like(key > at)
    if mask.sliding_window:
        hidden |= (at - key).abs() >= mask.sliding_window
    if mask.context_window:
        hidden |= key < begin - mask.context_window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:  # first: behind the keys its place in the sum, and so the bits, would depend on the block
        scores = torch.cat((sinks.float()[:, None, None].expand(-1, rows, 1), scores), -1)
    weights = scores.softmax(-1)[..., -end:]
    attended = torch.bmm(weights, values).transpose(0, 1).to(out.dtype)
    if gates is not None:
        attended = attended * gates[:, : num_heads * 2 * head_dim].view(rows, num_heads, 2, head_dim)[:, :, 1].sigmoid()
    return out.copy_(attended.reshape(rows, -1))


@jit
def _first_key(start, SLIDING_WINDOW: tl.constexpr, CONTEXT_WINDOW: tl.constexpr):
    """Return the first key that any row of the block sees."""
    first = start * 0
    if SLIDING_WINDOW > 0:
        first = tl.maximum(first, start - SLIDING_WINDOW + 1)
    if CONTEXT_WINDOW > 0:
        first = tl.maximum(first, start - CONTEXT_WINDOW)
    return first


@jit
def _split_range(split, num_splits, first, end, split_size, SPLITS_PER_DOUBLING: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Return first key and number of keys of a split."""
    if SPLITS_PER_DOUBLING > 0:
        doublings = tl.maximum(split // SPLITS_PER_DOUBLING - 1, 0)
        return ((split - doublings * SPLITS_PER_DOUBLING) * split_size) << doublings, split_size << doublings
    else:  # not behind the return, for that would be compiled too
        low = first // BLOCK_KV * BLOCK_KV
        size = (end - low + num_splits - 1) // num_splits
        size = tl.maximum((size + BLOCK_KV - 1) // BLOCK_KV * BLOCK_KV, split_size)
        return low + split * size, split * 0 + size


@jit
def query_parts(query, CODED: tl.constexpr):
    """Return what scores are made of: queries [M, D] as they are; or, of 16-bit ones for a cache of codes, in fixed
    point: int8 parts ``high`` and ``low`` and a scale [M, 1], together (128 high + low) x scale, to 2^-15 of a row's
    largest number. Products of these with codes need no decoded keys, and their sums are exact.
    """
    if not CODED or query.dtype == tl.float32:
        return query
    else:  # not behind the return, for that would be compiled too
        wide = query.to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(wide), 1), 1e-30)[:, None] / (127 * 128)
        steps = wide / scale
        high = tl.floor(steps / 128 + 0.5)
        low = tl.floor(steps - 128 * high + 0.5)
        return high.to(tl.int8), low.to(tl.int8), scale


# fmt: off
@jit
def attend_keys(
    offset, seen_by_all, query, keys, values, key_scales, value_scales, scale, begin, end, position, rows_of_head,
    capacity, dim, largest, total, output,
    head_dim: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr, SLIDING_WINDOW: tl.constexpr,
    CONTEXT_WINDOW: tl.constexpr, RING: tl.constexpr, CODED: tl.constexpr, MASKED: tl.constexpr,
    kind: tl.constexpr,
):
    # fmt: on
    """Return the running softmax and the output after BLOCK_KV more keys. Without ``MASKED`` all rows see them.
    ``query``: of ``query_parts``.
    """
    real = dim < head_dim
    step = tl.arange(0, BLOCK_KV)
    key = offset + step
    here = key < end
    if CONTEXT_WINDOW > 0:
        here = here & (key >= begin - CONTEXT_WINDOW)
    if RING:
        at = offset % capacity + step
        place = rows_of_head + tl.where(at < capacity, at, at - capacity)
    else:
        place = rows_of_head + key
    k = tl.load(keys + place[None, :] * head_dim + dim[:, None], mask=here[None, :] & real[:, None], other=0.0)
    factor = scale
    if CODED:
        factor = tl.load(key_scales + place, mask=here, other=0.0)[None, :] * scale
    if CODED and kind != tl.float32:
        high, low, query_scale = query
        score = (tl.dot(high, k) * 128 + tl.dot(low, k)).to(tl.float32) * query_scale * factor
    else:
        score = tl.dot(query, k.to(kind), input_precision="ieee") * factor
    if MASKED:
        if offset + BLOCK_KV > seen_by_all:
            seen = here[None, :]
            if CAUSAL:
                seen = seen & (key[None, :] <= position[:, None])
            if SLIDING_WINDOW > 0:
                distance = position[:, None] - key[None, :]
                seen = seen & (distance < SLIDING_WINDOW) & (-distance < SLIDING_WINDOW)
            score = tl.where(seen, score, -1e30)
    top = tl.maximum(largest, tl.max(score, 1))
    # Where a row has seen nothing yet its weights are ones: what it sees later shrinks them to zeros.
    weight = tl.exp2(score - top[:, None])
    shrink = tl.exp2(largest - top)
    total = total * shrink + tl.sum(weight, 1)
    v = tl.load(values + place[:, None] * head_dim + dim[None, :], mask=here[:, None] & real[None, :], other=0.0)
    if CODED:
        weight *= tl.load(value_scales + place, mask=here, other=0.0)[None, :]
    output = output * shrink[:, None] + tl.dot(weight.to(kind), v.to(kind), input_precision="ieee")
    return top, total, output


@jit
def with_gate(result, gate):
    """Return a result times the sigmoid of its gate, each of them rounded."""
    kind = result.dtype
    opened = (1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))).to(kind).to(tl.float32)
    return (result.to(tl.float32) * opened).to(kind)


# fmt: off
@jit
def _attend_split_kernel(
    queries, keys, values, key_scales, value_scales, start, partial_outputs, softmax_stats, rows, max_rows, scale,
    capacity, split_size,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, head_dim: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, SPLITS_PER_DOUBLING: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr, CONTEXT_WINDOW: tl.constexpr, RING: tl.constexpr, CODED: tl.constexpr,
):
    # fmt: on
    # One program: one KV head and one split of its keys, for BLOCK_M of the rows of all query heads that share that KV
    # head; nearly always all of them. These queries [BLOCK_M, BLOCK_D], the running softmax and the undivided output
    # stay in registers; keys and values are streamed, BLOCK_KV of them at a time. Writes one partial result.
    kv_head = tl.program_id(0)
    num_splits = tl.num_programs(1)
    split = num_splits - 1 - tl.program_id(1)  # of fixed splits the largest first
    begin = tl.load(start)
    end = begin + rows
    first = _first_key(begin, SLIDING_WINDOW, CONTEXT_WINDOW)
    low, size = _split_range(split, num_splits, first, end, split_size, SPLITS_PER_DOUBLING, BLOCK_KV)
    if low >= end or low + size <= first:
        return
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)  # row by row, the query heads of the group in each
    row = m // GROUP
    head = kv_head * GROUP + m % GROUP
    inside = row < rows
    dim = tl.arange(0, BLOCK_D)
    real = dim < head_dim
    query = tl.load(
        queries + (row * NUM_HEADS + head)[:, None] * head_dim + dim[None, :],
        mask=inside[:, None] & real[None, :],
        other=0.0,
    )
    query = query_parts(query, CODED)
    largest = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    output = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    position = begin + row
    rows_of_head = kv_head.to(tl.int64) * capacity
    stop = tl.minimum(low + size, end)
    scale *= LOG2_E  # powers of two are what the device computes
    WINDOWS: tl.constexpr = SLIDING_WINDOW > 0 or CONTEXT_WINDOW > 0
    seen_by_all = low if WINDOWS else (begin + 1 if CAUSAL else end)  # every row sees the keys before it
    masked = low
    if CODED:  # a branch in the loop that decodes costs up to a third of its time; the plain one it costs nothing
        masked += tl.maximum(tl.minimum(seen_by_all, stop) - low, 0) // BLOCK_KV * BLOCK_KV
    for MASKED in tl.static_range(0 if CODED else 1, 2):
        for offset in range(masked if MASKED else low, stop if MASKED else masked, BLOCK_KV):
            largest, total, output = attend_keys(
                offset, seen_by_all, query, keys, values, key_scales, value_scales, scale, begin, end, position,
                rows_of_head, capacity, dim, largest, total, output,
                head_dim, BLOCK_KV, CAUSAL, SLIDING_WINDOW, CONTEXT_WINDOW, RING, CODED, MASKED,
                queries.dtype.element_ty,
            )  # fmt: skip
    part = (split * max_rows + row) * NUM_HEADS + head
    tl.store(partial_outputs + part[:, None] * head_dim + dim[None, :], output, mask=inside[:, None] & real[None, :])
    tl.store(softmax_stats + part * 2, largest, mask=inside)
    tl.store(softmax_stats + part * 2 + 1, total, mask=inside)


# fmt: off
@jit
def _combine_splits_kernel(
    partial_outputs, softmax_stats, sinks, start, out, gates, gate_stride, rows, max_rows, num_splits, split_size,
    NUM_HEADS: tl.constexpr, head_dim: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS_PER_DOUBLING: tl.constexpr,
    BLOCK_KV: tl.constexpr, BLOCK_SPLITS: tl.constexpr, SLIDING_WINDOW: tl.constexpr, CONTEXT_WINDOW: tl.constexpr,
    GATED: tl.constexpr, SINKS: tl.constexpr,
):
    # fmt: on
    # One program: one row of one query head. Partial results are streamed, BLOCK_SPLITS at a time and always in the
    # order of the keys; their rescaled sum stays in registers, and is gated before it is written. The head's sink is
    # what the sum begins with: once, whatever the splits, and with an output of zero. Not launched with overlapping:
    # programs that wait here keep a block of the product behind them from its multiprocessor, and that block then runs
    # after all others (Qwen3-8B in bfloat16 on an H100: a cycle of 16 rows took 8.7 instead of 7.2 ms).
    start_next_kernel()
    row = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, BLOCK_D)
    real = dim < head_dim
    begin = tl.load(start)
    end = begin + rows
    first = _first_key(begin, SLIDING_WINDOW, CONTEXT_WINDOW)
    largest = -1e30
    total = 0.0
    if SINKS:
        largest = tl.load(sinks + head) * LOG2_E
        total = 1.0
    output = tl.zeros((BLOCK_D,), tl.float32)
    for offset in range(0, num_splits, BLOCK_SPLITS):
        split = offset + tl.arange(0, BLOCK_SPLITS)
        low, size = _split_range(split, num_splits, first, end, split_size, SPLITS_PER_DOUBLING, BLOCK_KV)
        # Splits that nothing was written for, and those that this row saw nothing of, add exact zeros.
        there = (split < num_splits) & (low < end) & (low + size > first)
        part = (split * max_rows + row) * NUM_HEADS + head
        top = tl.load(softmax_stats + part * 2, mask=there, other=-1e30)
        next_top = tl.maximum(largest, tl.max(top, 0))
        old = tl.exp2(largest - next_top)
        new = tl.where(there, tl.exp2(top - next_top), 0.0)
        place = partial_outputs + part[:, None] * head_dim + dim[None, :]
        portion = tl.load(place, mask=there[:, None] & real[None, :], other=0.0)
        output = output * old + tl.sum(portion * new[:, None], 0)
        total = total * old + tl.sum(tl.load(softmax_stats + part * 2 + 1, mask=there, other=0.0) * new, 0)
        largest = next_top
    kind = out.dtype.element_ty
    result = (output / total).to(kind)
    if GATED:
        place = gates + row * gate_stride + (2 * head + 1) * head_dim + dim
        result = with_gate(result, tl.load(place, mask=real, other=0.0))
    tl.store(out + (row * NUM_HEADS + head) * head_dim + dim, result, mask=real)
