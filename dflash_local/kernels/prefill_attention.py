"""Attention of a prompt's many rows over the cache, one launch: a program attends for a tile of queries that share a KV
head, over all keys that they see.
"""

from __future__ import annotations

import torch

from dflash_local.kernels.decode_attention import (
    LOG2_E,
    AttentionMask,
    attend_keys,
    decode_attention_reference,
    query_parts,
    with_gate,
)
from dflash_local.kernels.jit import jit, power_of_two, runs_kernels, tl
from dflash_local.kernels.qk_norm_rope_cache import Cache
from dflash_local.kernels.split_kv import MIN_DOT_DIM, PREFILL_CONFIGS, decode_config, device_properties

REFERENCE_ROWS = 128  # at a time: the reference has the scores of all heads and keys at once


def prefill_attention(
    queries: torch.Tensor,
    cache: Cache,
    start: torch.Tensor,
    scale: float | None = None,
    sliding_window: int | None = None,
    gates: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally [M, heads * head_dim] for rows at positions ``start ..``, whose keys the cache holds.

    Args: as of ``decode_attention``; ``sliding_window``: keys that a row sees including its own; None is all. ``out``:
        written, if it is there already.
    """
    rows, num_heads, head_dim = queries.shape
    out, window = queries.new_empty(rows, num_heads * head_dim) if out is None else out, sliding_window or 0
    if not runs_kernels(queries):
        mask = AttentionMask(sliding_window=window)
        for low in range(0, rows, REFERENCE_ROWS):
            part = slice(low, low + REFERENCE_ROWS)
            opens = None if gates is None else gates[part]
            decode_attention_reference(queries[part], cache, start + low, out[part], mask, opens, scale, sinks)
        return out
    keys, values = cache[:2]
    num_kv_heads, capacity = keys.shape[:2]
    block_d = max(power_of_two(head_dim), MIN_DOT_DIM)
    of_group, shared_memory = rows * (num_heads // num_kv_heads), device_properties(queries.device).shared_memory
    config = decode_config(of_group, block_d, keys.element_size(), shared_memory, PREFILL_CONFIGS)
    tiles = -(-of_group // config.block_m)
    _attend_prompt_kernel[(num_kv_heads, tiles)](
        queries, keys, values, *(cache[2:] or cache), start, out if sinks is None else sinks,
        out if gates is None else gates, 0 if gates is None else gates.shape[1], out, rows, scale or head_dim**-0.5,
        capacity, num_heads, num_kv_heads, head_dim, block_d, config.block_m, config.block_kv, window,
        sliding_window is not None, len(cache) > 2, gates is not None, sinks is not None, num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    return out


# fmt: off
@jit(do_not_specialize=("rows",))  # a prompt of another length would wait for the compiler
def _attend_prompt_kernel(
    queries, keys, values, key_scales, value_scales, start, sinks, gates, gate_stride, out, rows, scale, capacity,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, head_dim: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_KV: tl.constexpr, SLIDING_WINDOW: tl.constexpr, RING: tl.constexpr,
    CODED: tl.constexpr, GATED: tl.constexpr, SINKS: tl.constexpr,
):
    # fmt: on
    # One program: BLOCK_M queries of one KV head, the rows one behind the other and in each the query heads of the
    # group. They, the running softmax and the undivided output stay in registers; keys and values are streamed,
    # BLOCK_KV of them at a time: first those that every row sees, which need no mask.
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the one with the most keys first
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    begin = tl.load(start)
    end = begin + rows
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = m // GROUP
    head = kv_head * GROUP + m % GROUP
    inside = row < rows
    dim = tl.arange(0, BLOCK_D)
    real = dim < head_dim
    there = inside[:, None] & real[None, :]
    place = (row * NUM_HEADS + head).to(tl.int64)[:, None] * head_dim + dim[None, :]
    query = tl.load(queries + place, mask=there, other=0.0)
    query = query_parts(query, CODED)
    position = begin + row
    first = begin + tile * BLOCK_M // GROUP
    stop = tl.minimum(begin + (tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1, end)
    low = begin * 0
    masked = (first + 1) // BLOCK_KV * BLOCK_KV
    if SLIDING_WINDOW > 0:
        low = tl.maximum(first + 1 - SLIDING_WINDOW, 0) // BLOCK_KV * BLOCK_KV
        masked = low
    largest = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS:
        largest = tl.load(sinks + head, mask=inside, other=0.0) * LOG2_E
        total += 1.0
    output = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    rows_of_head = kv_head.to(tl.int64) * capacity
    scale *= LOG2_E  # powers of two are what the device computes
    for MASKED in tl.static_range(0, 2):
        for offset in range(masked if MASKED else low, stop if MASKED else masked, BLOCK_KV):
            largest, total, output = attend_keys(
                offset, low, query, keys, values, key_scales, value_scales, scale, begin, end, position,
                rows_of_head, capacity, dim, largest, total, output,
                head_dim, BLOCK_KV, True, SLIDING_WINDOW, 0, RING, CODED, MASKED,
                queries.dtype.element_ty,
            )  # fmt: skip
    result = (output / total[:, None]).to(out.dtype.element_ty)
    if GATED:
        opens = (row.to(tl.int64) * gate_stride + (2 * head + 1) * head_dim)[:, None] + dim[None, :]
        result = with_gate(result, tl.load(gates + opens, mask=there, other=0.0))
    tl.store(out + place, result, mask=there)
