"""Attention sinks on a GPU, of gpt-oss's shape: the split-KV kernel and the library's attention of a prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_local.kernels.decode_attention import (
    AttentionMask,
    SplitKV,
    decode_attention,
    decode_attention_reference,
)
from dflash_local.kernels.prefill_attention import prefill_attention

pytestmark = pytest.mark.gpu
HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 64, 8, 64, 4096
NEAR = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(("committed", "rows"), [(0, 1), (0, 300), (3000, 8), (3000, 300)])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", list(NEAR))
def test_both_ways_equal_softmax_with_one_more_column(
    dtype: torch.dtype, cache_dtype: torch.dtype | None, committed: int, rows: int, window: int | None
) -> None:
    torch.manual_seed(rows)
    cuda = torch.device("cuda")
    cache: Any = tuple(
        torch.randn(KV_HEADS, CAPACITY, HEAD_DIM, device=cuda).to(dtype).to(cache_dtype or dtype) for _ in range(2)
    )
    queries = torch.randn(rows, HEADS, HEAD_DIM, device=cuda).to(dtype)
    sinks = torch.linspace(-8, 12, HEADS, device=cuda)
    start, mask = torch.tensor([committed], dtype=torch.int32, device=cuda), AttentionMask(sliding_window=window or 0)
    want = torch.empty(rows, HEADS * HEAD_DIM, device=cuda)
    decode_attention_reference(queries.float(), cache, start, want, mask, sinks=sinks)
    found = prefill_attention(queries, cache, committed, None, window, sinks)
    assert (found.float() - want).abs().max() < NEAR[dtype]
    if rows <= 16:
        partials = SplitKV.allocate(rows, HEADS, HEAD_DIM, CAPACITY, cuda)
        out = torch.empty_like(found)
        decode_attention(queries, cache, start, out, partials, committed + rows, mask, sinks=sinks)
        assert (out.float() - want).abs().max() < NEAR[dtype]
