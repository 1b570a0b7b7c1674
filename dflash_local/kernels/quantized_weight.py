"""Quantised weights as they lie in memory, whatever dialect of a checkpoint they came from, and what they stand for.

Row-major along K, one order of codes for all: the dialects of checkpoints are undone where they are read, and what a
kernel wants is packed from here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

INT4_ZERO = 8  # the code that stands for zero where no zero points are given
CODES_PER_WORD = 8


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A weight [N, K] as ``(code - zero) * scale`` over groups along K.

    Attributes:
        codes: [N, K / 8] int32; bits 4j to 4j + 3 of word c are the code, 0 to 15, of element 8c + j.
        scales: [N, K / group size], of a floating dtype, perhaps negative. zeros: uint8 of that shape; None: all 8.
        dtype: of the weight that it stands for, and of its activations.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        return torch.Size((len(self.codes), self.codes.shape[1] * CODES_PER_WORD))

    @property
    def group_size(self) -> int:
        """Elements along K that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.codes.device

    @property
    def is_cuda(self) -> bool:
        """True on a GPU."""
        return self.codes.is_cuda

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def numel(self) -> int:
        """How many weights."""
        return self.shape.numel()

    def dequantized(self, rows: slice = slice(None)) -> torch.Tensor:
        """What some rows [n, K] stand for, in float32."""
        words = self.codes[rows]
        shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
        codes = (words.unsqueeze(-1) >> shifts & 15).flatten(1).float()
        scales = self.scales[rows].float().repeat_interleave(self.group_size, 1)
        if self.zeros is None:
            return (codes - INT4_ZERO) * scales
        return (codes - self.zeros[rows].float().repeat_interleave(self.group_size, 1)) * scales


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight [N, K] as ``code * scale`` over blocks of rows and columns.

    Attributes:
        codes: [N, K] float8_e4m3fn. scales: [ceil(N / block rows), ceil(K / block columns)], of a floating dtype.
        block: rows and columns that share a scale; the last ones of a side may be fewer.
        dtype: of the weight that it stands for, and of its activations.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.codes.device

    @property
    def is_cuda(self) -> bool:
        """True on a GPU."""
        return self.codes.is_cuda

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def numel(self) -> int:
        """How many weights."""
        return self.codes.numel()

    def dequantized(self, rows: slice = slice(None)) -> torch.Tensor:
        """What some rows [n, K] stand for, in float32."""
        codes = self.codes[rows].float()
        first = rows.start or 0
        at = torch.arange(first, first + len(codes), device=codes.device) // self.block[0]
        scales = self.scales.float()[at].repeat_interleave(self.block[1], 1)
        return codes * scales[:, : codes.shape[1]]
