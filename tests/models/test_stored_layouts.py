"""Every layout of quantised weights, decoded one weight at a time after its description and by the reader."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dflash_local.config.quantization import WHOLE, StoredFormat, StoredFp4, StoredFp8, StoredInt
from dflash_local.errors import CheckpointError
from dflash_local.kernels.allocate import Tensors
from dflash_local.layout.linear import Part, weight_format
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fill_places import fill_places
from dflash_local.models.fused.formats import FORMATS
from dflash_local.models.fused.quantized_formats import decode
from dflash_local.models.stored_formats import stored_size

CPU = torch.device("cpu")
ROWS, COLUMNS, GROUP = 24, 128, 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of the columns of an octet
Stored = Mapping[str, torch.Tensor]
Slow = Callable[[Mapping[str, np.ndarray], int, int], float]


def bits_of(word: Any, place: int, bits: int) -> int:
    return int(word) >> bits * place & 2**bits - 1


def permuted(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Every byte as often as every other, in no order: so all codes are there, whatever their width."""
    size = int(np.prod(shape)) * dtype.itemsize
    order = torch.randperm(size, generator=torch.Generator().manual_seed(size))
    return (order % 256).to(torch.uint8).view(dtype).view(shape)


def distinct(*shape: int) -> torch.Tensor:
    """Scales of which no two are equal."""
    size = int(np.prod(shape))
    return (1 + torch.randperm(size, generator=torch.Generator().manual_seed(size)) / size).view(shape) / 16


def whole(group: int) -> int:
    return group or COLUMNS


