"""Quantised weights as they lie in memory, and what they stand for: row-major along K, one order of codes for all.

Dialects of checkpoints are undone where they are read, and what a kernel wants is packed from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar

import torch

from dflash_local.config.quantization import SUPER_BLOCK
from dflash_local.layout.linear import DEQUANTIZED_SLICE, WORD_BITS

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of GGUF's IQ4_NL and IQ4_XS
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT4_ZERO = 8  # the code that stands for zero where no zero points are given

Coded = TypeVar("Coded", bound="CodedWeight")


class _Shaped(Protocol):
    @property
    def shape(self) -> torch.Size: ...


class _Scaled(_Shaped, Protocol):
    @property
    def scales(self) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """Codes and their scales; where a weight's device and size are asked for it answers like a tensor."""

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def is_cuda(self) -> bool:
        return self.codes.is_cuda

    @property
    def nbytes(self) -> int:
        values = (getattr(self, each.name) for each in fields(self))
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))

    def numel(self: _Shaped) -> int:
        return self.shape.numel()

    def gathered(self: Coded, ids: torch.Tensor) -> Coded:
        """Return rows by ids [n] int64, copied."""
        tensors = {each.name: getattr(self, each.name) for each in fields(self)}
        rows: dict[str, Any] = {name: each[ids] for name, each in tensors.items() if isinstance(each, torch.Tensor)}
        return replace(self, **rows)


@dataclass(frozen=True, slots=True)
class GroupedWeight(CodedWeight):
    """Scales [N, K / group size] are of groups along K."""

    @property
    def group_size(self: _Scaled) -> int:
        """Count elements along K that share a scale."""
        return self.shape[1] // self.scales.shape[1]


@dataclass(frozen=True, slots=True)
class IntWeight(GroupedWeight):
    """A weight [N, K] as ``(code - zero) * scale`` over groups along K.

    Attributes:
        codes: [N, K * bits / 32] int32; the lowest ``bits`` of a word are its first code, from 0 up.
        scales: [N, K / group size], of a floating dtype, perhaps negative. zeros: uint8 of that shape; None: all are
            ``2 ** (bits - 1)``.
        dtype: of the weight that it stands for, and of its activations. bits: of a code, 4 or 8.
    """

    zeros: torch.Tensor | None
    dtype: torch.dtype
    bits: int = 4

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.codes), self.codes.shape[1] * WORD_BITS // self.bits))

    def dequantized(self, rows: slice = slice(None)) -> torch.Tensor:
        """Return what some rows [n, K] stand for, in float32."""
        codes = codes_of(self.codes[rows], self.bits).flatten(1).float()
        scales = self.scales[rows].float().repeat_interleave(self.group_size, 1)
        if self.zeros is None:
            return (codes - 2 ** (self.bits - 1)) * scales
        return (codes - self.zeros[rows].float().repeat_interleave(self.group_size, 1)) * scales


@dataclass(frozen=True, slots=True)
class Fp8Weight(CodedWeight):
    """A weight [N, K] as ``code * scale`` over blocks of rows and columns.

    Attributes:
        codes: [N, K] float8_e4m3fn. scales: [ceil(N / block rows), ceil(K / block columns)], of a floating dtype.
        block: rows and columns that share a scale; the last ones of a side may be fewer.
        dtype: of the weight that it stands for, and of its activations.
    """

    block: tuple[int, int]
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def gathered(self, ids: torch.Tensor) -> Fp8Weight:
        scales = self.scales[ids // self.block[0]]
        return replace(self, codes=self.codes[ids], scales=scales, block=(1, self.block[1]))

    def dequantized(self, rows: slice = slice(None)) -> torch.Tensor:
        """Return what some rows [n, K] stand for, in float32."""
        codes = self.codes[rows].float()
        first = rows.start or 0
        at = torch.arange(first, first + len(codes), device=codes.device) // self.block[0]
        scales = self.scales[at].float().repeat_interleave(self.block[1], 1)
        return codes * scales[:, : codes.shape[1]]


@dataclass(frozen=True, slots=True)
class Fp4Weight(GroupedWeight):
    """A weight [N, K] as ``e2m1(code) * scale * row_scale`` over groups along K: NVFP4 (16, e4m3) and MXFP4 (32, e8m0).

    Attributes:
        codes: [N, K / 8] int32; bits 4j to 4j + 3 of word c are the code of element 8c + j: sign, then 0, 0.5, 1, 1.5,
            2, 3, 4, 6. scales: [N, K / group size], float8_e4m3fn, or uint8 for powers of two with an offset of 127.
        row_scales: [N] float32 that NVFP4 has beside, one for each of a checkpoint's matrices; or None.
        dtype: of the weight that it stands for, and of its activations.
    """

    row_scales: torch.Tensor | None
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.codes), self.codes.shape[1] * WORD_BITS // 4))

    def dequantized(self, rows: slice = slice(None)) -> torch.Tensor:
        """Return what some rows [n, K] stand for, in float32."""
        codes = codes_of(self.codes[rows], 4).flatten(1)
        values = torch.tensor(E2M1, device=codes.device)[codes]
        scales = self.scales[rows]
        wide = torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()
        values *= wide.repeat_interleave(self.group_size, 1)
        return values if self.row_scales is None else values * self.row_scales[rows].unsqueeze(1)


