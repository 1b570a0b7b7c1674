"""Quantised weights laid out as ``few_row_gemm.cu`` reads them, and back.

Codes of a tile of 16 features and a step of 128 along K are the fragments of mma.m16n8k16's A operand, in such an order
that each 16 bytes are what one lane of a warp multiplies. A weight of whole tiles and steps takes the same memory as
before and may be packed where it lies; what another lacks of its last tile and step is filled up with zeros.

Within 32 columns, lane (g, t) = (lane / 4, lane % 4) holds columns 8t to 8t + 7 of features g and g + 8; so the eight
numbers of a row of x that it needs lie side by side. Axes below: h: feature g or g + 8. k32: 32 columns of a step.
half, pair, element: of the columns 8t + 4 half + 2 pair + element.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dflash_local.kernels.quantized_weight import INT4_ZERO, CodedWeight, Fp8Weight, IntWeight
from dflash_local.layout.linear import DEQUANTIZED_SLICE, INT4_PER_WORD

TILE_N, STEP_K = 16, 128
GROUP_SIZES = (32, 64, 128)  # and multiples of the last
MAX_ZERO = 127
WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class FragmentFormat:
    """What a weight's codes and scales are.

    Attributes:
        bits: of a code; 4: int4, 8: fp8. block: rows and columns of the weight that share a scale.
        zeros: zero points are stored. scales: their dtype.
    """

    bits: int
    block: tuple[int, int]
    zeros: bool
    scales: torch.dtype

    @property
    def step_group(self) -> int:
        """Columns of a step that share a scale."""
        return min(self.block[1], STEP_K)


@dataclass(frozen=True, slots=True)
class FragmentWeight(CodedWeight):
    """A weight [N, K] in fragments.

    Attributes:
        codes: [tiles, steps, words] int32. scales: int4: [tiles, groups / groups of a step, 8, groups of a step, 2],
            the last axis being features g and g + 8; fp8: as of ``Fp8Weight``. zeros: uint8, as the scales, or None.
        shape: [N, K]. dtype: of the weight that it stands for, and of its activations.
    """

    zeros: torch.Tensor | None
    shape: torch.Size
    format: FragmentFormat
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: IntWeight | Fp8Weight, in_place: bool = False) -> FragmentWeight:
        """The fragments of a weight; beside both a slice is held.

        Args:
            in_place: over the weight's memory, which then means nothing else.

        Raises:
            ValueError: the kernel does not take its shape or its groups, or there is no place; says which.
        """
        kind = fragment_format(weight)
        n, k = weight.shape
        tiles, steps = -(-n // TILE_N), -(-k // STEP_K)
        if in_place and not is_whole(weight):
            raise ValueError(f"{n} x {k} does not consist of tiles of {TILE_N} x {STEP_K}")

        def place(tensor: torch.Tensor, *sizes: int) -> torch.Tensor:
            return tensor.view(sizes) if in_place else tensor.new_empty(sizes)

        words = weight.codes.view(torch.int32)
        codes = place(words, tiles, steps, kind.bits * TILE_N * STEP_K // (8 * WORD_BYTES))
        scales, zeros = weight.scales, None
        if isinstance(weight, IntWeight):
            group_sizes = _scale_sizes(tiles, steps, kind)
            scales = place(weight.scales, *group_sizes)
            zeros = None if weight.zeros is None else place(weight.zeros, *group_sizes)
        packed = cls(codes, scales, zeros, weight.shape, kind, weight.dtype)
        for part, rows in packed.slices():
            height = TILE_N * len(codes[part])
            order = _int4_fragments if kind.bits == 4 else _fp8_fragments
            codes[part] = order(_padded(words[rows], height, steps * kind.bits * STEP_K // (8 * WORD_BYTES)))
            if isinstance(weight, IntWeight):
                for values, target in ((weight.scales, scales), (weight.zeros, zeros)):
                    if values is not None and target is not None:
                        target[part] = _by_lane(_padded(values[rows], height, target[0].numel() // TILE_N), kind)
        return packed

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """Parts of the tiles that are packed or decoded at a time, and the rows of the weight that they hold."""
        tiles, steps = self.codes.shape[:2]
        length = max(1, DEQUANTIZED_SLICE // (TILE_N * STEP_K * steps))
        for at in range(0, tiles, length):
            end = min(at + length, tiles)
            yield slice(at, end), slice(at * TILE_N, min(end * TILE_N, self.shape[0]))

    def dequantized(self, rows: slice = slice(None)) -> torch.Tensor:
        """What some rows [n, K] stand for, in float32; they begin with a tile's first."""
        if self.format.bits == 8:
            return self.unpacked(rows).dequantized()
        begin, end, part = self._tiles(rows)
        wide = _int4_codes(self.codes[part])
        by_group = wide.view(len(wide), -1, self.format.block[1])
        zeros = INT4_ZERO if self.zeros is None else _by_row(self.zeros[part]).unsqueeze(-1)
        by_group.sub_(zeros).mul_(_by_row(self.scales[part]).float().unsqueeze(-1))
        return wide[: end - begin, : self.shape[1]]

    def unpacked(self, rows: slice = slice(None)) -> IntWeight | Fp8Weight:
        """The weight that was packed, bit by bit; or some of its rows, from a tile's first, with a block of a tile."""
        begin, end, part = self._tiles(rows)
        n, k = end - begin, self.shape[1]
        if self.format.bits == 8:
            codes = _fp8_rows(self.codes[part]).view(torch.float8_e4m3fn)[:n, :k]
            if (begin, end) == (0, self.shape[0]):
                return Fp8Weight(codes.contiguous(), self.scales, self.format.block, self.dtype)
            of_tile = torch.arange(part.start, part.stop, device=self.device) * TILE_N // self.format.block[0]
            return Fp8Weight(codes, self.scales[of_tile], (TILE_N, self.format.block[1]), self.dtype)
        words = _int4_rows(self.codes[part])[:n, : k // INT4_PER_WORD].contiguous()
        groups = k // self.format.block[1]
        scales = _by_row(self.scales[part])[:n, :groups].contiguous()
        zeros = None if self.zeros is None else _by_row(self.zeros[part])[:n, :groups].contiguous()
        return IntWeight(words, scales, zeros, self.dtype)

    def _tiles(self, rows: slice) -> tuple[int, int, slice]:
        """The first of some rows, the one behind the last, and the tiles that hold them."""
        begin, end, _ = rows.indices(self.shape[0])
        if begin % TILE_N:
            raise ValueError(f"row {begin} is not the first of a tile")
        return begin, end, slice(begin // TILE_N, -(-end // TILE_N))


def is_whole(weight: IntWeight | Fp8Weight) -> bool:
    """True where a weight consists of whole tiles and steps, so that it may be packed in place."""
    return weight.shape[0] % TILE_N == 0 and weight.shape[1] % STEP_K == 0


def fragment_format(weight: IntWeight | Fp8Weight) -> FragmentFormat:
    """What the fragments of a weight will be.

    Raises:
        ValueError: the kernel does not take it; says why.
    """
    k = weight.shape[1]
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
    if weight.zeros is not None and int(weight.zeros.max()) > MAX_ZERO:
        raise ValueError(f"a zero point is above {MAX_ZERO}")
    return FragmentFormat(4, (1, group), weight.zeros is not None, weight.scales.dtype)


def _scale_sizes(tiles: int, steps: int, kind: FragmentFormat) -> tuple[int, ...]:
    return tiles, steps * kind.step_group // kind.block[1], 8, STEP_K // kind.step_group, 2


def _padded(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A matrix with zeros beyond its last row and column."""
    if tensor.shape == (rows, columns):
        return tensor
    wide = tensor.new_zeros(rows, columns)
    wide[: tensor.shape[0], : tensor.shape[1]] = tensor
    return wide


def _int4_fragments(words: torch.Tensor) -> torch.Tensor:
    """Of rows [tiles * 16, words]; nibble 4 element + 2 pair + h of a word, where bit operations pick up operands."""
    rows = words.view(len(words) // TILE_N, 2, 8, -1, 4, 4)  # tile h g step k32 t
    tiles, steps = len(rows), rows.shape[3]
    fragments = torch.zeros(tiles, steps, 4, 8, 4, 2, dtype=torch.int32, device=words.device)  # k32 g t half
    for h in range(2):
        for place in range(INT4_PER_WORD):
            half, pair, element = place >> 2, place >> 1 & 1, place & 1
            code = rows[:, h] >> 4 * place & 15
            fragments[..., half] |= code.permute(0, 2, 3, 1, 4) << 4 * (h + 2 * pair) + 16 * element
    # A lane's 16 bytes are of 64 columns.
    return fragments.view(tiles, steps, 2, 2, 8, 4, 2).permute(0, 1, 2, 4, 5, 3, 6).reshape(tiles, steps, -1)


def _int4_rows(fragments: torch.Tensor) -> torch.Tensor:
    tiles, steps = fragments.shape[:2]
    ordered = fragments.view(tiles, steps, 2, 8, 4, 2, 2).permute(0, 1, 2, 5, 3, 4, 6).reshape(tiles, steps, 4, 8, 4, 2)
    rows = torch.zeros(tiles, 2, 8, steps, 4, 4, dtype=torch.int32, device=fragments.device)
    for h in range(2):
        for place in range(INT4_PER_WORD):
            half, pair, element = place >> 2, place >> 1 & 1, place & 1
            code = ordered[..., half] >> 4 * (h + 2 * pair) + 16 * element & 15
            rows[:, h] |= code.permute(0, 3, 1, 2, 4) << 4 * place
    return rows.view(tiles * TILE_N, -1)


def _int4_codes(fragments: torch.Tensor) -> torch.Tensor:
    """Codes of rows [tiles * 16, columns] as float32, in few passes over memory."""
    tiles, steps = fragments.shape[:2]
    place = torch.arange(8, device=fragments.device, dtype=torch.int32)  # h pair element
    shifts = (place >> 2) * 4 + (place >> 1 & 1) * 8 + (place & 1) * 16
    words = fragments.view(tiles, steps, 2, 8, 4, 2, 2, 1, 1, 1)  # 64 columns, g t k32 half
    codes = (words >> shifts.view(2, 2, 2)).bitwise_and_(15)
    ordered = codes.permute(0, 7, 3, 1, 2, 5, 4, 6, 8, 9)
    wide = torch.empty(ordered.shape, dtype=torch.float32, device=fragments.device)
    return wide.copy_(ordered).view(tiles * TILE_N, -1)


def _fp8_fragments(words: torch.Tensor) -> torch.Tensor:
    """Of rows [tiles * 16, words]; a word: two columns of both features, g + 8 below g, so that a shift by 4 leaves
    either in its place."""
    codes = words.view(torch.uint8).view(len(words) // TILE_N, 2, 8, -1, 4, 4, 2, 2, 2)
    fragments = codes.permute(0, 3, 4, 2, 5, 6, 7, 8, 1).flip(-1)  # tile step k32 g t half pair element h
    return fragments.reshape(len(codes), codes.shape[3], -1).view(torch.int32)


def _fp8_rows(fragments: torch.Tensor) -> torch.Tensor:
    tiles, steps = fragments.shape[:2]
    codes = fragments.contiguous().view(torch.uint8).view(tiles, steps, 4, 8, 4, 2, 2, 2, 2)
    return codes.flip(-1).permute(0, 8, 3, 1, 2, 4, 5, 6, 7).reshape(tiles * TILE_N, -1)


def _by_lane(values: torch.Tensor, kind: FragmentFormat) -> torch.Tensor:
    """Of [tiles * 16, groups], as ``FragmentWeight.scales``; a copy."""
    return values.view(len(values) // TILE_N, 2, 8, -1, STEP_K // kind.step_group).permute(0, 3, 2, 4, 1).clone()


def _by_row(values: torch.Tensor) -> torch.Tensor:
    return values.permute(0, 4, 2, 1, 3).reshape(len(values) * TILE_N, -1)
