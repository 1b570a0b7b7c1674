"""Weights as fragments: packed and unpacked bit by bit, and each code where the tensor core's lanes expect it."""

from __future__ import annotations

import pytest
import torch
from quantized_weights import fp8, int4

from dflash_local.kernels import few_row_gemm
from dflash_local.kernels.fragment_packing import FragmentFormat, FragmentWeight
from dflash_local.kernels.quantized_weight import Fp8Weight, Int4Weight
from dflash_local.kernels.skinny_gemm import swiglu_reference


def equal(one: Int4Weight | Fp8Weight, other: Int4Weight | Fp8Weight) -> bool:
    """The same kind, blocks and bits."""
    if isinstance(one, Fp8Weight) and isinstance(other, Fp8Weight):
        codes = torch.equal(one.codes.view(torch.uint8), other.codes.view(torch.uint8))
        return codes and torch.equal(one.scales, other.scales) and one.block == other.block
    assert isinstance(one, Int4Weight) and isinstance(other, Int4Weight)
    if (one.zeros is None) != (other.zeros is None):
        return False
    points = one.zeros is None or other.zeros is None or torch.equal(one.zeros, other.zeros)
    return torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales) and points


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(
    "weight",
    [
        *(int4(64, 512, group, zeros) for group in (32, 64, 128, 256, 512) for zeros in (False, True)),
        *(int4(32, 256, 128, True, kind) for kind in (torch.float16, torch.float32)),
        int4(32, 128 + 32, 32, True),  # the last step has a group of four
        int4(96, 256 + 64, 64),
        fp8(64, 384),
        fp8(352, 256 + 96),  # blocks are cut off at both ends
        fp8(64, 512, (32, 256)),
    ],
)
def test_what_is_packed_comes_back_bit_by_bit(
    weight: Int4Weight | Fp8Weight, paired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = FragmentWeight.of(weight, paired)
    assert equal(packed.unpacked(), weight)
    assert packed.nbytes % (packed.records.shape[0] * 16) == 0 and packed.shape == weight.shape
    monkeypatch.setattr("dflash_local.kernels.fragment_packing.SLICE_BYTES", 1)  # a tile at a time
    assert torch.equal(FragmentWeight.of(weight, paired).records, packed.records)
    assert equal(packed.unpacked(), weight)


def test_rows_and_columns_beyond_the_last_are_zeros() -> None:
    packed = FragmentWeight.of(int4(40, 160, 32, True))
    assert packed.records.shape[:2] == (3, 2)
    assert equal(packed.unpacked(), int4(40, 160, 32, True))
    tail = packed.records[2, :, 256:].contiguous().view(torch.int16).view(2, 8, 4, 2, 2)  # step g group word h
    assert tail[0, ..., 0].all() and not tail[..., 1].any(), "features 40 to 47 have neither scales nor zero points"
    assert tail[1, :, 0, :, 0].all() and not tail[1, :, 1:].any(), "nor have columns from 160"


@pytest.mark.parametrize(
    ("weight", "paired", "words"),
    [
        (int4(48, 128, 128), True, "gated pair of 48 rows"),
        (int4(32, 16, 16), False, "16 columns"),
        (int4(32, 64, 16), False, "groups of 16"),
        (fp8(32, 256, (8, 128)), False, "blocks of 8 x 128"),
        (fp8(32, 256, (128, 64)), False, "blocks of 128 x 64"),
    ],
)
def test_what_the_kernel_cannot_take_is_named(weight: Int4Weight | Fp8Weight, paired: bool, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FragmentWeight.of(weight, paired)


def lanes_product(packed: FragmentWeight, tile: int, x: torch.Tensor) -> torch.Tensor:
    """A tile's features [16] times one row of x, as the kernel's lanes do it: their loads and bit operations, and the
    placing of operands that the instruction set's manual gives for mma.m16n8k16."""
    kind, steps = packed.format, packed.records.shape[1]
    wide = torch.zeros(steps * 128)
    wide[: len(x)] = x
    total = torch.zeros(16)
    for step in range(steps):
        record = [int(word) & 0xFFFFFFFF for word in packed.records[tile, step]]
        for k16 in range(8):
            a, b = torch.zeros(16, 16), torch.zeros(16)
            for lane in range(32):
                g, t = lane >> 2, lane & 3
                if kind.bits == 4:
                    word = record[(k16 // 4) * 128 + lane * 4 + k16 % 4]
                    fragments = [word >> 4 * i & 0x000F000F | 0x43004300 for i in range(4)]
                else:
                    fragments = []
                    for i in range(2):
                        word = record[(k16 // 2) * 128 + lane * 4 + k16 % 2 * 2 + i]
                        fragments.append(word >> 4 & 0x07F007F0 | word & 0x80008000)
                        fragments.append(word << 4 & 0x07F007F0 | word << 8 & 0x80008000)
                for i, pair in enumerate(fragments):
                    halves = torch.tensor([(pair & 0xFFFF) << 16, pair & 0xFFFF0000]).to(torch.uint32)
                    columns = slice(2 * t + i // 2 * 8, 2 * t + i // 2 * 8 + 2)
                    a[g + i % 2 * 8, columns] = halves.view(torch.float32)
                of_x = step * 128 + k16 // 2 * 32 + t * 8 + k16 % 2 * 4  # the lane's 16 bytes of 32 columns
                b[2 * t : 2 * t + 2], b[2 * t + 8 : 2 * t + 10] = wide[of_x : of_x + 2], wide[of_x + 2 : of_x + 4]
            group = k16 * 16 // kind.group_size
            total += scaled(record, kind, group, a @ b, b.sum())
    return total


def scaled(record: list[int], kind: FragmentFormat, group: int, sums: torch.Tensor, of_x: torch.Tensor) -> torch.Tensor:
    """A part of a group's sums with its scale, and without what the codes were offset by."""

    def number(word: int) -> float:
        return float(torch.tensor([word]).to(torch.uint32).view(torch.float32))

    if kind.bits == 8:
        return sums * (number(record[512]) * 2.0**120)
    words = 2 if kind.zeros else 1
    out = torch.empty(16)
    for row in range(16):
        at = 256 + (row % 8) * (128 // kind.group_size) * words + group * words
        scale, zero = ((record[at + i] >> row // 8 * 16 & 0xFFFF) << 16 for i in (0, words - 1))
        out[row] = number(scale) * (sums[row] - (number(zero) if kind.zeros else 136.0) * of_x)
    return out


@pytest.mark.parametrize("weight", [int4(32, 160, 32, True), int4(32, 256, 128), fp8(32, 160)])
@pytest.mark.parametrize("paired", [False, True])
def test_every_code_lies_where_the_tensor_cores_lanes_expect_it(weight: Int4Weight | Fp8Weight, paired: bool) -> None:
    """One-hot rows pick single columns out; a row of different numbers leaves no other order of columns."""
    packed, k = FragmentWeight.of(weight, paired), weight.shape[1]
    rows = [torch.eye(k)[at] for at in (0, 1, 6, 13, 31, 32, 77, 127, k - 1)]
    rows.append(torch.randn(k, generator=torch.Generator().manual_seed(3)))
    want = weight.dequantized()
    for row in rows:
        for tile in range(2):
            got = lanes_product(packed, tile, row)
            wanted = want[tile * 16 : tile * 16 + 16] @ row
            assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-4 * float(want.abs().max())), tile


@pytest.mark.parametrize("weight", [int4(96, 160, 32, True), fp8(96, 160)])
def test_references_multiply_with_what_the_weight_stands_for(weight: Int4Weight | Fp8Weight) -> None:
    x = torch.randn(5, 160, generator=torch.Generator().manual_seed(1))
    residual = torch.randn(5, 96, generator=torch.Generator().manual_seed(2))
    want = x @ weight.dequantized().t()
    packed = FragmentWeight.of(weight)
    assert torch.allclose(few_row_gemm.linear(x, packed, torch.empty(5, 96), None), want, rtol=1e-4, atol=1e-2)
    added = few_row_gemm.linear(x, packed, residual.clone(), None, residual)
    assert torch.allclose(added, want + residual, rtol=1e-4, atol=1e-2)
    gated = few_row_gemm.swiglu(x, FragmentWeight.of(weight, True), torch.empty(5, 48), None)
    wanted = swiglu_reference(x, weight.dequantized(), torch.empty(5, 48))
    assert torch.allclose(gated, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
