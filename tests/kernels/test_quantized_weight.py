"""Quantised weights stand for what a slow decode says."""

from __future__ import annotations

import pytest
import torch

from dflash_local.kernels.quantized_weight import Fp4Weight, Fp8Weight, IntWeight


@pytest.mark.parametrize("zeros", [False, True])
def test_int4_codes_lie_low_nibble_first(zeros: bool) -> None:
    codes = torch.arange(2 * 32).reshape(2, 32) * 7 % 16
    words = torch.zeros(2, 4, dtype=torch.int64)
    for j in range(8):
        words |= codes[:, j::8] << 4 * j
    packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    scales = torch.tensor([[0.5, -2.0], [3.0, 0.25]])
    points = torch.tensor([[3, 8], [0, 15]], dtype=torch.uint8) if zeros else None
    weight = IntWeight(packed, scales, points, torch.bfloat16)
    assert (weight.shape, weight.group_size, weight.numel()) == ((2, 32), 16, 64)
    want = torch.empty(2, 32)
    for row in range(2):
        for k in range(32):
            zero = 8 if points is None else int(points[row, k // 16])
            want[row, k] = (int(codes[row, k]) - zero) * float(scales[row, k // 16])
    assert torch.equal(weight.dequantized(), want)
    assert torch.equal(weight.dequantized(slice(1, 2)), want[1:])


def test_fp8_blocks_may_be_cut_off_at_both_ends() -> None:
    codes = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    weight = Fp8Weight(codes, scales, (2, 4), torch.bfloat16)
    want = torch.tensor([[float(codes[n, k]) * float(scales[n // 2, k // 4]) for k in range(7)] for n in range(5)])
    assert torch.equal(weight.dequantized(), want)
    assert torch.equal(weight.dequantized(slice(3, 5)), want[3:])


def test_codes_of_eight_bits_lie_low_byte_first() -> None:
    codes = torch.arange(2 * 8).reshape(2, 8) * 37 % 256
    words = codes.to(torch.uint8).view(torch.int32)
    weight = IntWeight(words, torch.tensor([[0.5], [-2.0]]), None, torch.bfloat16, bits=8)
    assert (weight.shape, weight.group_size) == ((2, 8), 8)
    assert torch.equal(weight.dequantized(), (codes - 128).float() * weight.scales)


def test_fp4_codes_have_a_sign_and_seven_magnitudes() -> None:
    codes = torch.arange(16).repeat(2, 2)
    words = torch.zeros(2, 4, dtype=torch.int64)
    for j in range(8):
        words |= codes[:, j::8] << 4 * j
    packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((magnitudes, -magnitudes))
    powers = torch.tensor([[127, 130], [0, 254]], dtype=torch.uint8)
    one = Fp4Weight(packed, powers, None, torch.bfloat16).dequantized()
    wanted = torch.tensor([[1.0, 8.0], [2.0**-127, 2.0**127]])
    assert torch.equal(one, torch.cat([values * wanted[:, :1], values * wanted[:, 1:]], 1).float())
    scales = torch.tensor([[1.5, 448.0], [0.25, 2.0]]).to(torch.float8_e4m3fn)
    parts = torch.tensor([2.0, 3.0])
    other = Fp4Weight(packed, scales, parts, torch.bfloat16).dequantized()
    wanted = scales.float() * parts[:, None]
    assert torch.equal(other, torch.cat([values * wanted[:, :1], values * wanted[:, 1:]], 1))
