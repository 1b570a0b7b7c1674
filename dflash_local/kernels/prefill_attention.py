"""Attention of a prompt's many rows over the cache by the library, which knows neither coded caches nor sinks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from dflash_local.kernels.qk_norm_rope_cache import Cache
from dflash_local.layout.attention import SINK_DIMS

FLASH_WIDTH = 8  # its heads are a multiple of so wide
SINK_PARTS = 3  # of these dimensions sum to a sink: three numbers of bfloat16 make up one of float32


def prefill_attention(
    queries: torch.Tensor,
    cache: Cache,
    committed: int,
    scale: float | None = None,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally [M, heads * head_dim] for rows at ``committed ..`` over what is committed and themselves.

    A cache of int8 codes is decoded one KV head at a time: beside it stand one head's keys and values in the queries'
    dtype (134 MB in 16 bits at 131,072 rows and head_dim 256) and never a copy of a layer. With sinks it is the same,
    of ``SINK_DIMS`` dimensions more.

    Args:
        queries: [M, heads, head_dim]. cache: keys and values [KV heads, capacity, head_dim], of the queries' dtype or
            int8 codes with their scales, the M rows written, a position's row being the rest of its division by the
            capacity.
        scale: of the scores; None is ``head_dim ** -0.5``.
        sliding_window: keys that a row sees including its own; None is all.
        sinks: [heads] float32, a logit of each head's own in its softmax, for which there is no value; not scaled.
    """
    rows, _, head_dim = queries.shape
    scale = head_dim**-0.5 if scale is None else scale
    first = 0 if sliding_window is None else max(0, committed + 1 - sliding_window)
    keys, values, *scales = straight = [_straight(part, first, committed + rows) for part in cache]
    mask = None if sliding_window is None else _window_mask(rows, committed - first, sliding_window, queries.device)
    if not scales and sinks is None:
        return _attended(queries, keys, values, scale, mask).transpose(0, 1).reshape(rows, -1)
    return _by_kv_head(queries, straight, scale, mask, sinks)


def _straight(part: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Return the rows [KV heads, end - first, head_dim] of positions in their order, a copy where a ring wraps."""
    capacity = part.shape[1]
    low = first % capacity
    over = low + end - first - capacity
    if over <= 0:
        return part[:, low : low + end - first]
    return torch.cat((part[:, low:], part[:, :over]), 1)


def _by_kv_head(
    queries: torch.Tensor,
    cache: Sequence[torch.Tensor],
    scale: float,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend [M, heads * head_dim], over a copy of one KV head's keys and values after the other."""
    rows, num_heads, head_dim = queries.shape
    num_kv_heads, length = cache[0].shape[:2]
    group, sink_keys, width = num_heads // num_kv_heads, 0, head_dim
    if sinks is not None:
        queries, width, sink_keys = _with_sinks(queries, sinks, scale), head_dim + SINK_DIMS, 1
        mask = None if mask is None else F.pad(mask, (1, 0), value=True)
    out = queries.new_empty(rows, num_heads, head_dim)
    k, v = (queries.new_zeros(1, sink_keys + length, width) for _ in range(2))
    k[:, :sink_keys, head_dim : head_dim + SINK_PARTS] = 1  # every row sees it: it stands before all positions
    # The library's kernels for masks and for float32 want a key head for each query head: the one, again and again.
    seen = (k, v) if mask is None and sinks is None else (k.expand(group, -1, -1), v.expand(group, -1, -1))
    for head in range(num_kv_heads):
        keys, values, *scales = (part[head : head + 1] for part in cache)
        for index, (copy, part) in enumerate(((k, keys), (v, values))):
            own = copy[:, sink_keys:, :head_dim]
            if scales:
                torch.mul(part, scales[index], out=own)
            else:
                own.copy_(part)
        mine = slice(head * group, (head + 1) * group)
        out[:, mine] = _attended(queries[:, mine], *seen, scale, mask).transpose(0, 1)[..., :head_dim]
    return out.reshape(rows, -1)


def _with_sinks(queries: torch.Tensor, sinks: torch.Tensor, scale: float) -> torch.Tensor:
    """Return queries [M, heads, head_dim + SINK_DIMS] whose scaled product with ones there is their head's sink."""
    wide = F.pad(queries, (0, SINK_DIMS))
    left = sinks.float() / scale
    for part in range(queries.shape[-1], queries.shape[-1] + SINK_PARTS):
        wide[..., part] = left
        left = left - wide[0, :, part].float()
    return wide


def _window_mask(rows: int, before: int, window: int, device: torch.device) -> torch.Tensor:
    """Return which keys [M, before + M] each row sees: so many up to its own."""
    at = torch.arange(before, before + rows, device=device).unsqueeze(1)
    key = torch.arange(before + rows, device=device).unsqueeze(0)
    return (key <= at) & (at - key < window)


def _attended(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attend [heads, M, head_dim] for queries [M, heads, head_dim] over keys and values [KV heads, rows, head_dim]."""
    q = queries.transpose(0, 1).unsqueeze(0)
    k, v = keys.unsqueeze(0), values.unsqueeze(0)
    if mask is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)[0]
    if q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)[0]
    return _lower_right(q, k, v, scale)[0]


def _lower_right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend so that the last row sees all keys, each before it one less: as
    ``torch.nn.attention.bias.causal_lower_right``, whose import brings torch's compiler, two seconds of every start.
    Flash kernels and CPUs do without.
    """
    rows, length = q.shape[2], k.shape[2]
    if q.device.type == "cpu":
        mask = _window_mask(rows, length - rows, length, q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    if q.shape[-1] % FLASH_WIDTH == 0 and can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, False, True)):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True, scale=scale)[0]
    from torch.nn.attention.bias import causal_lower_right

    mask = causal_lower_right(rows, length)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
