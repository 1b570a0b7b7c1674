"""Weights of published quantised checkpoints: int4 in groups and fp8 in blocks, read from the dialects of their files.

Where ``fragment_format`` has no kernels for them, products are computed by decoding, slice by slice: not fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from dflash_local.errors import CheckpointError
from dflash_local.kernels.fragment_packing import FragmentWeight
from dflash_local.kernels.quantized_weight import INT4_ZERO, Fp8Weight, IntWeight, codes_of
from dflash_local.layout.linear import DEQUANTIZED_SLICE, INT4_PER_WORD, Fp8Blocks, Int4Groups, Part, part_rows
from dflash_local.models.fused import fragment_format
from dflash_local.models.place import Conversion, Place, Places

GPTQ_ZERO_OFFSET = 0x11111111  # GPTQ's first version stores each zero point of a word less one
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of eight neighbouring columns
INT4_SPREAD = 4.64  # of random codes around 8
FP8_SPREAD = 64.0  # of random codes: seven times as much is the largest there is


def row_slices(weight: IntWeight | Fp8Weight) -> Iterator[slice]:
    """The rows of a weight in slices that take little memory decoded."""
    rows, columns = weight.shape
    step = max(1, DEQUANTIZED_SLICE // max(columns, 1))
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


def decode(weight: IntWeight | Fp8Weight, out: torch.Tensor) -> torch.Tensor:
    """What a weight stands for, into ``out`` [N, K]."""
    for rows in row_slices(weight):
        out[rows] = weight.dequantized(rows)
    return out


class _Decoded:
    """Products with what the codes stand for, in the activations' dtype."""

    has_library = False

    def finish(self, weight: IntWeight | Fp8Weight) -> Any:
        """In fragments where the card has kernels for it."""
        return FragmentWeight.of(weight, in_place=True) if fragment_format.takes(weight) else weight

    def linear(
        self, x: torch.Tensor, weight: Any, out: torch.Tensor, config: Any, residual: torch.Tensor | None
    ) -> torch.Tensor:
        product = self.prefill(x, weight)
        return out.copy_(product) if residual is None else torch.add(residual, product, out=out)

    def swiglu(self, x: torch.Tensor, weight: Any, out: torch.Tensor, config: Any) -> torch.Tensor:
        gate, up = self.prefill(x, weight).chunk(2, -1)
        return torch.mul(F.silu(gate, inplace=True), up, out=out)

    def prefill(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        out = x.new_empty(len(x), weight.shape[0])
        for rows in row_slices(weight):
            torch.mm(x, weight.dequantized(rows).to(x.dtype).t(), out=out[:, rows])
        return out

    def candidates(self, weight: Any, paired: bool, rows: int, shared_memory: int) -> list[Any]:
        return []

    def penalty(self, config: Any) -> float:
        return 1.0


class _Int4(_Decoded):
    def weight(self, form: Int4Groups, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> IntWeight:
        codes, scales, *zeros = tensors
        if scales.shape[1] * form.group_size != codes.shape[1] * INT4_PER_WORD:
            raise CheckpointError(
                f"groups of {form.group_size} do not divide a matrix of about {codes.shape[1] * INT4_PER_WORD} inputs",
                "config.json and weights do not belong together: download the target again",
            )
        return IntWeight(codes, scales, zeros[0] if zeros else None, dtype)

    def places(self, weight: IntWeight, form: Int4Groups, parts: Sequence[Part]) -> Places:
        one = {"pack-quantized": _pack_quantized_places, "awq": _awq_places}.get(form.dialect, _gptq_places)
        places: Places = {}
        for part, rows in part_rows(parts):
            found = one(self.rows_of(weight, rows), form, part.module)
            places |= {f"{part.module}.{name}": place for name, place in found.items()}
        return places

    def rows_of(self, weight: IntWeight, rows: slice) -> IntWeight:
        zeros = None if weight.zeros is None else weight.zeros[rows]
        return IntWeight(weight.codes[rows], weight.scales[rows], zeros, weight.dtype)

    def rows(self, weight: IntWeight, stop: int) -> IntWeight:
        return self.rows_of(weight, slice(0, stop))

    def randomize(self, weight: IntWeight, generator: torch.Generator) -> None:
        weight.codes.random_(-(2**31), 2**31, generator=generator)
        weight.scales.fill_(weight.shape[1] ** -0.5 / INT4_SPREAD)
        if weight.zeros is not None:
            weight.zeros.random_(INT4_ZERO - 1, INT4_ZERO + 2, generator=generator)


class _Fp8(_Decoded):
    def weight(self, form: Fp8Blocks, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> Fp8Weight:
        codes, scales = tensors
        return Fp8Weight(codes, scales, form.block, dtype)

    def places(self, weight: Fp8Weight, form: Fp8Blocks, parts: Sequence[Part]) -> Places:
        places: Places = {}
        for part, rows in part_rows(parts):
            blocks = slice(rows.start // form.block[0], -(-rows.stop // form.block[0]))
            found: dict[str, Place | None] = {
                "weight": weight.codes[rows],
                "weight_scale_inv": weight.scales[blocks],  # multiplied, despite its name
                "input_scale": None,  # of activations, which stay in 16 bits
            }
            places |= {f"{part.module}.{name}": place for name, place in found.items()}
        return places

    def rows(self, weight: Fp8Weight, stop: int) -> Fp8Weight:
        blocks = -(-stop // weight.block[0])
        return Fp8Weight(weight.codes[:stop], weight.scales[:blocks], weight.block, weight.dtype)

    def randomize(self, weight: Fp8Weight, generator: torch.Generator) -> None:
        for rows in row_slices(weight):
            codes = weight.codes[rows]
            normal = torch.randn(codes.shape, generator=generator, device=codes.device).mul_(FP8_SPREAD)
            codes.copy_(normal.clamp_(-448, 448))
        weight.scales.fill_(weight.shape[1] ** -0.5 / FP8_SPREAD)


INT4, FP8 = _Int4(), _Fp8()


def _pack_quantized_places(weight: IntWeight, form: Int4Groups, module: str) -> Places:
    """Words lie along the input as ours do; those of zero points along the output."""
    places: Places = {"weight_packed": weight.codes, "weight_scale": weight.scales, "weight_shape": None}
    if weight.zeros is not None:
        rows, groups = weight.zeros.shape
        take = partial(_take_zeros, weight.zeros, lambda words: codes_of(words, 4).transpose(1, 2).flatten(0, 1))
        places["weight_zero_point"] = Conversion((-(-rows // INT4_PER_WORD), groups), torch.int32, take)
    return places


def _gptq_places(weight: IntWeight, form: Int4Groups, module: str) -> Places:
    """Words lie along the input, too, but the matrices stand the other way round."""
    rows, inputs = weight.shape

    def check_order(groups: torch.Tensor) -> None:
        if not torch.equal(groups.long(), torch.arange(inputs, device=groups.device) // form.group_size):
            raise CheckpointError(
                f"{module}.g_idx scatters the groups of its matrix (desc_act), which is not read",
                "take a variant that was quantised without desc_act",
            )

    places: Places = {"qweight": weight.codes.t(), "scales": weight.scales.t(), "qzeros": None}
    places["g_idx"] = Conversion((inputs,), torch.int32, check_order, optional=True)
    if weight.zeros is not None:
        offset = GPTQ_ZERO_OFFSET if form.dialect == "gptq" else 0
        take = partial(_take_zeros, weight.zeros, lambda words: codes_of(words + offset, 4).flatten(1).t())
        shape = (weight.scales.shape[1], -(-rows // INT4_PER_WORD))
        places["qzeros"] = Conversion(shape, torch.int32, take)
    return places


def _awq_places(weight: IntWeight, form: Int4Groups, module: str) -> Places:
    """Words lie along the output, their columns in an order of their own."""
    rows, inputs = weight.shape
    words, groups = -(-rows // INT4_PER_WORD), weight.scales.shape[1]
    places: Places = {"scales": weight.scales.t()}
    places["qweight"] = Conversion((inputs, words), torch.int32, partial(_take_awq_codes, weight.codes))
    if weight.zeros is not None:
        take = partial(_take_zeros, weight.zeros, lambda found: codes_of(found, 4)[..., AWQ_ORDER].flatten(1).t())
        places["qzeros"] = Conversion((groups, words), torch.int32, take)
    return places


def _take_awq_codes(codes: torch.Tensor, words: torch.Tensor) -> None:
    """Words [K, N / 8] along the output to codes [N, K / 8] along the input, some inputs at a time."""
    outputs, step = len(codes), max(1, DEQUANTIZED_SLICE // (len(codes) * INT4_PER_WORD)) * INT4_PER_WORD
    for begin in range(0, len(words), step):
        nibbles = codes_of(words[begin : begin + step], 4)[..., AWQ_ORDER].flatten(1)[:, :outputs]
        eights = nibbles.view(-1, INT4_PER_WORD, outputs)
        packed = torch.zeros_like(eights[:, 0])
        for place in range(INT4_PER_WORD):
            packed |= eights[:, place] << (4 * place)
        first = begin // INT4_PER_WORD
        codes[:, first : first + len(packed)] = packed.t()


def _take_zeros(zeros: torch.Tensor, unpacked: Callable[[torch.Tensor], torch.Tensor], words: torch.Tensor) -> None:
    zeros.copy_(unpacked(words)[: len(zeros)])