def gptq(bits: int, group: int, zeros: str) -> tuple[Stored, Slow]:
    """``zeros``: the middle whatever is stored, as stored, or one more than stored."""
    per, groups = 32 // bits, COLUMNS // whole(group)
    stored = {
        "qweight": permuted((COLUMNS // per, ROWS), torch.int32),
        "qzeros": permuted((groups, ROWS // per), torch.int32) & 0x77777777,
        "scales": distinct(groups, ROWS).half(),
        "g_idx": (torch.arange(COLUMNS) // whole(group)).int(),
    }

    def slow(t: Mapping[str, np.ndarray], n: int, k: int) -> float:
        g = k // whole(group)
        code = bits_of(t["qweight"][k // per, n], k % per, bits)
        zero = bits_of(t["qzeros"][g, n // per], n % per, bits) + (zeros == "less one")
        return (code - (2 ** (bits - 1) if zeros == "middle" else zero)) * float(t["scales"][g, n])

    return stored, slow


def awq() -> tuple[Stored, Slow]:
    groups = COLUMNS // GROUP
    stored = {
        "qweight": permuted((COLUMNS, ROWS // 8), torch.int32),
        "qzeros": permuted((groups, ROWS // 8), torch.int32),
        "scales": distinct(groups, ROWS).half(),
    }

    def slow(t: Mapping[str, np.ndarray], n: int, k: int) -> float:
        place = AWQ_PLACES[n % 8]
        code, zero = (bits_of(t[name][row, n // 8], place, 4) for name, row in (("qweight", k), ("qzeros", k // GROUP)))
        return (code - zero) * float(t["scales"][k // GROUP, n])

    return stored, slow


def packed(bits: int, group: int, zeros: bool) -> tuple[Stored, Slow]:
    per, groups = 32 // bits, COLUMNS // whole(group)
    stored = {
        "weight_packed": permuted((ROWS, COLUMNS // per), torch.int32),
        "weight_scale": distinct(ROWS, groups).bfloat16(),
        "weight_shape": torch.tensor([ROWS, COLUMNS]),
    }
    if zeros:
        stored["weight_zero_point"] = permuted((ROWS // per, groups), torch.int32)

    def slow(t: Mapping[str, np.ndarray], n: int, k: int) -> float:
        g, middle = k // whole(group), 2 ** (bits - 1)
        signed = bits_of(t["weight_packed"][n, k // per], k % per, bits) - middle
        zero = bits_of(t["weight_zero_point"][n // per, g], n % per, bits) - middle if zeros else 0
        return (signed - zero) * float(t["weight_scale"][n, g])

    return stored, slow


def int_bytes(zeros: bool, scales: tuple[int, ...]) -> tuple[Stored, Slow]:
    stored = {"weight": permuted((ROWS, COLUMNS), torch.int8), "weight_scale": distinct(*scales)}
    if zeros:
        stored["weight_zero_point"] = permuted((ROWS, 1), torch.int8)

    def slow(t: Mapping[str, np.ndarray], n: int, k: int) -> float:
        zero = int(t["weight_zero_point"][n, 0]) if zeros else 0
        flat = t["weight_scale"].reshape(-1)
        return (int(t["weight"][n, k]) - zero) * float(flat[n % len(flat)])

    return stored, slow


def e4m3(byte: int) -> float:
    """Sign, four bits of exponent with an offset of 7, three of mantissa; an exponent of 0 has no leading one."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if byte & 128 else value


def finite_fp8(*shape: int) -> torch.Tensor:
    bytes_ = permuted(shape, torch.uint8)
    return torch.where(bytes_ & 127 == 127, bytes_ - 1, bytes_).view(torch.float8_e4m3fn)


def fp8(name: str, scales: tuple[int, ...], block: tuple[int, int]) -> tuple[Stored, Slow]:
    stored = {"weight": finite_fp8(ROWS, COLUMNS), name: distinct(*scales), "input_scale": torch.tensor(5.0)}

    def slow(t: Mapping[str, np.ndarray], n: int, k: int) -> float:
        by_block = t[name].reshape(-(-ROWS // block[0]), -1)
        return e4m3(int(t["weight"][n, k])) * float(by_block[n // block[0], k // block[1]])

    return stored, slow


def fp4(codes: str, scales: torch.Tensor, beside: Stored, factor: Callable[[Any, int, int], float]) -> Any:
    stored = {codes: permuted((ROWS, COLUMNS // 2), torch.uint8), "weight_scale": scales, **beside}

    def slow(t: Mapping[str, np.ndarray], n: int, k: int) -> float:
        code = bits_of(t[codes][n, k // 2], k % 2, 4)
        value = -E2M1[code - 8] if code >= 8 else E2M1[code]
        return value * factor(t, n, k)

    return stored, slow


def nvfp4(reciprocal: bool) -> tuple[Stored, Slow]:
    name = "weight_global_scale" if reciprocal else "weight_scale_2"
    scales = (permuted((ROWS, COLUMNS // 16), torch.uint8) % 126).view(torch.float8_e4m3fn)

    def factor(t: Mapping[str, np.ndarray], n: int, k: int) -> float:
        of_all = float(t[name].reshape(()))
        return e4m3(int(t["weight_scale"][n, k // 16])) * (1 / of_all if reciprocal else of_all)

    beside = {name: torch.tensor([2752.0]) if reciprocal else torch.tensor(0.0073)}
    beside["input_global_scale" if reciprocal else "input_scale"] = torch.tensor([5.0])
    return fp4("weight_packed" if reciprocal else "weight", scales, beside, factor)


def mxfp4() -> tuple[Stored, Slow]:
    scales = (permuted((ROWS, COLUMNS // 32), torch.uint8) % 40) + 100

    def factor(t: Mapping[str, np.ndarray], n: int, k: int) -> float:
        return 2.0 ** (int(t["weight_scale"][n, k // 32]) - 127)

    return fp4("weight_packed", scales, {}, factor)


@dataclass(frozen=True)
class Layout:
    stored: StoredFormat
    toy: tuple[Stored, Slow]


LAYOUTS: Mapping[str, Layout] = {
    "gptq": Layout(StoredInt("gptq", GROUP), gptq(4, GROUP, "middle")),
    "gptq zeros": Layout(StoredInt("gptq", GROUP, zeros=True), gptq(4, GROUP, "less one")),
    "gptq v2 zeros": Layout(StoredInt("gptq_v2", GROUP, zeros=True), gptq(4, GROUP, "as stored")),
    "gptq rows": Layout(StoredInt("gptq", WHOLE), gptq(4, WHOLE, "middle")),
    "gptq 8": Layout(StoredInt("gptq", GROUP, bits=8), gptq(8, GROUP, "middle")),
    "gptq 8 zeros": Layout(StoredInt("gptq", GROUP, True, 8), gptq(8, GROUP, "less one")),
    "gptq 8 v2 rows": Layout(StoredInt("gptq_v2", WHOLE, True, 8), gptq(8, WHOLE, "as stored")),
    "awq": Layout(StoredInt("awq", GROUP, zeros=True), awq()),
    "pack-quantized": Layout(StoredInt("pack-quantized", GROUP), packed(4, GROUP, False)),
    "pack-quantized zeros": Layout(StoredInt("pack-quantized", GROUP, True), packed(4, GROUP, True)),
    "pack-quantized rows": Layout(StoredInt("pack-quantized", WHOLE), packed(4, WHOLE, False)),
    "pack-quantized 8": Layout(StoredInt("pack-quantized", GROUP, bits=8), packed(8, GROUP, False)),
    "pack-quantized 8 zeros": Layout(StoredInt("pack-quantized", WHOLE, True, 8), packed(8, WHOLE, True)),
    "int-quantized": Layout(StoredInt("int-quantized", WHOLE, bits=8), int_bytes(False, (ROWS, 1))),
    "int-quantized zeros": Layout(StoredInt("int-quantized", WHOLE, True, 8), int_bytes(True, (ROWS, 1))),
    "int-quantized tensor": Layout(StoredInt("int-quantized", WHOLE, bits=8), int_bytes(False, (1,))),
    "fp8": Layout(StoredFp8((8, 32)), fp8("weight_scale_inv", (3, 4), (8, 32))),
    "fp8 named otherwise": Layout(StoredFp8((8, 32)), fp8("weight_scale", (3, 1, 4, 1), (8, 32))),
    "fp8 group": Layout(StoredFp8((1, 32)), fp8("weight_scale", (ROWS, 4), (1, 32))),
    "fp8 channel": Layout(StoredFp8((1, WHOLE)), fp8("weight_scale", (ROWS, 1), (1, COLUMNS))),
    "fp8 flat channel": Layout(StoredFp8((1, WHOLE)), fp8("weight_scale", (ROWS,), (1, COLUMNS))),
    "fp8 tensor": Layout(StoredFp8((WHOLE, WHOLE)), fp8("weight_scale", (), (ROWS, COLUMNS))),
    "fp8 tensor list": Layout(StoredFp8((WHOLE, WHOLE)), fp8("weight_scale_inv", (1,), (ROWS, COLUMNS))),
    "nvfp4": Layout(StoredFp4("nvfp4"), nvfp4(False)),
    "nvfp4-pack-quantized": Layout(StoredFp4("nvfp4-pack-quantized"), nvfp4(True)),
    "mxfp4-pack-quantized": Layout(StoredFp4("mxfp4-pack-quantized"), mxfp4()),
}


def read(stored: StoredFormat, parts: Mapping[str, Stored], folder: Path) -> torch.Tensor:
    """What the reader makes of some matrices below one another."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({}))
    tensors = {f"{part}.{name}": value for part, found in parts.items() for name, value in found.items()}
    save_file(tensors, folder / "model.safetensors")
    scales = next(name for name in stored.scale_names if any(name in found for found in parts.values()))
    form = weight_format(stored, "float32", scales)
    kind = FORMATS[type(form)]
    buffers = form.buffers("p", ROWS * len(parts), COLUMNS, "float32", "target weights")
    weight = kind.weight(form, Tensors(buffers, CPU).take(buffers), torch.float32)
    fill_places(Checkpoint.open(folder), tensors, kind.places(weight, form, [Part(part, ROWS) for part in parts]))
    return decode(weight, torch.empty(ROWS * len(parts), COLUMNS))


def slowly(stored: Stored, slow: Slow) -> torch.Tensor:
    fp8 = torch.float8_e4m3fn
    arrays = {name: (each.view(torch.uint8) if each.dtype == fp8 else each) for name, each in stored.items()}
    numpy = {name: (each.float() if each.is_floating_point() else each).numpy() for name, each in arrays.items()}
    return torch.tensor([[slow(numpy, n, k) for k in range(COLUMNS)] for n in range(ROWS)], dtype=torch.float32)


def another(name: str, value: torch.Tensor) -> torch.Tensor:
    """Other numbers for a tensor of the same kind."""
    if name == "g_idx":
        return value.clone()
    return value * 3 if value.numel() == 1 else value.flip(0).contiguous()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_matrix_is_what_its_layout_says(name: str, tmp_path: Path) -> None:
    """Alone, and below another one that has other numbers."""
    layout = LAYOUTS[name]
    stored, slow = layout.toy
    other = {key: another(key, value) for key, value in stored.items()}
    want = torch.cat((slowly(other, slow), slowly(stored, slow)))
    assert want.std() > 0 and len(want.unique()) > 100
    found = read(layout.stored, {"a": other, "b": stored}, tmp_path)
    assert torch.allclose(found, want, rtol=1e-6, atol=0)
    codes = next(key for key in stored if key.endswith(("weight", "weight_packed")))
    form = weight_format(layout.stored)
    rows, columns = stored[codes].shape
    assert stored_size(form, (rows, columns)) == (ROWS, COLUMNS)


def swapped(tensor: torch.Tensor) -> torch.Tensor:
    bytes_ = tensor.view(torch.uint8)
    return ((bytes_ << 4) | (bytes_ >> 4)).view(tensor.dtype)


def backwards(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each word the other way round."""
    return tensor.view(torch.uint8).unflatten(-1, (-1, 4)).flip(-1).flatten(-2).contiguous().view(tensor.dtype)


MISTAKES: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor]]] = [
    *((name, "qweight", swapped) for name in ("gptq", "gptq zeros", "gptq v2 zeros", "gptq rows", "awq")),
    *((name, "qzeros", swapped) for name in ("gptq zeros", "gptq v2 zeros", "awq")),
    *((name, "weight_packed", swapped) for name in ("pack-quantized", "pack-quantized zeros", "pack-quantized rows")),
    ("pack-quantized zeros", "weight_zero_point", swapped),
    *((name, "qweight", backwards) for name in ("gptq 8", "gptq 8 zeros")),
    ("gptq 8 zeros", "qzeros", backwards),
    ("pack-quantized 8", "weight_packed", backwards),
    ("pack-quantized 8 zeros", "weight_zero_point", backwards),
    ("gptq zeros", "qzeros", lambda words: words + 0x11111111),
    ("gptq v2 zeros", "qzeros", lambda words: words - 0x11111111),
    ("gptq 8 zeros", "qzeros", lambda words: words + 0x01010101),
    ("awq", "qzeros", lambda words: words + 0x11111111),
    ("int-quantized", "weight", lambda codes: (codes.view(torch.uint8) ^ 0x80).view(torch.int8)),
    ("int-quantized zeros", "weight_zero_point", torch.zeros_like),
    ("fp8", "weight_scale_inv", lambda scales: 1 / scales),
    ("fp8 channel", "weight_scale", lambda scales: scales.flip(0)),
    ("nvfp4", "weight", swapped),
    ("nvfp4", "weight_scale_2", lambda scale: 1 / scale),
    ("nvfp4-pack-quantized", "weight_packed", swapped),
    ("nvfp4-pack-quantized", "weight_global_scale", lambda scale: 1 / scale),
    ("mxfp4-pack-quantized", "weight_packed", swapped),
    ("mxfp4-pack-quantized", "weight_scale", lambda scales: scales + 1),
]


@pytest.mark.parametrize(("name", "tensor", "mistake"), MISTAKES)
def test_a_layout_taken_for_another_gives_other_numbers(
    name: str, tensor: str, mistake: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    """The comparison sees each of these mistakes."""
    layout = LAYOUTS[name]
    stored, slow = layout.toy
    found = read(layout.stored, {"a": {**stored, tensor: mistake(stored[tensor]).contiguous()}}, tmp_path)
    assert not torch.allclose(found, slowly(stored, slow), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["gptq", "awq", "pack-quantized", "int-quantized", "fp8", "fp8 tensor"])
def test_scales_may_be_negative(name: str, tmp_path: Path) -> None:
    """About half of AutoRound's are."""
    layout = LAYOUTS[name]
    stored, slow = layout.toy
    scales = next(each for each in layout.stored.scale_names if each in stored)
    negative = {**stored, scales: -stored[scales]}
    assert torch.allclose(read(layout.stored, {"a": negative}, tmp_path), slowly(negative, slow), rtol=1e-6, atol=0)


def test_gptq_files_of_both_versions_are_one_matrix(tmp_path: Path) -> None:
    stored, _ = LAYOUTS["gptq zeros"].toy
    second = {**stored, "qzeros": stored["qzeros"] + 0x11111111}
    first = read(StoredInt("gptq", GROUP, zeros=True), {"a": stored}, tmp_path / "1")
    assert torch.equal(first, read(StoredInt("gptq_v2", GROUP, zeros=True), {"a": second}, tmp_path / "2"))


def test_nvfp4_files_of_both_producers_are_one_matrix(tmp_path: Path) -> None:
    """A power of two, whose reciprocal is exact."""
    stored, _ = LAYOUTS["nvfp4"].toy
    codes, scales = stored["weight"], stored["weight_scale"]
    theirs = {"weight": codes, "weight_scale": scales, "weight_scale_2": torch.tensor(2**-7)}
    others = {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": torch.tensor([2.0**7])}
    first = read(StoredFp4("nvfp4"), {"a": theirs}, tmp_path / "1")
    assert torch.equal(first, read(StoredFp4("nvfp4-pack-quantized"), {"a": others}, tmp_path / "2"))


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("nvfp4-pack-quantized", {"weight_global_scale": torch.zeros(1)}, "a.weight_global_scale is zero"),
        ("nvfp4", {"weight_scale_2": torch.ones(2)}, r"a.weight_scale_2 has shape \[2\], expected \[1\]"),
        ("mxfp4-pack-quantized", {"weight_scale": torch.full((ROWS, 4), 255, dtype=torch.uint8)}, "holds NaN"),
        ("fp8 channel", {"weight_scale": torch.ones(7)}, r"weight_scale has shape \[7\], expected \[24, 1\]"),
        ("int-quantized", {"weight": torch.ones(ROWS, COLUMNS)}, "stored as F32, expected torch.int8"),
        ("gptq", {"g_idx": torch.arange(COLUMNS).int() % 4}, "a.g_idx scatters the groups"),
        ("gptq rows", {"g_idx": torch.arange(COLUMNS).int() // 64}, "a.g_idx scatters the groups"),
        ("pack-quantized", {"weight_g_idx": torch.arange(COLUMNS).int()}, "does not know: a.weight_g_idx"),
        ("nvfp4", {"pre_quant_scale": torch.ones(COLUMNS)}, "does not know: a.pre_quant_scale"),
    ],
)
def test_what_does_not_belong_is_named(name: str, changes: Stored, said: str, tmp_path: Path) -> None:
    stored, _ = LAYOUTS[name].toy
    with pytest.raises(CheckpointError, match=said):
        read(LAYOUTS[name].stored, {"a": {**stored, **changes}}, tmp_path)


@pytest.mark.parametrize("stored", [StoredInt("gptq", GROUP), StoredInt("awq", GROUP, True), StoredFp4("nvfp4")])
def test_groups_that_do_not_divide_a_matrix_are_refused_by_its_name(stored: StoredFormat) -> None:
    form = weight_format(stored)
    kind = FORMATS[type(form)]
    buffers = form.buffers("p", ROWS, 72, "float32", "target weights")
    weight = kind.weight(form, Tensors(buffers, CPU).take(buffers), torch.float32)
    with pytest.raises(CheckpointError, match="^a.q_proj: groups of (16|32) do not divide a matrix of about 72 inputs"):
        kind.places(weight, form, [Part("a.q_proj", ROWS)])
