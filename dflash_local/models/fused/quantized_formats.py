"""Weights of quantised checkpoints, read from their files' dialects; without kernels decoded slice by slice."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Protocol

import torch

from dflash_local.config.quantization import WHOLE, IntDialect
from dflash_local.errors import CheckpointError
from dflash_local.kernels.fragment_packing import FragmentWeight, has_room
from dflash_local.kernels.quantized_weight import (
    E2M1,
    Fp4Weight,
    Fp8Weight,
    GgufWeight,
    IntWeight,
    codes_of,
    row_slices,
    words_of,
)
from dflash_local.kernels.skinny_gemm import gated, multiply
from dflash_local.layout.linear import (
    DEQUANTIZED_SLICE,
    INT4_PER_WORD,
    WORD_BITS,
    Fp4Groups,
    Fp8Blocks,
    IntGroups,
    MatrixPart,
    matrix_rows,
)
from dflash_local.models.fused import fragment_kernels
from dflash_local.models.place import Conversion, Places

CodedFormat = IntGroups | Fp8Blocks | Fp4Groups
Coded = IntWeight | Fp8Weight | Fp4Weight | GgufWeight
GPTQ_ZERO_OFFSET = {4: 0x11111111, 8: 0x01010101}  # GPTQ's first version stores each zero point of a word less one
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of eight neighbouring columns
SIGN = 0x80  # flipped, a signed byte is the code of 128 more
INT_SPREAD = {4: 4.64, 8: 73.9}  # root mean square of random codes around the middle one
FP8_SPREAD = 64.0  # of random codes: seven times as much is the largest there is
FP4_SPREAD = (sum(value**2 for value in E2M1) / len(E2M1)) ** 0.5
E8M0_BIAS, E8M0_NAN = 127, 255
# Scales of activations, which stay in 16 bits here: see ``config.quantization.Quantization.ignored``.
OF_ACTIVATIONS: Places = dict.fromkeys(("input_scale", "input_global_scale", "input_zero_point", "output_scale"))


def decode(weight: Coded, out: torch.Tensor) -> torch.Tensor:
    """Write what a weight stands for into ``out`` [N, K]."""
    for rows in row_slices(weight):
        out[rows] = weight.dequantized(rows)
    return out


class Decoded:
    """Products with what the codes stand for, in the activations' dtype."""

    has_library = False

    def finish(self, weight: Coded) -> Any:
        """Pack fragments where the card has kernels for it."""
        return FragmentWeight.of(weight, has_room(weight)) if fragment_kernels.takes(weight) else weight

    def linear(
        self, x: torch.Tensor, weight: Any, out: torch.Tensor, config: Any, residual: torch.Tensor | None
    ) -> torch.Tensor:
        product = self.prefill(x, weight)
        return out.copy_(product) if residual is None else torch.add(residual, product, out=out)

    def swiglu(self, x: torch.Tensor, weight: Any, out: torch.Tensor, config: Any) -> torch.Tensor:
        return gated(self.prefill(x, weight), out)

    def prefill(self, x: torch.Tensor, weight: Any, residual: torch.Tensor | None = None) -> torch.Tensor:
        out = x.new_empty(len(x), weight.shape[0]) if residual is None else residual
        for rows in row_slices(weight):
            multiply(x, weight.dequantized(rows).to(x.dtype), out[:, rows], residual is not None)
        return out

    def candidates(self, weight: Any, paired: bool, rows: int, shared_memory: int) -> list[Any]:
        return []

    def rows_of(self, weight: Any, rows: slice) -> Any:
        raise NotImplementedError

    def rows(self, weight: Any, stop: int) -> Any:
        return self.rows_of(weight, slice(0, stop))


