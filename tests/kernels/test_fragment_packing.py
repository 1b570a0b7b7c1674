"""Weights as fragments: packed and unpacked bit by bit, and each code where the tensor core's lanes expect it."""

from __future__ import annotations

from dataclasses import fields, replace
from math import prod
from typing import Any, cast

import pytest
import torch

from dflash_local.config.quantization import GGUF_TYPES
from dflash_local.kernels import few_row_gemm, fragment_decode, fragment_packing
from dflash_local.kernels.fragment_packing import Codable, FragmentWeight, has_room
from dflash_local.kernels.quantized_weight import GgufWeight
from dflash_local.kernels.skinny_gemm import swiglu_reference
from dflash_local.layout.linear import code_room, scale_room
from tests.quantized_weights import fp8, fp8_rows, gguf, int4, int8, mxfp4, nvfp4


def bits_of(weight: Codable) -> dict[str, object]:
    """Everything that a weight is, its tensors as lists."""
    found: dict[str, object] = {"type": type(weight)}
    for each in fields(weight):
        value = getattr(weight, each.name)
        if isinstance(value, torch.Tensor):
            value = value.dtype, value.shape, value.contiguous().view(torch.uint8).tolist()
        found[each.name] = value
    return found


def copy_of(weight: Codable) -> Codable:
    """In memory of its own."""
    values = {each.name: getattr(weight, each.name) for each in fields(weight)}
    cloned: Any = {name: each.clone() for name, each in values.items() if isinstance(each, torch.Tensor)}
    return replace(weight, **cloned)


OF_GGUF = [dtype for dtype in GGUF_TYPES if dtype not in ("Q4_0", "Q8_0", "MXFP4")]  # which other files have, too
WHOLE = (
    *(int4(64, 512, group, zeros) for group in (32, 128, 512) for zeros in (False, True)),
    *(int8(64, 512, group, zeros) for group in (32, 128, 512) for zeros in (False, True)),
    *(int4(64, 256, 128, True, kind) for kind in (torch.float16, torch.float32)),
    *(int8(64, 256, 256, False, kind) for kind in (torch.float16, torch.float32)),
    fp8(64, 384),
    fp8(64, 512, (32, 256)),
    fp8(144, 256),  # the last block has a tile
    fp8_rows(64, 384),
    mxfp4(64, 384),
    nvfp4(64, 384),
    nvfp4(64, 256, row_scales=False),
    *(gguf(dtype, 64, 512) for dtype in OF_GGUF),
)
RAGGED = (
    int4(40, 128 + 32, 32, True),  # the last step has a group of four, the last tile half of its features
    int4(96, 256 + 64, 64),
    int4(96, 128 + 32, 128 + 32, True),  # a group of two steps, the last of which is not full
    int4(96, 96, 96),
    int8(40, 256 + 32, 32),
    int8(40, 128 + 96, 128 + 96, True),
    int8(40, 128 + 96, 128 + 96),
    fp8(360, 256 + 96),
    fp8(48, 256 + 96, (16, 256 + 96)),
    fp8_rows(40, 256 + 96),
    mxfp4(40, 128 + 32),
    nvfp4(40, 128 + 32),
    *(gguf(dtype, 40, 256 if GGUF_TYPES[dtype].nested else 160) for dtype in OF_GGUF),
)


