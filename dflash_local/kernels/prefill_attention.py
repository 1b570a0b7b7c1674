"""Attention of a prompt's many rows over the cache: the library's, which is told nothing of a cache's own format."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def prefill_attention(
    queries: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    committed: int,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Causal attention [M, heads * head_dim] of rows at ``committed ..`` over what is committed and themselves.

    A float8_e4m3fn cache is widened one KV head at a time, exactly: beside it stand one head's keys and values
    (rows * head_dim * 4 bytes in 16 bits: 134 MB at 131,072 rows and head_dim 256) and never a copy of a layer.

    Args:
        queries: [M, heads, head_dim]. cache: keys and values [KV heads, capacity, head_dim], of the queries' dtype or
            float8_e4m3fn, the M rows written. scale: of the scores; None is ``head_dim ** -0.5``.
        sliding_window: keys that a row sees including its own; None is all.
    """
    rows, num_heads, head_dim = queries.shape
    first = 0 if sliding_window is None else max(0, committed + 1 - sliding_window)
    keys, values = (part[:, first : committed + rows] for part in cache)
    mask = None if sliding_window is None else _window_mask(rows, committed - first, sliding_window, queries.device)
    if keys.dtype == queries.dtype:
        return _attended(queries, keys, values, scale, mask).transpose(0, 1).reshape(rows, -1)
    group = num_heads // len(keys)
    out = queries.new_empty(rows, num_heads, head_dim)
    for head in range(len(keys)):
        mine = slice(head * group, (head + 1) * group)
        k, v = (part[head : head + 1].to(queries.dtype) for part in (keys, values))
        out[:, mine] = _attended(queries[:, mine], k, v, scale, mask).transpose(0, 1)
        del k, v  # before the next head's are made
    return out.reshape(rows, -1)


def _window_mask(rows: int, before: int, window: int, device: torch.device) -> torch.Tensor:
    """Which keys [M, before + M] each row sees: so many up to its own."""
    at = torch.arange(before, before + rows, device=device).unsqueeze(1)
    key = torch.arange(before + rows, device=device).unsqueeze(0)
    return (key <= at) & (at - key < window)


def _attended(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """[heads, M, head_dim] of queries [M, heads, head_dim] over keys and values [KV heads, rows, head_dim]."""
    q = queries.transpose(0, 1).unsqueeze(0)
    k, v = keys.unsqueeze(0), values.unsqueeze(0)
    if mask is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)[0]
    if q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)[0]
    from torch.nn.attention.bias import causal_lower_right

    lower_right = causal_lower_right(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=lower_right, scale=scale, enable_gqa=True)[0]