class _Int(Decoded):
    def weight(self, form: IntGroups, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> IntWeight:
        codes, scales, *zeros = tensors
        return IntWeight(codes, scales, zeros[0] if zeros else None, dtype, form.stored.bits)

    def places(self, weight: IntWeight, form: IntGroups, parts: Sequence[MatrixPart]) -> Places:
        _check_groups(weight, form.stored.group_size, parts)
        return _part_places(DIALECTS[form.stored.dialect], self.rows_of, weight, form, parts)

    def rows_of(self, weight: IntWeight, rows: slice) -> IntWeight:
        zeros = None if weight.zeros is None else weight.zeros[rows]
        return IntWeight(weight.codes[rows], weight.scales[rows], zeros, weight.dtype, weight.bits)

    def randomize(self, weight: IntWeight, generator: torch.Generator) -> None:
        weight.codes.random_(-(2**31), 2**31, generator=generator)
        weight.scales.fill_(weight.shape[1] ** -0.5 / INT_SPREAD[weight.bits])
        if weight.zeros is not None:
            middle = 2 ** (weight.bits - 1)
            weight.zeros.random_(middle - 1, middle + 2, generator=generator)


class _Fp8(Decoded):
    def weight(self, form: Fp8Blocks, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> Fp8Weight:
        codes, scales = tensors
        return Fp8Weight(codes, scales, (form.rows, form.stored.block[1] or codes.shape[1]), dtype)

    def places(self, weight: Fp8Weight, form: Fp8Blocks, parts: Sequence[MatrixPart]) -> Places:
        def one(rows: Fp8Weight, form: Fp8Blocks, module: str) -> Places:
            return {"weight": rows.codes, form.scales: _spread(rows.scales)}

        return _part_places(one, self.rows_of, weight, form, parts)

    def rows_of(self, weight: Fp8Weight, rows: slice) -> Fp8Weight:
        """Return rows from the first of a block."""
        blocks = slice(rows.start // weight.block[0], -(-rows.stop // weight.block[0]))
        return Fp8Weight(weight.codes[rows], weight.scales[blocks], weight.block, weight.dtype)

    def randomize(self, weight: Fp8Weight, generator: torch.Generator) -> None:
        for rows in row_slices(weight):
            codes = weight.codes[rows]
            normal = torch.randn(codes.shape, generator=generator, device=codes.device).mul_(FP8_SPREAD)
            codes.copy_(normal.clamp_(-448, 448))
        weight.scales.fill_(weight.shape[1] ** -0.5 / FP8_SPREAD)


class _Fp4(Decoded):
    def weight(self, form: Fp4Groups, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> Fp4Weight:
        codes, scales, *row_scales = tensors
        return Fp4Weight(codes, scales, row_scales[0] if row_scales else None, dtype)

    def places(self, weight: Fp4Weight, form: Fp4Groups, parts: Sequence[MatrixPart]) -> Places:
        _check_groups(weight, form.stored.group_size, parts)
        return _part_places(_fp4_places, self.rows_of, weight, form, parts)

    def rows_of(self, weight: Fp4Weight, rows: slice) -> Fp4Weight:
        row_scales = None if weight.row_scales is None else weight.row_scales[rows]
        return Fp4Weight(weight.codes[rows], weight.scales[rows], row_scales, weight.dtype)

    def randomize(self, weight: Fp4Weight, generator: torch.Generator) -> None:
        weight.codes.random_(-(2**31), 2**31, generator=generator)
        spread = weight.shape[1] ** -0.5 / FP4_SPREAD
        if weight.row_scales is None:
            weight.scales.fill_(round(math.log2(spread)) + E8M0_BIAS)
        else:
            weight.scales.fill_(1)
            weight.row_scales.fill_(spread)


INT, FP8, FP4 = _Int(), _Fp8(), _Fp4()


def _check_groups(weight: IntWeight | Fp4Weight, group_size: int, parts: Sequence[MatrixPart]) -> None:
    columns = weight.shape[1]
    if group_size != WHOLE and weight.scales.shape[1] * group_size != columns:
        raise CheckpointError(
            f"{parts[0].module}: groups of {group_size} do not divide a matrix of about {columns} inputs",
            "config.json and weights do not belong together: download it again",
        )


def _part_places(
    one: Callable[[Any, Any, str], Places],
    rows_of: Callable[[Any, slice], Coded],
    weight: Coded,
    form: CodedFormat,
    parts: Sequence[MatrixPart],
) -> Places:
    """Return the places of each part's tensors, by ``MODULE.NAME``. ``one``: of one part's rows and its module."""
    places: Places = {}
    for part, rows in matrix_rows(parts):
        found = {**OF_ACTIVATIONS, **one(rows_of(weight, rows), form, part.module)}
        places |= {f"{part.module}.{name}": place for name, place in found.items()}
    return places


def _spread(scales: torch.Tensor) -> Conversion:
    """Return place of scales [rows, columns] of which a file may have one, or them with other axes of one element."""

    def take(stored: torch.Tensor) -> None:
        scales.copy_(stored.reshape(scales.shape if stored.numel() == scales.numel() else (1, 1)))

    return Conversion(tuple(scales.shape), torch.float32, take, spread=True)


def _fp4_places(weight: Fp4Weight, form: Fp4Groups, module: str) -> Places:
    """Return the places of bytes of two codes, the first one in the lower half, as in our words."""
    codes = weight.codes.view(torch.uint8)
    if weight.row_scales is None:
        take = partial(_take_exponents, weight.scales, module)
        return {"weight_packed": codes, "weight_scale": Conversion(tuple(weight.scales.shape), torch.uint8, take)}
    reciprocal = form.stored.dialect == "nvfp4-pack-quantized"
    of_matrix = partial(_take_global_scale, weight.row_scales, module, reciprocal)
    return {
        "weight_packed" if reciprocal else "weight": codes,
        "weight_scale": weight.scales,
        "weight_global_scale" if reciprocal else "weight_scale_2": Conversion(
            (1,), torch.float32, of_matrix, spread=True
        ),
    }


def check_exponents(name: str, stored: torch.Tensor) -> None:
    """Raise CheckpointError where a scale of MXFP4 is NaN; says in which tensor."""
    if bool((stored == E8M0_NAN).any()):
        raise CheckpointError(f"tensor {name} holds NaN", "download it again")


def _take_exponents(scales: torch.Tensor, module: str, stored: torch.Tensor) -> None:
    check_exponents(f"{module}.weight_scale", stored)
    scales.copy_(stored)


def _take_global_scale(row_scales: torch.Tensor, module: str, reciprocal: bool, stored: torch.Tensor) -> None:
    scale = float(stored.reshape(()))
    if reciprocal and scale == 0:
        raise CheckpointError(f"tensor {module}.weight_global_scale is zero", "download it again")
    row_scales.copy_(1 / stored.float().reshape(1) if reciprocal else stored.reshape(1))


class _DialectPlaces(Protocol):
    def __call__(self, weight: IntWeight, form: IntGroups, module: str) -> Places: ...


def _pack_quantized_places(weight: IntWeight, form: IntGroups, module: str) -> Places:
    """Return the places: words lie along the input as ours do; those of zero points along the output."""
    places: Places = {"weight_packed": weight.codes, form.scales: _spread(weight.scales), "weight_shape": None}
    if weight.zeros is not None:
        rows, groups = weight.zeros.shape
        bits = weight.bits
        take = partial(_take_zeros, weight.zeros, lambda words: codes_of(words, bits).transpose(1, 2).flatten(0, 1))
        places["weight_zero_point"] = Conversion((-(-rows * bits // WORD_BITS), groups), torch.int32, take)
    return places


def _int_quantized_places(weight: IntWeight, form: IntGroups, module: str) -> Places:
    """Return the places of a signed byte each, in rows."""
    flipped = partial(_take_signed, weight.codes.view(torch.uint8))
    places: Places = {form.scales: _spread(weight.scales)}
    places["weight"] = Conversion(tuple(weight.shape), torch.int8, flipped)
    if weight.zeros is not None:
        take = partial(_take_signed, weight.zeros)
        places["weight_zero_point"] = Conversion(tuple(weight.zeros.shape), torch.int8, take, spread=True)
    return places


def _take_signed(codes: torch.Tensor, stored: torch.Tensor) -> None:
    bytes_ = stored.view(torch.uint8)
    codes.copy_(bytes_.reshape(codes.shape if bytes_.numel() == codes.numel() else (1, 1)))
    codes.bitwise_xor_(SIGN)


def _gptq_places(weight: IntWeight, form: IntGroups, module: str) -> Places:
    """Return the places: words lie along the input, too, but the matrices stand the other way round."""
    rows, inputs = weight.shape

    def check_order(groups: torch.Tensor) -> None:
        if not torch.equal(groups.cpu(), _groups_in_order(inputs, weight.group_size)):
            raise CheckpointError(
                f"{module}.g_idx scatters the groups of its matrix (desc_act), which is not read",
                "take a variant that was quantised without desc_act",
            )

    places: Places = {"qweight": weight.codes.t(), form.scales: weight.scales.t(), "qzeros": None}
    places["g_idx"] = Conversion((inputs,), torch.int32, check_order, optional=True, on_host=True)
    if weight.zeros is not None:
        bits = weight.bits
        offset = GPTQ_ZERO_OFFSET[bits] if form.stored.dialect == "gptq" else 0
        take = partial(_take_zeros, weight.zeros, lambda words: codes_of(words + offset, bits).flatten(1).t())
        shape = (weight.scales.shape[1], -(-rows * bits // WORD_BITS))
        places["qzeros"] = Conversion(shape, torch.int32, take)
    return places


@cache  # a mixture has tens of thousands of matrices, of two widths
def _groups_in_order(inputs: int, group_size: int) -> torch.Tensor:
    """Return the group of each input [K] where none are scattered, int32."""
    return torch.arange(inputs, dtype=torch.int32) // group_size


def _awq_places(weight: IntWeight, form: IntGroups, module: str) -> Places:
    """Return the places: words lie along the output, their columns in an order of their own."""
    rows, inputs = weight.shape
    words, groups = -(-rows // INT4_PER_WORD), weight.scales.shape[1]
    places: Places = {form.scales: weight.scales.t()}
    places["qweight"] = Conversion((inputs, words), torch.int32, partial(_take_awq_codes, weight.codes))
    if weight.zeros is not None:
        take = partial(_take_zeros, weight.zeros, lambda found: codes_of(found, 4)[..., AWQ_ORDER].flatten(1).t())
        places["qzeros"] = Conversion((groups, words), torch.int32, take)
    return places


def _take_awq_codes(codes: torch.Tensor, words: torch.Tensor) -> None:
    """Turn words [K, N / 8] along the output into codes [N, K / 8] along the input, some inputs at a time."""
    outputs, step = len(codes), max(1, DEQUANTIZED_SLICE // (len(codes) * INT4_PER_WORD)) * INT4_PER_WORD
    for begin in range(0, len(words), step):
        nibbles = codes_of(words[begin : begin + step], 4)[..., AWQ_ORDER].flatten(1)[:, :outputs]
        packed = words_of(nibbles.view(-1, INT4_PER_WORD, outputs).transpose(1, 2), 4)
        first = begin // INT4_PER_WORD
        codes[:, first : first + len(packed)] = packed.t()


def _take_zeros(zeros: torch.Tensor, unpacked: Callable[[torch.Tensor], torch.Tensor], words: torch.Tensor) -> None:
    zeros.copy_(unpacked(words)[: len(zeros)])


DIALECTS: Mapping[IntDialect, _DialectPlaces] = {
    "gptq": _gptq_places,
    "gptq_v2": _gptq_places,
    "awq": _awq_places,
    "pack-quantized": _pack_quantized_places,
    "int-quantized": _int_quantized_places,
}