@pytest.mark.parametrize("weight", [*WHOLE, *RAGGED])
def test_what_is_packed_comes_back_bit_by_bit(weight: Codable, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = FragmentWeight.of(weight)
    assert bits_of(packed.unpacked()) == bits_of(weight) and packed.shape == weight.shape
    for rows in (slice(16, 32), slice(32, None)):
        assert torch.equal(packed.dequantized(rows), weight.dequantized()[rows])
    monkeypatch.setattr(fragment_packing, "PACKED_SLICE", 1)  # a tile at a time
    again = FragmentWeight.of(weight)
    assert torch.equal(again.codes, packed.codes)
    assert torch.equal(again.scales.view(torch.uint8), packed.scales.view(torch.uint8))
    assert torch.equal(packed.first_rows(16).dequantized(), weight.dequantized()[:16])


@pytest.mark.parametrize("codes", [1, fragment_packing.PACKED_SLICE])
@pytest.mark.parametrize("weight", WHOLE)
def test_a_weight_of_whole_tiles_is_packed_where_it_lies(
    weight: Codable, codes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fragment_packing, "PACKED_SLICE", codes)
    given = copy_of(weight)
    packed = FragmentWeight.of(given, in_place=True)
    assert (packed.codes.data_ptr(), packed.scales.data_ptr()) == (given.codes.data_ptr(), given.scales.data_ptr())
    assert packed.nbytes == weight.nbytes and bits_of(packed.unpacked()) == bits_of(weight)


@pytest.mark.parametrize("weight", RAGGED)
def test_a_ragged_weight_needs_a_place_of_its_own(weight: Codable) -> None:
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
        (int8(32, 192, 96), "groups of 96"),
        (fp8(32, 256, (8, 128)), "blocks of 8 x 128"),
        (fp8(32, 256, (128, 64)), "blocks of 128 x 64"),
        (fp8(32, 256, (1, 128)), "blocks of 1 x 128"),
        (mxfp4(32, 128, scales=(120, 190)), r"a scale is above 2\^61"),
        (replace(mxfp4(32, 128), scales=torch.zeros(32, 8, dtype=torch.uint8)), "groups of 16 are none of 32"),
        (replace(nvfp4(32, 128), scales=torch.full((32, 8), -1.0).to(torch.float8_e4m3fn)), "a scale is negative"),
    ],
)
def test_what_the_kernel_cannot_take_is_named(weight: Codable, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FragmentWeight.of(weight)


def scaled(
    packed: FragmentWeight, tile: int, step: int, group: int, sums: torch.Tensor, of_x: torch.Tensor
) -> torch.Tensor:
    """A part of a group's sums with its scale, and without what the codes were offset by."""
    kind = packed.format
    if kind.block is None or kind.scales == torch.float8_e4m3fn:
        return sums
    later = step // kind.group_steps
    if kind.block[0] > 1:
        return sums * (packed.scales[tile * 16 // kind.block[0], later].float() * 2.0**60)
    scales = packed.scales[tile, later, :, group].t().flatten()  # g, then g + 8
    if kind.of_gguf:
        return with_minima(packed, tile, step, group, sums, of_x)
    if kind.scales == torch.uint8:
        return sums * (scales.int() + 66 << 23).view(torch.float32)
    if kind.sums_x:
        offset, usual = (128, 8) if kind.codes == "int4" else (-128, 128)
        zeros = usual if packed.zeros is None else packed.zeros[tile, later, :, group].t().flatten().float()
        sums = sums - (offset + zeros) * of_x
    return scales.float() * sums


def with_minima(
    packed: FragmentWeight, tile: int, step: int, group: int, sums: torch.Tensor, of_x: torch.Tensor
) -> torch.Tensor:
    """``scaled`` of GGUF's formats: scales and minima may be bytes under factors for two steps."""
    kind = packed.format
    scales = packed.scales[tile, step, :, group].t().flatten().float()
    minima = torch.zeros(16) if packed.zeros is None else packed.zeros[tile, step, :, group].t().flatten().float()
    if kind.nested:
        assert packed.row_scales is not None
        factors = packed.row_scales[tile, step // 2].transpose(0, 1).flatten(0, 1).float()  # g, then g + 8
        scales, minima = scales * factors[:, 0], -factors[:, -1] * minima
    offset = {"int4": 128.0, "int5": 128.0 if kind.minima else 144.0}.get(kind.codes, 0.0)
    return scales * (sums - offset * of_x) + minima * of_x


@pytest.mark.parametrize("sizes", [(64, 256), (24, 160)])
def test_a_tail_comes_back(sizes: tuple[int, int]) -> None:
    rows = torch.randn(sizes, generator=torch.Generator().manual_seed(5)).bfloat16()
    given, coded = rows.clone(), FragmentWeight.of(int4(40, sizes[1], 32))
    packed = coded.with_tail(given)
    assert packed.tail is not None and packed.format.tail == sizes[0] and packed.coded_rows == 40
    assert packed.shape == (40 + sizes[0], sizes[1])
    assert torch.equal(packed.tail_rows(), rows) and bits_of(packed.unpacked()) == bits_of(coded.unpacked())
    assert (packed.tail.data_ptr() == given.data_ptr()) == (sizes == (64, 256)), "whole tiles and steps: where it lies"


def test_rows_of_the_tail_are_multiplied_with_the_others() -> None:
    weight, rows = int8(40, 160, 32), torch.randn(24, 160, generator=torch.Generator().manual_seed(6)).bfloat16()
    packed = FragmentWeight.of(weight).with_tail(rows.clone())
    x = torch.randn(5, 160, generator=torch.Generator().manual_seed(1))
    residual = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    want = x @ torch.cat((weight.dequantized(), rows.float())).t()
    assert torch.allclose(few_row_gemm.linear(x, packed, torch.empty(5, 64), None), want, rtol=1e-4, atol=1e-3)
    added = few_row_gemm.linear(x, packed, residual.clone(), None, residual)
    assert torch.allclose(added, want + residual, rtol=1e-4, atol=1e-3)
    assert torch.allclose(fragment_decode.linear(x, packed), want, rtol=1e-4, atol=1e-3)
    assert torch.equal(packed.first_rows(32).dequantized(), weight.dequantized()[:32])


@pytest.mark.parametrize(
    "weight", [int4(96, 160, 32, True), int8(96, 160, 160), fp8(96, 160), mxfp4(96, 160), nvfp4(96, 160)]
)
def test_references_multiply_with_what_the_weight_stands_for(weight: Codable, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("n", "k"), [(24576, 4096), (4096, 12288), (34816, 5120), (5120, 17408), (640, 2**24), (16, 32)]
)
def test_slices_of_a_prompts_product_are_whole_tiles_of_about_one_size(n: int, k: int) -> None:
    step = fragment_decode.slice_rows(n, k)
    slices = -(-n // step)
    assert step % (fragment_decode.GEMM_TILE if k < 2**17 else 16) == 0
    assert step * k <= fragment_decode.DECODED_SLICE or step == 16
    assert (slices - 1) * step < n and step * slices - n < slices * fragment_decode.GEMM_TILE


@pytest.mark.parametrize(
    "weight",
    [int4(1000, 160, 32, True), int4(72, 2880, 32), int8(40, 160, 160), int8(40, 288, 32, True), fp8(80, 288),
     mxfp4(1000, 2880), nvfp4(72, 160), int4(48, 320, 320, True), gguf("Q4_1", 72, 576), gguf("Q5_1", 1000, 160),
     gguf("Q6_K", 40, 256), gguf("Q4_K", 1000, 768), gguf("IQ4_XS", 72, 256)],
)  # fmt: skip
def test_a_weight_with_room_behind_it_is_packed_where_it_lies(weight: Codable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragment_packing, "PACKED_SLICE", 3 * 16 * 256)  # several slices, each over what was read
    want, (n, k) = FragmentWeight.of(weight), weight.shape
    codes = weight.codes.view(torch.int32)
    rooms = {"codes": code_room(n, k, codes.shape[1] * 32 // k)}
    packed_as = {"minima": "zeros", "factors": "row_scales"}
    if want.format.grouped:
        rooms["scales"] = scale_room(n, k, weight.group_size)
    if want.zeros is not None:
        rooms["minima" if isinstance(weight, GgufWeight) else "zeros"] = rooms["scales"]
    if want.format.nested:
        rows, blocks = scale_room(n, k, 256)
        rooms["factors"] = rows, blocks * want.format.factors
    assert not has_room(weight)
    with pytest.raises(ValueError, match="nor is there room for them"):
        FragmentWeight.of(weight, in_place=True)
    roomy, behind = {}, {}
    for name, room in rooms.items():
        given = getattr(weight, name)
        bytes_of_room = prod(room) * (4 if name == "codes" else given.element_size())
        memory = torch.full((bytes_of_room + 64,), 0x55, dtype=torch.uint8)
        front = memory[: given.nbytes].view(given.dtype).view(given.shape)
        roomy[name], behind[name] = front.copy_(given), memory[bytes_of_room:]
    packed = FragmentWeight.of(replace(weight, **cast(Any, roomy)), in_place=True)
    assert torch.equal(packed.dequantized(), want.dequantized())
    assert torch.equal(packed.codes, want.codes) and packed.codes.data_ptr() == roomy["codes"].data_ptr()
    for name in rooms:
        found, wanted = (
            getattr(each, packed_as.get(name, name)).contiguous().view(torch.uint8) for each in (packed, want)
        )
        assert torch.equal(found, wanted) and bool((behind[name] == 0x55).all()), name
