"""Attention sinks on the CPU against softmax with one more column, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_local.kernels.decode_attention import AttentionMask, SplitKV, decode_attention
from dflash_local.kernels.prefill_attention import prefill_attention

HEADS, KV_HEADS = 6, 2
SINKS = torch.tensor([-1e4, -2.0, 0.0, 3.0, 30.0, 1e4])
EIGHT = torch.float8_e4m3fn


def with_one_more_column(
    queries: torch.Tensor, cache: tuple[torch.Tensor, ...], committed: int, window: int | None, scale: float
) -> torch.Tensor:
    """[M, heads * head_dim] as gpt-oss is published: the sink is a logit that is dropped behind the softmax."""
    rows, end = len(queries), committed + len(queries)
    keys, values = (part[:, :end].double().repeat_interleave(HEADS // KV_HEADS, 0) for part in cache)
    scores = torch.einsum("mhd,hkd->hmk", queries.double(), keys) * scale
    at, key = committed + torch.arange(rows)[:, None], torch.arange(end)[None]
    hidden = (key > at) | (torch.zeros_like(key > at) if window is None else at - key >= window)
    column = SINKS.double()[:, None, None].expand(-1, rows, 1)
    weights = torch.cat((scores.masked_fill(hidden, -torch.inf), column), -1).softmax(-1)[..., :-1]
    return torch.einsum("hmk,hkd->mhd", weights, values).reshape(rows, -1)


@pytest.mark.parametrize("cache_dtype", [torch.float32, EIGHT])
@pytest.mark.parametrize(("committed", "window"), [(21, None), (0, 8), (7, 8), (21, 8), (21, 1), (0, 100)])
def test_a_prompts_rows_and_a_blocks(committed: int, window: int | None, cache_dtype: torch.dtype) -> None:
    torch.manual_seed(committed)
    rows, room, head_dim, scale = 9, 40, 64, 0.3
    queries = torch.randn(rows, HEADS, head_dim) * 2
    cache: Any = (torch.randn(2, KV_HEADS, room, head_dim) * 2).to(cache_dtype).unbind(0)
    want = with_one_more_column(queries, cache, committed, window, scale).float()
    found = prefill_attention(queries, cache, committed, scale, window, SINKS)
    torch.testing.assert_close(found, want, rtol=2e-5, atol=2e-5)
    start, out = torch.tensor([committed], dtype=torch.int32), torch.empty_like(found)
    partials = SplitKV.allocate(rows, HEADS, head_dim, room, start.device)
    mask = AttentionMask(sliding_window=window or 0)
    decode_attention(queries, cache, start, out, partials, room, mask, scale=scale, sinks=SINKS)
    torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5)


def test_a_prompts_sinks_are_not_rounded_to_bfloat16() -> None:
    """They pass through the products of the queries' dtype; 8 bits of mantissa would make 65 of this one."""
    queries, sink = torch.zeros(3, HEADS, 16, dtype=torch.bfloat16), 65.2
    cache: Any = (torch.zeros(KV_HEADS, 8, 16, dtype=torch.bfloat16), torch.ones(KV_HEADS, 8, 16, dtype=torch.bfloat16))
    queries[..., 0] = 1
    cache[0][..., 0] = 16.0  # equal scores of 64 with this scale
    found = prefill_attention(queries, cache, 2, 4.0, None, torch.full((HEADS,), sink))
    keys = torch.tensor([3.0, 4.0, 5.0])
    want = keys / (keys + torch.tensor(sink - 64.0, dtype=torch.float64).exp())
    assert (found.view(3, HEADS, 16) - want[:, None, None]).abs().max() < 2**-8 * 1.01
    rounded = keys / (keys + torch.tensor(65.0 - 64.0, dtype=torch.float64).exp())
    assert (want - rounded).abs().min() > 0.03
