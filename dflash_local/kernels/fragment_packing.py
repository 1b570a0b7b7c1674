"""Quantised weights laid out as ``few_row_gemm.cu`` reads them, and back.

A record is a tile of 16 features by a step of 128 along K: codes as the fragments of mma.m16n8k16's A operand, so that
each 16 bytes are what one lane of a warp multiplies, then the step's scales. What a weight lacks of the last tile and
the last step is filled up with zeros.

Within 32 columns, lane (g, t) = (lane / 4, lane % 4) holds columns 8t to 8t + 7 of features g and g + 8; so the eight
numbers of a row of x that it needs lie side by side. Index names below: h: feature g or g + 8. k32: 32 columns of a
step. half, pair, element: the columns 8t + 4 half + 2 pair + element.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from dflash_local.kernels.quantized_weight import CODES_PER_WORD, Fp8Weight, Int4Weight

TILE_N, STEP_K = 16, 128
GROUP_SIZES = (32, 64, 128)  # and multiples of the last
INT4_BYTES, FP8_BYTES = TILE_N * STEP_K // 2, TILE_N * STEP_K  # of a record's codes
FP8_SCALE_BYTES = 16  # one float32, and what keeps loads aligned
ZERO_OFFSET = 128  # what bit operations make of the code 0
MAX_ZERO = 127
SLICE_BYTES = 2**26  # of the largest tensor while a weight is packed


@dataclass(frozen=True, slots=True)
class FragmentFormat:
    """What a weight's records hold.

    Attributes:
        bits: of a code; 4: int4, 8: fp8. block: rows and columns of the weight that share a scale.
        zeros: zero points are stored. scales: their dtype.
    """

    bits: int
    block: tuple[int, int]
    zeros: bool
    scales: torch.dtype

    @property
    def group_size(self) -> int:
        """Columns of a step that share a scale."""
        return min(self.block[1], STEP_K)

    @property
    def record_bytes(self) -> int:
        """Of one tile and step."""
        if self.bits == 8:
            return FP8_BYTES + FP8_SCALE_BYTES
        return INT4_BYTES + TILE_N * (STEP_K // self.group_size) * (self.scales.itemsize + (2 if self.zeros else 0))


@dataclass(frozen=True, slots=True)
class FragmentWeight:
    """A weight [N, K] as records.

    Attributes:
        records: [tiles, steps, bytes / 4] int32. shape: [N, K].
        paired: the weight is [2 I, K], and tiles of its first and its second half take turns.
        dtype: of the weight that it stands for, and of its activations.
    """

    records: torch.Tensor
    shape: torch.Size
    format: FragmentFormat
    paired: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: Int4Weight | Fp8Weight, paired: bool = False) -> FragmentWeight:
        """The records of a weight; beside them a slice is held.

        Raises:
            ValueError: the kernel does not take its shape or its groups; says which.
        """
        kind = _format(weight, paired)
        tiles, steps = -(-weight.shape[0] // TILE_N), -(-weight.shape[1] // STEP_K)
        records = torch.empty(tiles, steps, kind.record_bytes // 4, dtype=torch.int32, device=weight.device)
        packed = cls(records, weight.shape, kind, paired, weight.dtype)
        for part, rows in packed.slices():
            if isinstance(weight, Int4Weight):
                _pack_int4(weight, kind, rows, records[part])
            else:
                _pack_fp8(weight, rows, records[part])
        return packed

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.records.device

    @property
    def is_cuda(self) -> bool:
        """True on a GPU."""
        return self.records.is_cuda

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return self.records.nbytes

    def numel(self) -> int:
        """How many weights."""
        return self.shape.numel()

    def slices(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Parts of the records, and which rows of the weight [tiles, 16] they hold; rows beyond the last are none."""
        tiles, steps = self.records.shape[:2]
        order = torch.arange(tiles * TILE_N, device=self.device).view(tiles, TILE_N)
        if self.paired:
            order = order.view(2, tiles // 2, TILE_N).transpose(0, 1).reshape(tiles, TILE_N)
        length = max(1, SLICE_BYTES // (TILE_N * STEP_K * steps))
        for at in range(0, tiles, length):
            yield slice(at, at + length), order[at : at + length]

    def dequantized(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Rows [n], and what they stand for [n, K] in float32; a slice of the weight at a time."""
        block = (1, self.format.block[1]) if self.format.bits == 4 else (TILE_N, self.format.block[1])
        for part, rows in self.slices():
            shape = torch.Size((rows.numel(), self.shape[1]))
            whole = FragmentWeight(self.records[part], shape, replace(self.format, block=block), False, self.dtype)
            inside = rows.flatten() < self.shape[0]
            yield rows.flatten()[inside], whole.unpacked().dequantized()[inside]

    def unpacked(self) -> Int4Weight | Fp8Weight:
        """The weight that the records were made of, bit by bit."""
        n, k = self.shape
        block_n, block_k = self.format.block
        scales = torch.empty(-(-n // block_n), -(-k // block_k), dtype=self.format.scales, device=self.device)
        if self.format.bits == 8:
            fp8 = torch.empty(n, k, dtype=torch.float8_e4m3fn, device=self.device)
            for part, rows in self.slices():
                _unpack_fp8(self.records[part], self.format, rows, fp8, scales)
            return Fp8Weight(fp8, scales, self.format.block, self.dtype)
        codes = torch.empty(n, k // CODES_PER_WORD, dtype=torch.int32, device=self.device)
        zeros = torch.empty(scales.shape, dtype=torch.uint8, device=self.device) if self.format.zeros else None
        for part, rows in self.slices():
            _unpack_int4(self.records[part], self.format, rows, Int4Weight(codes, scales, zeros, self.dtype))
        return Int4Weight(codes, scales, zeros, self.dtype)


def _format(weight: Int4Weight | Fp8Weight, paired: bool) -> FragmentFormat:
    n, k = weight.shape
    if paired and n % (2 * TILE_N):
        raise ValueError(f"a gated pair of {n} rows does not consist of tiles of {TILE_N}")
    if k % 32:
        raise ValueError(f"{k} columns are no multiple of 32")
    if isinstance(weight, Fp8Weight):
        rows, columns = weight.block
        if rows % TILE_N or columns % STEP_K:
            raise ValueError(f"blocks of {rows} x {columns} do not consist of {TILE_N} x {STEP_K}")
        return FragmentFormat(8, weight.block, False, weight.scales.dtype)
    group = weight.group_size
    if group not in GROUP_SIZES and group % STEP_K:
        raise ValueError(f"groups of {group} are none of {GROUP_SIZES} and no multiple of {STEP_K}")
    return FragmentFormat(4, (1, group), weight.zeros is not None, weight.scales.dtype)


def _rows(tensor: torch.Tensor, rows: torch.Tensor, columns: int) -> torch.Tensor:
    """Rows [tiles, 16] of a matrix as [tiles * 16, columns]; beyond its last row and column zeros."""
    flat = rows.flatten()
    inside = flat < len(tensor)
    wide = tensor.new_zeros(len(flat), columns)
    wide[inside, : tensor.shape[1]] = tensor[flat[inside]]
    return wide


# Axes of codes by row and column: tile h g | step k32 t half pair element.
def _pack_int4(weight: Int4Weight, kind: FragmentFormat, rows: torch.Tensor, out: torch.Tensor) -> None:
    tiles, steps = out.shape[:2]
    words = _rows(weight.codes, rows, steps * STEP_K // CODES_PER_WORD).view(tiles, 2, 8, steps, 4, 4)
    fragments = torch.zeros(tiles, steps, 4, 8, 4, 2, dtype=torch.int32, device=out.device)  # k32 g t half
    for h in range(2):
        for place in range(CODES_PER_WORD):  # half pair element
            half, pair, element = place >> 2, place >> 1 & 1, place & 1
            code = words[:, h] >> 4 * place & 15
            fragments[..., half] |= code.permute(0, 2, 3, 1, 4) << 4 * (h + 2 * pair) + 16 * element
    ordered = fragments.view(tiles, steps, 2, 2, 8, 4, 2).permute(0, 1, 2, 4, 5, 3, 6)  # 64 columns: 16 bytes a lane
    out[..., : INT4_BYTES // 4] = ordered.reshape(tiles, steps, -1)
    repeated = max(1, kind.block[1] // STEP_K)
    groups = STEP_K // kind.group_size

    def by_lane(tensor: torch.Tensor) -> torch.Tensor:
        wide = _rows(tensor.repeat_interleave(repeated, 1), rows, steps * groups)
        lanes = wide.view(tiles, 2, 8, steps, groups).permute(0, 3, 2, 4, 1)
        return lanes.contiguous().view(torch.int32)  # tile step g group, and one or two words of both features

    parts = [by_lane(weight.scales)]
    if weight.zeros is not None:
        if int(weight.zeros.max()) > MAX_ZERO:
            raise ValueError(f"zero points above {MAX_ZERO}")
        parts.append(by_lane((weight.zeros.float() + ZERO_OFFSET).bfloat16()))
    out[..., INT4_BYTES // 4 :] = torch.cat(parts, -1).reshape(tiles, steps, -1)


def _unpack_int4(records: torch.Tensor, kind: FragmentFormat, rows: torch.Tensor, weight: Int4Weight) -> None:
    tiles, steps = records.shape[:2]
    n, k = weight.shape
    inside = rows.flatten() < n
    target = rows.flatten()[inside]
    fragments = records[..., : INT4_BYTES // 4].reshape(tiles, steps, 2, 8, 4, 2, 2).permute(0, 1, 2, 5, 3, 4, 6)
    fragments = fragments.reshape(tiles, steps, 4, 8, 4, 2)
    words = torch.zeros(tiles, 2, 8, steps, 4, 4, dtype=torch.int32, device=records.device)
    for h in range(2):
        for place in range(CODES_PER_WORD):
            half, pair, element = place >> 2, place >> 1 & 1, place & 1
            code = fragments[..., half] >> 4 * (h + 2 * pair) + 16 * element & 15
            words[:, h] |= code.permute(0, 3, 1, 2, 4) << 4 * place
    weight.codes[target] = words.view(tiles * TILE_N, -1)[inside, : k // CODES_PER_WORD]
    groups = STEP_K // kind.group_size
    tail = records[..., INT4_BYTES // 4 :].reshape(tiles, steps, 8, groups, -1)
    size = kind.scales.itemsize // 2  # words

    def by_row(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        wide = words.contiguous().view(dtype).permute(0, 4, 2, 1, 3).reshape(tiles * TILE_N, steps * groups)
        return wide[inside, : k // kind.group_size : max(1, kind.block[1] // STEP_K)]

    weight.scales[target] = by_row(tail[..., :size], kind.scales)
    if weight.zeros is not None:
        points = by_row(tail[..., size:], torch.bfloat16).float() - ZERO_OFFSET
        weight.zeros[target] = points.to(torch.uint8)


def _pack_fp8(weight: Fp8Weight, rows: torch.Tensor, out: torch.Tensor) -> None:
    tiles, steps = out.shape[:2]
    codes = _rows(weight.codes.view(torch.uint8), rows, steps * STEP_K).view(tiles, 2, 8, steps, 4, 4, 2, 2, 2)
    # A word: two columns of both features, g + 8 below g, so that a shift by 4 leaves either in its place.
    fragments = codes.permute(0, 3, 4, 2, 5, 6, 7, 8, 1).flip(-1).reshape(tiles, steps, FP8_BYTES)
    out[..., : FP8_BYTES // 4] = fragments.view(torch.int32)
    block_n, block_k = weight.block
    step = torch.arange(steps, device=out.device) * STEP_K // block_k
    scales = weight.scales.float()[(rows[:, 0] // block_n)[:, None], step]
    out[..., FP8_BYTES // 4 :] = 0
    out[..., FP8_BYTES // 4] = scales.contiguous().view(torch.int32)


def _unpack_fp8(
    records: torch.Tensor, kind: FragmentFormat, rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    tiles, steps = records.shape[:2]
    n, k = codes.shape
    inside = rows.flatten() < n
    fragments = records[..., : FP8_BYTES // 4].contiguous().view(torch.uint8)
    wide = fragments.view(tiles, steps, 4, 8, 4, 2, 2, 2, 2).flip(-1).permute(0, 8, 3, 1, 2, 4, 5, 6, 7)
    codes.view(torch.uint8)[rows.flatten()[inside]] = wide.reshape(tiles * TILE_N, -1)[inside, :k]
    block_n, block_k = kind.block
    found = records[..., FP8_BYTES // 4].contiguous().view(torch.float32)[:, :: block_k // STEP_K]
    scales[rows[:, 0] // block_n] = found.to(scales.dtype)
