"""The float8_e4m3fn cache: what is written and read, and a row's bits wherever it stands."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dflash_local.kernels import split_kv
from dflash_local.kernels.decode_attention import AttentionMask, SplitKV, decode_attention
from dflash_local.kernels.prefill_attention import prefill_attention
from dflash_local.kernels.qk_norm_rope_cache import HeadLayout, qk_norm_rope_cache, rounded
from dflash_local.kernels.split_kv import decode_config
from dflash_local.layout.split_kv import FIXED_SPLIT_SIZE, MIN_SPLIT_SIZE, SPLITS_PER_DOUBLING, fixed_splits
from tests.kernels.test_fused_kernels import child

EIGHT = torch.float8_e4m3fn


@pytest.mark.timeout(300)
@pytest.mark.parametrize("checks", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_kernels_in_the_interpreter_bit_by_bit(checks: str) -> None:
    """Every code, every float16, saturation, NaN; a row at other indices, among others, under another max_seq_len."""
    found = json.loads(child("cache_interpreted.py", checks, TRITON_INTERPRET="1"))
    assert len(found) > (30 if checks == "few" else 40)
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_numbers_beyond_the_largest_code_saturate_and_never_become_nan() -> None:
    given = torch.tensor([448.0, 464.0, 465.0, 1e30, float("inf"), -449.0, float("-inf")])
    assert rounded(given, EIGHT).float().tolist() == [448.0] * 5 + [-448.0] * 2
    assert bool(rounded(torch.tensor([float("nan")]), EIGHT).float().isnan())


def empty(room: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, room, 16).to(dtype), torch.zeros(2, room, 16).to(dtype)


def test_the_references_write_and_read_an_eight_bit_cache() -> None:
    torch.manual_seed(0)
    layout, room, start = HeadLayout(4, 2, 16, 16), 30, torch.tensor([9], dtype=torch.int32)
    small, wide = (empty(room, dtype) for dtype in (EIGHT, torch.bfloat16))
    angles = torch.rand(room, 8).repeat(1, 2)
    rotation = (angles.cos().bfloat16(), angles.sin().bfloat16())
    qkv = (torch.randn(5, layout.qkv_size) * 100).bfloat16()
    queries = torch.zeros(5, 4, 16, dtype=torch.bfloat16)
    for cache in (small, wide):
        qk_norm_rope_cache(qkv, None, 0.0, rotation, start, queries, cache, layout)
    assert all(torch.equal(one.float(), rounded(two, EIGHT).float()) for one, two in zip(small, wide, strict=True))
    partials = SplitKV.allocate(5, 4, 16, room, torch.device("cpu"))
    outs = [
        decode_attention(queries, cache, start, torch.zeros(5, 64).bfloat16(), partials, room, AttentionMask())
        for cache in (small, (small[0].bfloat16(), small[1].bfloat16()))
    ]
    assert torch.equal(*outs)


@pytest.mark.parametrize("committed", [0, 11])
def test_prefill_over_an_eight_bit_cache_equals_that_over_its_widened_copy(committed: int) -> None:
    torch.manual_seed(committed)
    rows, end = 7, committed + 7
    queries = torch.randn(rows, 6, 16)
    small: Any = tuple(torch.randn(2, 40, 16).to(EIGHT) for _ in range(2))
    wide: Any = tuple(part.float() for part in small)
    found = prefill_attention(queries, small, committed)
    torch.testing.assert_close(found, prefill_attention(queries, wide, committed), rtol=1e-6, atol=1e-6)
    key, at = torch.arange(end), committed + torch.arange(rows)
    k, v = (part[:, :end].repeat_interleave(3, 0) for part in wide)
    want = F.scaled_dot_product_attention(queries.transpose(0, 1), k, v, attn_mask=key[None] <= at[:, None])
    torch.testing.assert_close(found, want.transpose(0, 1).reshape(rows, -1), rtol=1e-5, atol=1e-5)


def test_fixed_splits_cover_every_key_once_and_grow_by_doublings() -> None:
    per_doubling, smallest = SPLITS_PER_DOUBLING, FIXED_SPLIT_SIZE
    low, ends = 0, []
    for split in range(fixed_splits(1 << 18)):
        doublings = max(split // per_doubling - 1, 0)
        assert low == (split - doublings * per_doubling) * smallest << doublings
        low += smallest << doublings
        ends.append(low)
    assert low == 1 << 18
    for max_seq_len in (1, smallest, smallest + 1, 4096, 8192, 8193, 70001, 131072, 131073):
        assert fixed_splits(max_seq_len) == sum(end < max_seq_len for end in ends) + 1
    assert len(ends) < 8 * per_doubling


def test_room_and_number_of_splits() -> None:
    cpu = torch.device("cpu")
    even, fixed = (SplitKV.allocate(4, 2, 16, 20000, cpu, fixed) for fixed in (False, True))
    assert fixed.num_splits(20000, 64, 8) == len(fixed.outputs) == fixed_splits(20000)
    assert even.num_splits(20000, 64, 33) == 33
    assert even.num_splits(300, 128, 33) == 3
    assert even.num_splits(20000, 64, 10**6) == len(even.outputs)
    assert even.num_splits(10, 128, 0) == 1


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize(("block_m", "head_dim"), [(64, 128), (128, 256)])
def test_a_configuration_is_made_smaller_where_a_card_has_no_room_for_it(
    itemsize: int, block_m: int, head_dim: int
) -> None:
    entered = split_kv.CONFIGS[(itemsize, head_dim)]
    assert decode_config(block_m, head_dim, itemsize, 1 << 20) == entered
    small = decode_config(block_m, head_dim, itemsize, 99 * 1024)
    assert block_m * head_dim * 2 + 2 * small.num_stages * small.block_kv * head_dim * itemsize <= 99 * 1024
    assert small.block_kv <= entered.block_kv and 2 <= small.num_stages <= entered.num_stages
    least = decode_config(block_m, head_dim, itemsize, 0)
    assert (least.block_kv, least.num_stages) == (MIN_SPLIT_SIZE, 2)