@dataclass(frozen=True, slots=True)
class GgufWeight(GroupedWeight):
    """A weight [N, K] as blocks of a GGUF file have it: ``value(code) * scale + minimum`` over groups along K.

    Attributes:
        codes: [N, K * bits / 32] int32: a row's lowest four bits of each, in words of eight, then what five or six bits
            have above these, in words of 32 or 16; a word's lowest bits are its first code's.
        scales: [N, K / group size], float16; or int8 or uint8, which a float16 for 256 columns is a factor of.
        minima: as the scales, and taken off where they are bytes; None: a code's value is less ``2 ** (bits - 1)``.
        factors: [N, K / 256] float16 of the scales, or [N, K / 128], of the scales and of the minima by turns; or None.
        dtype: of the weight that it stands for, and of its activations. bits: of a code, 4 to 6.
        table: codes number the values of ``IQ4``.
    """

    minima: torch.Tensor | None
    factors: torch.Tensor | None
    dtype: torch.dtype
    bits: int = 4
    table: bool = False

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.codes), self.codes.shape[1] * WORD_BITS // self.bits))

    @property
    def zero(self) -> int:
        """Return what is taken off a code."""
        return 0 if self.table or self.minima is not None else 2 ** (self.bits - 1)

    def dequantized(self, rows: slice = slice(None)) -> torch.Tensor:
        """Return what some rows [n, K] stand for, in float32, computed in ggml's order."""
        codes = joined_planes(*planes(self.codes[rows], self.bits), self.bits)
        values = torch.tensor(IQ4, dtype=torch.float32, device=codes.device)[codes] if self.table else codes.float()
        scales, minima = (None if each is None else each[rows].float() for each in (self.scales, self.minima))
        assert scales is not None
        if self.factors is not None:
            of_groups = SUPER_BLOCK // self.group_size
            factors = self.factors[rows].float().unflatten(1, (-1, 1 if minima is None else 2))
            scales *= factors[..., 0].repeat_interleave(of_groups, 1)
            minima = None if minima is None else minima * -factors[..., 1].repeat_interleave(of_groups, 1)
        grouped = values.sub_(self.zero).view(*scales.shape, -1).mul_(scales.unsqueeze(2))
        return (grouped if minima is None else grouped.add_(minima.unsqueeze(2))).flatten(1)


def planes(words: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of codes of 4 to 6 bits as the words of their lowest four bits and those of the bits above, views."""
    lowest = words.shape[1] * 4 // bits
    return words[:, :lowest], words[:, lowest:]


def joined_planes(lowest: torch.Tensor, above: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes, int32 [n, K]."""
    codes = codes_of(lowest, 4).flatten(1)
    return codes if bits == 4 else codes | codes_of(above, bits - 4).flatten(1) << 4


def row_slices(weight: _Shaped, multiple: int = 1) -> Iterator[slice]:
    """Yield the rows of a weight [N, K] in slices that take little memory decoded, of such a multiple but the last."""
    rows, columns = weight.shape
    return slices(rows, columns, multiple)


def slices(rows: int, columns: int, multiple: int = 1) -> Iterator[slice]:
    step = max(1, DEQUANTIZED_SLICE // max(columns, 1) // multiple) * multiple
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


def codes_of(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return [..., 32 / bits] codes of int32 words, the lowest bits first."""
    shifts = torch.arange(0, WORD_BITS, bits, device=words.device, dtype=torch.int32)
    return words.unsqueeze(-1) >> shifts & 2**bits - 1


def words_of(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return int32 words [...] of int32 codes [..., 32 / bits] from 0 up, the first in the lowest bits."""
    words = torch.zeros_like(codes[..., 0])
    for place in range(WORD_BITS // bits):
        words |= codes[..., place] << place * bits
    return words
