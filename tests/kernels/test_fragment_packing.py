"""Weights as fragments: packed and unpacked bit by bit, and each code where the tensor core's lanes expect it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quantized_weights import fp8, int4

from dflash_local.kernels import few_row_gemm
from dflash_local.kernels.fragment_packing import FragmentWeight
from dflash_local.kernels.quantized_weight import Fp8Weight, IntWeight
from dflash_local.kernels.skinny_gemm import swiglu_reference


def equal(one: IntWeight | Fp8Weight, other: IntWeight | Fp8Weight) -> bool:
    """The same kind, blocks and bits."""
    if isinstance(one, Fp8Weight) and isinstance(other, Fp8Weight):
        codes = torch.equal(one.codes.view(torch.uint8), other.codes.view(torch.uint8))
        return codes and torch.equal(one.scales, other.scales) and one.block == other.block
    assert isinstance(one, IntWeight) and isinstance(other, IntWeight)
    if (one.zeros is None) != (other.zeros is None):
        return False
    points = one.zeros is None or other.zeros is None or torch.equal(one.zeros, other.zeros)
    return torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales) and points


def copy_of(weight: IntWeight | Fp8Weight) -> IntWeight | Fp8Weight:
    """In memory of its own."""
    if isinstance(weight, Fp8Weight):
        return replace(weight, codes=weight.codes.clone(), scales=weight.scales.clone())
    zeros = None if weight.zeros is None else weight.zeros.clone()
    return replace(weight, codes=weight.codes.clone(), scales=weight.scales.clone(), zeros=zeros)


WHOLE = (
    *(int4(64, 512, group, zeros) for group in (32, 64, 128, 256, 512) for zeros in (False, True)),
    *(int4(64, 256, 128, True, kind) for kind in (torch.float16, torch.float32)),
    fp8(64, 384),
    fp8(64, 512, (32, 256)),
    fp8(144, 256),  # the last block has a tile
)
RAGGED = (
    int4(40, 128 + 32, 32, True),  # the last step has a group of four, the last tile half of its features
    int4(96, 256 + 64, 64),
    fp8(360, 256 + 96),
)


@pytest.mark.parametrize("weight", [*WHOLE, *RAGGED])
def test_what_is_packed_comes_back_bit_by_bit(weight: IntWeight | Fp8Weight, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = FragmentWeight.of(weight)
    assert equal(packed.unpacked(), weight) and packed.shape == weight.shape
    for rows in (slice(16, 32), slice(32, None)):
        assert torch.equal(packed.dequantized(rows), weight.dequantized()[rows])
    monkeypatch.setattr("dflash_local.kernels.fragment_packing.DEQUANTIZED_SLICE", 1)  # a tile at a time
    again = FragmentWeight.of(weight)
    assert torch.equal(again.codes, packed.codes) and torch.equal(again.scales, packed.scales)


@pytest.mark.parametrize("weights", [1, 2**22])
@pytest.mark.parametrize("weight", WHOLE)
def test_a_weight_of_whole_tiles_is_packed_where_it_lies(
    weight: IntWeight | Fp8Weight, weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_local.kernels.fragment_packing.DEQUANTIZED_SLICE", weights)
    given = copy_of(weight)
    packed = FragmentWeight.of(given, in_place=True)
    assert (packed.codes.data_ptr(), packed.scales.data_ptr()) == (given.codes.data_ptr(), given.scales.data_ptr())
    assert packed.nbytes == weight.nbytes and equal(packed.unpacked(), weight)


@pytest.mark.parametrize("weight", RAGGED)
def test_a_ragged_weight_needs_a_place_of_its_own(weight: IntWeight | Fp8Weight) -> None:
    with pytest.raises(ValueError, match="whole|consist of tiles"):
        FragmentWeight.of(weight, in_place=True)


def test_rows_and_columns_beyond_the_last_are_zeros() -> None:
    packed = FragmentWeight.of(int4(40, 160, 32, True))
    assert packed.codes.shape[:2] == (3, 2) and packed.zeros is not None
    for values in (packed.scales, packed.zeros):  # tile step g group h
        assert values[0].any() and not values[2, ..., 1].any(), "features 40 to 47 have none"
        assert values[0, 1, :, 0].any() and not values[:, 1, :, 1:].any(), "nor have columns from 160"


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (int4(32, 16, 16), "16 columns"),
        (int4(32, 64, 16), "groups of 16"),
        (fp8(32, 256, (8, 128)), "blocks of 8 x 128"),
        (fp8(32, 256, (128, 64)), "blocks of 128 x 64"),
        (replace(int4(32, 128, 128), zeros=torch.full((32, 1), 200, dtype=torch.uint8)), "zero point is above 127"),
    ],
)
def test_what_the_kernel_cannot_take_is_named(weight: IntWeight | Fp8Weight, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FragmentWeight.of(weight)


def lanes_product(packed: FragmentWeight, tile: int, x: torch.Tensor) -> torch.Tensor:
    """A tile's features [16] times one row of x, as the kernel's lanes do it: their loads and bit operations, and the
    placing of operands that the instruction set's manual gives for mma.m16n8k16."""
    kind, steps = packed.format, packed.codes.shape[1]
    wide = torch.zeros(steps * 128)
    wide[: len(x)] = x
    total = torch.zeros(16)
    for step in range(steps):
        words = [int(word) & 0xFFFFFFFF for word in packed.codes[tile, step]]
        for k16 in range(8):
            a, b = torch.zeros(16, 16), torch.zeros(16)
            for lane in range(32):
                g, t = lane >> 2, lane & 3
                for i, pair in enumerate(operands(words, kind.bits, k16, lane)):
                    halves = torch.tensor([(pair & 0xFFFF) << 16, pair & 0xFFFF0000]).to(torch.uint32)
                    columns = slice(2 * t + i // 2 * 8, 2 * t + i // 2 * 8 + 2)
                    a[g + i % 2 * 8, columns] = halves.view(torch.float32)
                of_x = step * 128 + k16 // 2 * 32 + t * 8 + k16 % 2 * 4  # the lane's 16 bytes of 32 columns
                b[2 * t : 2 * t + 2], b[2 * t + 8 : 2 * t + 10] = wide[of_x : of_x + 2], wide[of_x + 2 : of_x + 4]
            total += scaled(packed, tile, step, k16 * 16 // kind.step_group, a @ b, b.sum())
    return total


def operands(words: list[int], bits: int, k16: int, lane: int) -> list[int]:
    """A lane's four pairs of bfloat16."""
    if bits == 4:
        word = words[(k16 // 4) * 128 + lane * 4 + k16 % 4]
        return [word >> 4 * i & 0x000F000F | 0x43004300 for i in range(4)]
    found = []
    for i in range(2):
        word = words[(k16 // 2) * 128 + lane * 4 + k16 % 2 * 2 + i]
        found.append(word >> 4 & 0x07F007F0 | word & 0x80008000)
        found.append(word << 4 & 0x07F007F0 | word << 8 & 0x80008000)
    return found


def scaled(
    packed: FragmentWeight, tile: int, step: int, group: int, sums: torch.Tensor, of_x: torch.Tensor
) -> torch.Tensor:
    """A part of a group's sums with its scale, and without what the codes were offset by."""
    kind = packed.format
    later = step // max(1, kind.block[1] // 128)
    if kind.bits == 8:
        return sums * (packed.scales[tile * 16 // kind.block[0], later].float() * 2.0**120)
    scales = packed.scales[tile, later, :, group].float()  # g, then g and g + 8
    zeros = torch.full_like(scales, 8) if packed.zeros is None else packed.zeros[tile, later, :, group].float()
    return scales.t().flatten() * (sums - (128 + zeros.t().flatten()) * of_x)


@pytest.mark.parametrize(
    "weight", [int4(32, 160, 32, True), int4(32, 256, 128), int4(32, 256, 256, True), fp8(32, 160, (16, 128))]
)
def test_every_code_lies_where_the_tensor_cores_lanes_expect_it(weight: IntWeight | Fp8Weight) -> None:
    """One-hot rows pick single columns out; a row of different numbers leaves no other order of columns."""
    packed, k = FragmentWeight.of(weight), weight.shape[1]
    rows = [torch.eye(k)[at] for at in (0, 1, 6, 13, 31, 32, 77, 127, k - 1)]
    rows.append(torch.randn(k, generator=torch.Generator().manual_seed(3)))
    want = weight.dequantized()
    for row in rows:
        for tile in range(2):
            got = lanes_product(packed, tile, row)
            wanted = want[tile * 16 : tile * 16 + 16] @ row
            assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-4 * float(want.abs().max())), tile


@pytest.mark.parametrize("weight", [int4(96, 160, 32, True), fp8(96, 160)])
def test_references_multiply_with_what_the_weight_stands_for(
    weight: IntWeight | Fp8Weight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_local.kernels.fragment_packing.DEQUANTIZED_SLICE", 2 * 16 * 256)  # two tiles at a time
    x = torch.randn(5, 160, generator=torch.Generator().manual_seed(1))
    residual = torch.randn(5, 96, generator=torch.Generator().manual_seed(2))
    want = x @ weight.dequantized().t()
    packed = FragmentWeight.of(weight)
    assert torch.allclose(few_row_gemm.linear(x, packed, torch.empty(5, 96), None), want, rtol=1e-4, atol=1e-2)
    added = few_row_gemm.linear(x, packed, residual.clone(), None, residual)
    assert torch.allclose(added, want + residual, rtol=1e-4, atol=1e-2)
    gated = few_row_gemm.swiglu(x, packed, torch.empty(5, 48), None)
    wanted = swiglu_reference(x, weight.dequantized(), torch.empty(5, 48))
    assert torch.allclose(gated, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
