"""Attention of a block over int8 codes on a GPU: equal to the reference, and a row's bits wherever it stands."""

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
from dflash_local.kernels.qk_norm_rope_cache import coded

pytestmark = pytest.mark.gpu
KV_HEADS, HEAD_DIM, ROOM = 4, 256, 32
# Of Qwen3.5-27B and -9B, from 6 to 96 queries to a KV head.
SHAPES = [(24, 1), (24, 4), (24, 8), (24, 12), (24, 16), (16, 3), (16, 16)]


def given(heads: int, rows: int, start: int) -> tuple[torch.Tensor, Any]:
    """Queries and a cache, whose later keys have larger scores."""
    torch.manual_seed(start + rows)
    queries = torch.randn(rows, heads, HEAD_DIM, device="cuda").bfloat16()
    keys, values = torch.randn(2, KV_HEADS, start + ROOM, HEAD_DIM, device="cuda")
    keys *= torch.linspace(0.1, 8, start + ROOM, device="cuda")[:, None]
    codes, scales = zip(coded(keys), coded(values), strict=True)
    return queries, (*codes, *scales)


def attended(queries: torch.Tensor, cache: Any, start: int, fixed: bool) -> torch.Tensor:
    rows, heads, _ = queries.shape
    length = cache[0].shape[1]
    partials = SplitKV.allocate(rows, heads, HEAD_DIM, length, queries.device, fixed)
    out = torch.full((rows, heads * HEAD_DIM), float("nan"), device="cuda", dtype=queries.dtype)
    at = torch.tensor([start], dtype=torch.int32, device="cuda")
    return decode_attention(queries, cache, at, out, partials, length, AttentionMask())


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("start", [0, 127, 1000, 20_000])
@pytest.mark.parametrize(("heads", "rows"), SHAPES)
def test_a_block_over_codes_equals_the_reference(heads: int, rows: int, start: int, fixed: bool) -> None:
    queries, cache = given(heads, rows, start)
    at, out = torch.tensor([start]), torch.empty(rows, heads * HEAD_DIM, device="cuda")
    want = decode_attention_reference(queries, cache, at, out, AttentionMask())
    apart = (attended(queries, cache, start, fixed).float() - want).norm() / want.norm()
    assert apart < 4e-3, "bfloat16's rounding"


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("start", [120, 9000])
@pytest.mark.parametrize(("heads", "rows"), SHAPES[1:])
def test_a_rows_bits_depend_on_no_other_row(heads: int, rows: int, start: int, fixed: bool) -> None:
    """Beside others, before other later keys; and, over fixed splits, at another index."""
    queries, cache = given(heads, rows, start)
    index = rows // 2
    others, moved = torch.randn(2, *queries.shape, device="cuda").bfloat16() * 9
    others[index] = moved[0] = queries[index]
    later = tuple(part.clone() for part in cache)
    for part in later:
        part[:, start + index + 1 :] = part[:, : ROOM - index - 1].flip(2) * 3
    want = attended(queries, cache, start, fixed)[index]
    assert torch.equal(attended(others, later, start, fixed)[index], want)
    if fixed:
        assert torch.equal(attended(moved, later, start + index, fixed)[0], want)
