"""Buffers: their bytes, what layers share, and what is one name for two things."""

from __future__ import annotations

import pytest

from dflash_local.layout.buffer import Buffer, distinct, group_bytes


def test_bytes_follow_shape_and_dtype() -> None:
    assert Buffer("keys", (4, 100, 128), "float8_e4m3fn", "target KV").nbytes == 4 * 100 * 128
    assert Buffer("counters", (3,), "int32", "buffers").nbytes == 12


def test_a_shared_buffer_counts_once() -> None:
    row = Buffer("target.qkv.512", (16, 512), "bfloat16", "buffers")
    other = Buffer("target.layers.0.keys", (2, 8, 4), "bfloat16", "target KV")
    assert list(distinct([row, other, row])) == [row.name, other.name]
    assert group_bytes([row, other, row]) == {"buffers": 16 * 512 * 2, "target KV": 128}


def test_one_name_for_two_tensors_is_an_error() -> None:
    with pytest.raises(ValueError, match="have one name"):
        distinct([Buffer("x", (1,), "int32", "buffers"), Buffer("x", (2,), "int32", "buffers")])
