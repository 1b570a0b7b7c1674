"""The float8_e4m3fn cache: what is written and read, and a row's bits wherever it stands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dflash_local.kernels import split_kv
from dflash_local.kernels.prefill_attention import prefill_attention
from dflash_local.kernels.split_kv import decode_config
from dflash_local.layout.attention import FIXED_SPLIT_SIZE, MIN_SPLIT_SIZE, SPLITS_PER_DOUBLING, fixed_splits

EIGHT = torch.float8_e4m3fn


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
