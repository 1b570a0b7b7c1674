"""Weights as fragments: packed and unpacked bit by bit, and each code where the tensor core's lanes expect it."""

from __future__ import annotations

from dataclasses import fields, replace
from math import prod
from typing import Any, cast

import pytest
import torch

from dflash_local.config.quantization import GGUF_TYPES
from dflash_local.kernels import fragment_packing
from dflash_local.kernels.fragment_packing import Codable, FragmentWeight, has_room
from dflash_local.kernels.quantized_weight import GgufWeight
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


@pytest.mark.parametrize("sizes", [(64, 256), (24, 160)])
def test_a_tail_comes_back(sizes: tuple[int, int]) -> None:
    rows = torch.randn(sizes, generator=torch.Generator().manual_seed(5)).bfloat16()
    given, coded = rows.clone(), FragmentWeight.of(int4(40, sizes[1], 32))
    packed = coded.with_tail(given)
    assert packed.tail is not None and packed.format.tail == sizes[0] and packed.coded_rows == 40
    assert packed.shape == (40 + sizes[0], sizes[1])
    assert torch.equal(packed.tail_rows(), rows) and bits_of(packed.unpacked()) == bits_of(coded.unpacked())
    assert (packed.tail.data_ptr() == given.data_ptr()) == (sizes == (64, 256)), "whole tiles and steps: where it lies"


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
