"""The float8_e4m3fn cache: what is written and read, and a row's bits wherever it stands."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from kernels.test_fused_kernels import child

from dflash_local.kernels import attention_cut
from dflash_local.kernels.attention_cut import cut_of, fixed_pieces
from dflash_local.kernels.decode_attention import Pieces, Sight, decode_attention
from dflash_local.kernels.place_heads import Heads, place_heads, rounded
from dflash_local.kernels.prefill_attention import prefill_attention

EIGHT = torch.float8_e4m3fn


@pytest.mark.timeout(300)
def test_kernels_in_the_interpreter_bit_by_bit() -> None:
    """Every code, every float16, saturation, NaN; a row at other indices, among others, under another reach."""
    found = json.loads(child("cache_interpreted.py", TRITON_INTERPRET="1"))
    assert len(found) > 40
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_numbers_beyond_the_largest_code_saturate_and_never_become_nan() -> None:
    given = torch.tensor([448.0, 464.0, 465.0, 1e30, float("inf"), -449.0, float("-inf")])
    assert rounded(given, EIGHT).float().tolist() == [448.0] * 5 + [-448.0] * 2
    assert bool(rounded(torch.tensor([float("nan")]), EIGHT).float().isnan())


def test_the_twins_write_and_read_an_eight_bit_cache() -> None:
    torch.manual_seed(0)
    heads, room, start = Heads(4, 2, 16, 16), 30, torch.tensor([9], dtype=torch.int32)
    small, wide = (tuple(torch.zeros(2, room, 16).to(dtype) for _ in range(2)) for dtype in (EIGHT, torch.bfloat16))
    angles = torch.rand(room, 8).repeat(1, 2)
    rotation = (angles.cos().bfloat16(), angles.sin().bfloat16())
    qkv = (torch.randn(5, heads.columns) * 100).bfloat16()
    queries = torch.zeros(5, 4, 16, dtype=torch.bfloat16)
    for cache in (small, wide):
        place_heads(qkv, None, 0.0, rotation, start, queries, cache, heads)
    assert all(torch.equal(one.float(), rounded(two, EIGHT).float()) for one, two in zip(small, wide, strict=True))
    pieces = Pieces.for_(5, 4, 16, room, torch.device("cpu"))
    outs = [
        decode_attention(queries, cache, start, torch.zeros(5, 64).bfloat16(), pieces, room, Sight())
        for cache in (small, tuple(part.bfloat16() for part in small))
    ]
    assert torch.equal(*outs)


@pytest.mark.parametrize("committed", [0, 11])
def test_prefill_over_an_eight_bit_cache_equals_that_over_its_widened_copy(committed: int) -> None:
    torch.manual_seed(committed)
    rows, end = 7, committed + 7
    queries = torch.randn(rows, 6, 16)
    small = tuple(torch.randn(2, 40, 16).to(EIGHT) for _ in range(2))
    wide = tuple(part.float() for part in small)
    found = prefill_attention(queries, small, committed)
    torch.testing.assert_close(found, prefill_attention(queries, wide, committed), rtol=1e-6, atol=1e-6)
    key, at = torch.arange(end), committed + torch.arange(rows)
    k, v = (part[:, :end].repeat_interleave(3, 0) for part in wide)
    want = F.scaled_dot_product_attention(queries.transpose(0, 1), k, v, attn_mask=key[None] <= at[:, None])
    torch.testing.assert_close(found, want.transpose(0, 1).reshape(rows, -1), rtol=1e-5, atol=1e-5)


def test_the_fixed_cut_covers_every_key_once_and_grows_by_doublings() -> None:
    octave, least = attention_cut.OCTAVE, attention_cut.LEAST
    low, ends = 0, []
    for piece in range(fixed_pieces(1 << 18)):
        double = max(piece // octave - 1, 0)
        assert low == (piece - double * octave) * least << double
        low += least << double
        ends.append(low)
    assert low == 1 << 18
    for reach in (1, least, least + 1, 4096, 8192, 8193, 70001, 131072, 131073):
        assert fixed_pieces(reach) == sum(end < reach for end in ends) + 1
    assert len(ends) < 8 * octave


def test_room_and_count_of_pieces() -> None:
    cpu = torch.device("cpu")
    even, fixed = (Pieces.for_(4, 2, 16, 20000, cpu, fixed) for fixed in (False, True))
    assert fixed.count(20000, 64, 8) == len(fixed.sums) == fixed_pieces(20000)
    assert even.count(20000, 64, 33) == 33
    assert even.count(300, 128, 33) == 3
    assert even.count(20000, 64, 10**6) == len(even.sums)
    assert even.count(10, 128, 0) == 1


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(("lines", "width"), [(64, 128), (64, 256), (128, 256), (16, 256)])
def test_a_cut_is_made_smaller_where_a_card_has_no_room_for_it(number: int, lines: int, width: int) -> None:
    entered = attention_cut.CUTS[(number, width)]
    assert cut_of(lines, width, number, 1 << 20) == entered
    small = cut_of(lines, width, number, 99 * 1024)
    assert lines * width * 2 + 2 * small.stages * small.step * width * number <= 99 * 1024
    assert small.step <= entered.step and 2 <= small.stages <= entered.stages
    least = cut_of(lines, width, number, 0)
    assert (least.step, least.stages) == (attention_cut.FEWEST, 2)
