"""The cache of int8 codes: what is written and read, and a row's bits wherever it stands; and sinks of a prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dflash_local.kernels import split_kv
from dflash_local.kernels.decode_attention import SplitKV
from dflash_local.kernels.prefill_attention import prefill_attention
from dflash_local.kernels.qk_norm_rope_cache import coded
from dflash_local.kernels.split_kv import decode_config
from dflash_local.layout.attention import (
    FIXED_SPLIT_SIZE,
    MAX_SPLITS,
    MIN_SPLIT_SIZE,
    SPLITS_PER_DOUBLING,
    fixed_splits,
)
from dflash_local.models.fused.target import FusedTarget


@pytest.mark.parametrize("committed", [0, 11])
def test_prefill_over_a_coded_cache_equals_that_over_its_decoded_copy(committed: int) -> None:
    torch.manual_seed(committed)
    rows, end = 7, committed + 7
    queries = torch.randn(rows, 6, 16)
    codes, scales = zip(*(coded(torch.randn(2, 40, 16)) for _ in range(2)), strict=True)
    small: Any = (*codes, *scales)
    wide: Any = tuple(part * scale for part, scale in zip(codes, scales, strict=True))
    start = torch.tensor([committed], dtype=torch.int32)
    found = prefill_attention(queries, small, start)
    torch.testing.assert_close(found, prefill_attention(queries, wide, start), rtol=1e-6, atol=1e-6)
    key, at = torch.arange(end), committed + torch.arange(rows)
    k, v = (part[:, :end].repeat_interleave(3, 0) for part in wide)
    want = F.scaled_dot_product_attention(queries.transpose(0, 1), k, v, attn_mask=key[None] <= at[:, None])
    torch.testing.assert_close(found, want.transpose(0, 1).reshape(rows, -1), rtol=1e-5, atol=1e-5)


def test_a_row_is_coded_by_its_largest_number_and_keeps_what_is_no_number() -> None:
    rows = torch.tensor([[127.0, -63.5, 0.5, 1.5], [0.0, 0.0, 0.0, 0.0], [1e-30, -2e-30, 0.0, 0.0]])
    codes, scales = coded(rows)
    assert codes[:2].tolist() == [[127, -64, 0, 2], [0, 0, 0, 0]] and codes[2].tolist() == [64, -127, 0, 0]
    assert scales[:2].tolist() == [[1.0], [0.0]]
    torch.testing.assert_close(codes * scales, rows, rtol=0, atol=0.5)
    lost = coded(torch.tensor([[1.0, float("nan")], [float("inf"), 1.0]]))
    assert (lost[0] * lost[1]).isnan().all(), "a fault is not hidden by rounding"


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


@pytest.mark.parametrize("exact", [False, True])
def test_texts_with_the_same_launches_have_the_same_bound(exact: bool) -> None:
    """A graph is recorded for each bound; even splits are as many for every long text."""
    target = FusedTarget.__new__(FusedTarget)
    target.exact, target.capacity = exact, 1 << 17
    partials = SplitKV.allocate(1, 2, 16, target.capacity, torch.device("cpu"), exact)
    bounds = sorted({target.bucket(length) for length in range(1, target.capacity, 97)})
    assert len({partials.num_splits(bound, MAX_SPLITS) for bound in bounds}) == len(bounds)
    for most in (8, 33, MAX_SPLITS):
        for length in (1 << power for power in range(11, 18)):  # each doubling
            assert partials.num_splits(target.bucket(length), most) == partials.num_splits(length, most)


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize(("queries", "head_dim"), [(64, 128), (96, 256)])
def test_a_configuration_is_made_smaller_where_a_card_has_no_room_for_it(
    itemsize: int, queries: int, head_dim: int
) -> None:
    entered = decode_config(queries, head_dim, itemsize, 1 << 20)
    assert entered in split_kv.CONFIGS[(itemsize, head_dim)] and entered.block_m >= queries
    small = decode_config(queries, head_dim, itemsize, 99 * 1024)
    assert small.block_m * head_dim * 2 + 2 * small.num_stages * small.block_kv * head_dim * itemsize <= 99 * 1024
    assert small.block_m == 64 and small.num_warps == 4 and small.block_kv <= entered.block_kv
    assert 2 <= small.num_stages <= entered.num_stages
    least = decode_config(queries, head_dim, itemsize, 0)
    assert (least.block_kv, least.num_stages) == (MIN_SPLIT_SIZE, 2)


@pytest.mark.parametrize("itemsize", [1, 2])
def test_a_program_attends_for_fewer_queries_of_a_wider_head(itemsize: int) -> None:
    wide, usual = (decode_config(128, head_dim, itemsize, 1 << 20) for head_dim in (512, 256))
    assert wide.block_m * 512 == usual.block_m * 256 and wide.num_warps == usual.num_warps


def test_a_prompts_sinks_are_not_rounded_to_bfloat16() -> None:
    """The queries and keys are of 16 bits; 8 bits of mantissa would make 65 of this one."""
    queries, sink = torch.zeros(3, 6, 16, dtype=torch.bfloat16), 65.2
    cache: Any = (torch.zeros(2, 8, 16, dtype=torch.bfloat16), torch.ones(2, 8, 16, dtype=torch.bfloat16))
    queries[..., 0] = 1
    cache[0][..., 0] = 16.0  # equal scores of 64 with this scale
    start = torch.tensor([2], dtype=torch.int32)
    found = prefill_attention(queries, cache, start, 4.0, sinks=torch.full((6,), sink))
    keys = torch.tensor([3.0, 4.0, 5.0])
    want = keys / (keys + torch.tensor(sink - 64.0, dtype=torch.float64).exp())
    assert (found.view(3, 6, 16) - want[:, None, None]).abs().max() < 2**-8 * 1.01
    rounded = keys / (keys + torch.tensor(65.0 - 64.0, dtype=torch.float64).exp())
    assert (want - rounded).abs().min() > 0.03
