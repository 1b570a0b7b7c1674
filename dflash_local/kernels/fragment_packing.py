"""Quantised weights laid out as ``few_row_gemm.cu`` reads them, and back.

Codes of a tile of 16 features and a step of 128 along K are the fragments of mma.m16n8k16's A operand, in such an order
that each 16 bytes are what one lane of a warp multiplies. A weight of whole tiles and steps takes the same memory as
before and may be packed where it lies; what another lacks of its last tile and step is filled up with zeros.

Within 32 columns, lane (g, t) = (lane / 4, lane % 4) holds columns 8t to 8t + 7 of features g and g + 8; so the eight
numbers of a row of x that it needs lie side by side. Axes below: h: feature g or g + 8. k32: 32 columns of a step.
half, pair, element: of the columns 8t + 4 half + 2 pair + element. Operand h + 2 pair is the pair of columns that a
lane hands to the tensor core as one register.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Literal

import torch

from dflash_local.kernels.quantized_weight import INT4_ZERO, CodedWeight, Fp4Weight, Fp8Weight, IntWeight
from dflash_local.layout.linear import DEQUANTIZED_SLICE, INT4_PER_WORD, STEP_K, TILE_N, code_room, scale_room

GROUP_SIZES = (32, 64, 128)  # of integers, and multiples of the last
FP4_SCALES = {torch.uint8: 32, torch.float8_e4m3fn: 16}  # MXFP4's and NVFP4's, and the groups that they are of
MAX_E8M0 = 188  # 2^61; with the 2^66 that FP4's products lack it is as large as a float32 gets
LANE_COLUMNS = 32  # of which each lane takes eight
HALF_OF_LANES = 16  # columns of 32 that lanes t of 0 and 1 hold; their scales lie before those of the others
MAX_TAIL_ROWS = 256  # more are worth a launch of their own
WORD_BYTES = 4
PACKED_SLICE = 2**24  # codes that are packed at a time: copies of 8 to 16 MiB, of which about four live at once
SIGNS = -0x7F7F7F80  # 0x80808080: the highest bit of each byte of a word

Codes = Literal["int4", "int8", "e4m3", "e2m1", "bfloat16"]
Codable = IntWeight | Fp8Weight | Fp4Weight
Fields = tuple[tuple[int, int, tuple[int, int, int, int]], ...]
# Fields of a code of four bits: their mask, their lowest bit in the code, and where each operand's lie in half a word.
NIBBLES: dict[str, Fields] = {
    "int4": ((15, 0, (0, 4, 8, 12)),),
    "e2m1": ((7, 0, (6, 3, 0, 9)), (1, 3, (15, 12, 14, 13))),  # exponent and mantissa; sign
}


@dataclass(frozen=True, slots=True)
class FragmentFormat:
    """What a weight's codes and scales are.

    Attributes:
        block: rows and columns of the weight that share a scale; None: a row has one, which its results are
            multiplied with.
        zeros: zero points are stored. scales: their dtype; uint8: powers of two, as of ``Fp4Weight``.
        row_scales: each row has another scale, in float32, beside those of its groups.
        tail: rows below the coded ones that are bfloat16.
    """

    codes: Codes
    block: tuple[int, int] | None
    zeros: bool
    scales: torch.dtype
    row_scales: bool = False
    tail: int = 0

    @property
    def bits(self) -> int:
        return {"int4": 4, "e2m1": 4, "bfloat16": 16}.get(self.codes, 8)

    @property
    def step_words(self) -> int:
        return self.bits * TILE_N * STEP_K // (8 * WORD_BYTES)

    @property
    def grouped(self) -> bool:
        """Scales are of groups along a row: they are packed, too."""
        return self.block is not None and self.block[0] == 1

    @property
    def step_group(self) -> int:
        return STEP_K if self.block is None or STEP_K % self.block[1] else self.block[1]

    @property
    def group_steps(self) -> int:
        return 1 if self.block is None else -(-self.block[1] // STEP_K)

    @property
    def sums_x(self) -> bool:
        """Products need the sums of x over groups: codes are decoded with an offset."""
        return self.codes == "int4" or self.zeros


PLAIN = FragmentFormat("bfloat16", None, False, torch.bfloat16)  # as a checkpoint has it: no scales, nothing packed


@dataclass(frozen=True, slots=True)
class FragmentWeight(CodedWeight):
    """A weight [N, K] in fragments.

    Attributes:
        codes: [tiles, steps, words] int32; ``PLAIN``: [N, K] bfloat16, which also stands for the scales that there are
            not. scales: of groups [tiles, groups / groups of a step, 8, groups of a step,
            2], the last axis being features g and g + 8 (groups of 16: see ``HALF_OF_LANES``); else as of the weight.
        zeros: uint8, as the scales, or None. row_scales: [N] float32, or None.
        tail: [tiles of the tail, steps, 2048] bfloat16, or None.
        shape: [N, K], the tail's rows included. dtype: of the weight that it stands for, and of its
            activations.
    """

    zeros: torch.Tensor | None
    row_scales: torch.Tensor | None
    shape: torch.Size
    format: FragmentFormat
    dtype: torch.dtype
    tail: torch.Tensor | None = None

    @property
    def coded_rows(self) -> int:
        return self.shape[0] - self.format.tail

    @property
    def tiles(self) -> int:
        return -(-self.coded_rows // TILE_N)

    @property
    def steps(self) -> int:
        return -(-self.shape[1] // STEP_K)

    @classmethod
    def plain(cls, weight: torch.Tensor) -> FragmentWeight:
        """A matrix [N, K] in bfloat16 as it lies. Raises ValueError: the kernels do not take it; says why."""
        if weight.dtype != torch.bfloat16 or not weight.is_contiguous() or weight.shape[1] % LANE_COLUMNS:
            raise ValueError(f"rows are no multiples of {LANE_COLUMNS} bfloat16, one behind the other")
        return cls(weight, weight, None, None, weight.shape, PLAIN, weight.dtype)

    @classmethod
    def of(cls, weight: Codable, in_place: bool = False) -> FragmentWeight:
        """The fragments of a weight; beside both a slice is held.

        Args:
            in_place: over the weight's memory, which then means nothing else. What a weight lacks of its last tile and
                step must be there behind it (``layout.linear.code_room``).

        Raises:
            ValueError: the kernel does not take its shape or its groups, or there is no place; says which.
        """
        kind = fragment_format(weight)
        n, k = weight.shape
        tiles, steps = -(-n // TILE_N), -(-k // STEP_K)
        if in_place and not has_room(weight):
            raise ValueError(f"{n} x {k} does not consist of tiles of {TILE_N} x {STEP_K}, nor is there room for them")

        def place(tensor: torch.Tensor, *sizes: int) -> torch.Tensor:
            return _over(tensor, sizes) if in_place else tensor.new_empty(sizes)

        words = weight.codes.view(torch.int32)
        codes = place(words, tiles, steps, kind.step_words)
        scales, zeros = weight.scales, weight.zeros if isinstance(weight, IntWeight) else None
        packed_groups: list[tuple[torch.Tensor, torch.Tensor]] = []
        if kind.grouped:
            sizes = _scale_sizes(tiles, steps, kind)
            scales = place(weight.scales, *sizes)
            packed_groups.append((weight.scales, scales))
            if zeros is not None:
                packed_groups.append((zeros, place(zeros, *sizes)))
                zeros = packed_groups[1][1]
        row_scales = weight.row_scales if isinstance(weight, Fp4Weight) else None
        packed = cls(codes, scales, zeros, row_scales, weight.shape, kind, weight.dtype)
        # From the last one up: what is packed may reach into what has been read, and no further.
        for part, rows in reversed(list(packed.slices(PACKED_SLICE))):
            height = TILE_N * len(codes[part])
            codes[part] = _fragments(_padded(words[rows], height, steps * kind.step_words // TILE_N), kind.codes)
            for given, target in packed_groups:
                values = _padded(_as_bytes(given)[rows], height, target[0].numel() // TILE_N)
                _as_bytes(target)[part] = _by_lane(values, kind)
        return packed

    def with_tail(self, rows: torch.Tensor) -> FragmentWeight:
        """With rows [n, K] in bfloat16 below its own, packed over their memory where they are whole tiles and steps."""
        n, k = rows.shape
        tiles, steps = -(-n // TILE_N), self.codes.shape[1]
        fragments = _bfloat16_fragments(_padded(rows, tiles * TILE_N, steps * STEP_K))
        tail = rows.view(fragments.shape).copy_(fragments) if rows.numel() == fragments.numel() else fragments
        shape = torch.Size((self.shape[0] + n, k))
        return replace(self, shape=shape, format=replace(self.format, tail=n), tail=tail)

    def tail_rows(self) -> torch.Tensor:
        if self.tail is None:
            return torch.empty(0, self.shape[1], dtype=torch.bfloat16, device=self.device)
        return _bfloat16_rows(self.tail)[: self.format.tail, : self.shape[1]].contiguous()

    def slices(self, codes: int = DEQUANTIZED_SLICE) -> Iterator[tuple[slice, slice]]:
        """Parts of the tiles of about so many codes, and the coded rows that they hold."""
        length = max(1, codes // (TILE_N * STEP_K * self.steps))
        for at in range(0, self.tiles, length):
            end = min(at + length, self.tiles)
            yield slice(at, end), slice(at * TILE_N, min(end * TILE_N, self.coded_rows))

    def first_rows(self, stop: int) -> FragmentWeight:
        """Its first coded rows, over the same memory. Raises ValueError: they do not consist of tiles."""
        if stop % TILE_N or stop > self.coded_rows:
            raise ValueError(f"{stop} rows do not consist of tiles of {TILE_N}")
        tiles = slice(stop // TILE_N)
        of_scales = tiles if self.format.grouped else slice(stop if self.format.block is None else None)
        return replace(
            self,
            codes=self.codes[tiles],
            scales=self.scales[of_scales],
            zeros=None if self.zeros is None else self.zeros[tiles],
            row_scales=None if self.row_scales is None else self.row_scales[:stop],
            shape=torch.Size((stop, self.shape[1])),
            format=replace(self.format, tail=0),
            tail=None,
        )

    def dequantized(self, rows: slice = slice(None)) -> torch.Tensor:
        """What some coded rows [n, K] stand for, in float32; they begin with a tile's first."""
        if self.format == PLAIN:
            return self.codes[rows].float()
        if self.format.codes != "int4":
            return self.unpacked(rows).dequantized()
        begin, end, part = self._tiles(rows)
        wide, scales = _int4_codes(self.codes[part]), _by_row(self.scales[part], self.format).float().unsqueeze(-1)
        zeros = INT4_ZERO if self.zeros is None else _by_row(self.zeros[part], self.format).unsqueeze(-1)
        wide.view(len(wide), scales.shape[1], -1).sub_(zeros).mul_(scales)
        return wide[: end - begin, : self.shape[1]]

    def unpacked(self, rows: slice = slice(None)) -> Codable:
        """The weight that was coded, bit by bit; or some of its rows, from a tile's first, with a block of a tile."""
        begin, end, part = self._tiles(rows)
        kind, n, k = self.format, end - begin, self.shape[1]
        words = _rows(self.codes[part], kind.codes)[:n, : k * kind.bits // (8 * WORD_BYTES)].contiguous()
        scales = self.scales
        if kind.block is None:
            scales = scales[begin:end]
        elif kind.grouped:
            groups = -(-k // kind.block[1])
            scales = _by_row(scales[part], kind)[:n, :groups].contiguous()
        if kind.codes == "e4m3":
            codes, block = words.view(torch.float8_e4m3fn), kind.block or (1, k)
            if block[0] > 1 and (begin, end) != (0, self.coded_rows):
                of_tile = torch.arange(part.start, part.stop, device=self.device) * TILE_N // block[0]
                scales, block = scales[of_tile], (TILE_N, block[1])
            return Fp8Weight(codes, scales, block, self.dtype)
        if kind.codes == "e2m1":
            row_scales = None if self.row_scales is None else self.row_scales[begin:end]
            return Fp4Weight(words, scales, row_scales, self.dtype)
        zeros = None if self.zeros is None else _by_row(self.zeros[part], kind)[:n, :groups].contiguous()
        return IntWeight(words, scales, zeros, self.dtype, kind.bits)

    def _tiles(self, rows: slice) -> tuple[int, int, slice]:
        """The first of some coded rows, the one behind the last, and the tiles that hold them."""
        begin, end, _ = rows.indices(self.coded_rows)
        if begin % TILE_N:
            raise ValueError(f"row {begin} is not the first of a tile")
        return begin, end, slice(begin // TILE_N, -(-end // TILE_N))


def is_whole(weight: Codable) -> bool:
    return weight.shape[0] % TILE_N == 0 and weight.shape[1] % STEP_K == 0


def has_room(weight: Codable) -> bool:
    """True where a weight may be packed in place: what its last tile and step lack can lie behind it."""
    if is_whole(weight):
        return True
    n, k = weight.shape
    codes, room = weight.codes.view(torch.int32), code_room(n, k, k // weight.codes.view(torch.int32).shape[1])
    if not _reaches(codes, prod(room)):
        return False
    if isinstance(weight, Fp8Weight) or not fragment_format(weight).grouped:
        return True
    zeros = weight.zeros if isinstance(weight, IntWeight) else None
    of_groups = prod(scale_room(n, k, weight.group_size))
    return all(_reaches(each, of_groups) for each in (weight.scales, zeros) if each is not None)


def _reaches(tensor: torch.Tensor, numbers: int) -> bool:
    """True where so many numbers lie from a tensor's first one to the end of its memory."""
    behind = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    return tensor.is_contiguous() and behind >= numbers * tensor.element_size()


def _over(tensor: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Other sizes from a tensor's first number on."""
    strides = [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    return tensor.as_strided(sizes, strides, tensor.storage_offset())


def fragment_format(weight: Codable) -> FragmentFormat:
    """What the fragments of a weight will be. Raises ValueError: the kernel does not take it; says why."""
    k = weight.shape[1]
    if k % LANE_COLUMNS:
        raise ValueError(f"{k} columns are no multiple of {LANE_COLUMNS}")
    if isinstance(weight, Fp8Weight):
        return _fp8_format(weight, k)
    group = weight.group_size
    if isinstance(weight, Fp4Weight):
        wanted = FP4_SCALES[weight.scales.dtype]
        if group != wanted:
            raise ValueError(f"groups of {group} are none of {wanted}, as scales of {weight.scales.dtype} have")
        if weight.scales.dtype == torch.uint8 and int(weight.scales.max()) > MAX_E8M0:
            raise ValueError(f"a scale is above 2^{MAX_E8M0 - 127}")
        if weight.scales.dtype == torch.float8_e4m3fn and bool((weight.scales.view(torch.int8) < 0).any()):
            raise ValueError("a scale is negative")
        return FragmentFormat("e2m1", (1, group), False, weight.scales.dtype, weight.row_scales is not None)
    if group not in GROUP_SIZES and group % STEP_K and group != k:
        raise ValueError(f"groups of {group} are none of {GROUP_SIZES}, no multiple of {STEP_K} and not of a row")
    if weight.bits == 8:
        block = None if group == k and weight.zeros is None else (1, group)
        return FragmentFormat("int8", block, weight.zeros is not None, weight.scales.dtype)
    return FragmentFormat("int4", (1, group), weight.zeros is not None, weight.scales.dtype)


def _fp8_format(weight: Fp8Weight, k: int) -> FragmentFormat:
    rows, columns = weight.block
    if rows == 1 and columns >= k:
        return FragmentFormat("e4m3", None, False, weight.scales.dtype)
    if rows % TILE_N or (columns % STEP_K and columns < k):
        raise ValueError(f"blocks of {rows} x {columns} neither consist of {TILE_N} x {STEP_K} nor are rows")
    return FragmentFormat("e4m3", weight.block, False, weight.scales.dtype)


def _scale_sizes(tiles: int, steps: int, kind: FragmentFormat) -> tuple[int, ...]:
    return tiles, -(-steps // kind.group_steps), 8, STEP_K // kind.step_group, 2


def _padded(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A matrix with zeros beyond its last row and column."""
    if tensor.shape == (rows, columns):
        return tensor
    wide = tensor.new_zeros(rows, columns)
    wide[: tensor.shape[0], : tensor.shape[1]] = tensor
    return wide


def _as_bytes(scales: torch.Tensor) -> torch.Tensor:
    """Numbers that can be copied everywhere."""
    return scales.view(torch.uint8) if scales.dtype == torch.float8_e4m3fn else scales


def _fragments(words: torch.Tensor, codes: Codes) -> torch.Tensor:
    """Of rows [tiles * 16, words]: [tiles, steps, words]."""
    if codes in NIBBLES:
        return _nibble_fragments(words, NIBBLES[codes])
    return _byte_fragments(words ^ SIGNS if codes == "int8" else words)


def _rows(fragments: torch.Tensor, codes: Codes) -> torch.Tensor:
    """The inverse of ``_fragments``."""
    if codes in NIBBLES:
        return _nibble_rows(fragments, NIBBLES[codes])
    rows = _byte_rows(fragments)
    return rows ^ SIGNS if codes == "int8" else rows


def _nibble_fragments(words: torch.Tensor, fields: Fields) -> torch.Tensor:
    rows = words.view(len(words) // TILE_N, 2, 8, -1, 4, 4)  # tile h g step k32 t
    tiles, steps = len(rows), rows.shape[3]
    fragments = torch.zeros(tiles, steps, 4, 8, 4, 2, dtype=torch.int32, device=words.device)  # k32 g t half
    for h, place in product(range(2), range(INT4_PER_WORD)):
        half, pair, element = place >> 2, place >> 1 & 1, place & 1
        for mask, lowest, places in fields:
            bits = rows[:, h] >> 4 * place + lowest & mask
            into = fragments[..., half]  # by a name of its own: else what was changed is copied onto itself
            into |= bits.permute(0, 2, 3, 1, 4) << places[h + 2 * pair] + 16 * element
    # A lane's 16 bytes are of 64 columns.
    return fragments.view(tiles, steps, 2, 2, 8, 4, 2).permute(0, 1, 2, 4, 5, 3, 6).reshape(tiles, steps, -1)


def _nibble_rows(fragments: torch.Tensor, fields: Fields) -> torch.Tensor:
    tiles, steps = fragments.shape[:2]
    ordered = fragments.view(tiles, steps, 2, 8, 4, 2, 2).permute(0, 1, 2, 5, 3, 4, 6).reshape(tiles, steps, 4, 8, 4, 2)
    rows = torch.zeros(tiles, 2, 8, steps, 4, 4, dtype=torch.int32, device=fragments.device)
    for h, place in product(range(2), range(INT4_PER_WORD)):
        half, pair, element = place >> 2, place >> 1 & 1, place & 1
        for mask, lowest, places in fields:
            bits = ordered[..., half] >> places[h + 2 * pair] + 16 * element & mask
            rows[:, h] |= bits.permute(0, 3, 1, 2, 4) << 4 * place + lowest
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


def _byte_fragments(words: torch.Tensor) -> torch.Tensor:
    """A word: two columns of both features, g + 8 below g; shifts by 4 leave e4m3's bits of either in their place."""
    codes = words.view(torch.uint8).view(len(words) // TILE_N, 2, 8, -1, 4, 4, 2, 2, 2)
    fragments = codes.permute(0, 3, 4, 2, 5, 6, 7, 8, 1).flip(-1)  # tile step k32 g t half pair element h
    return fragments.reshape(len(codes), codes.shape[3], -1).view(torch.int32)


def _byte_rows(fragments: torch.Tensor) -> torch.Tensor:
    tiles, steps = fragments.shape[:2]
    codes = fragments.contiguous().view(torch.uint8).view(tiles, steps, 4, 8, 4, 2, 2, 2, 2)
    return codes.flip(-1).permute(0, 8, 3, 1, 2, 4, 5, 6, 7).reshape(tiles * TILE_N, -1).view(torch.int32)


def _bfloat16_fragments(rows: torch.Tensor) -> torch.Tensor:
    """Of rows [tiles * 16, columns]: [tiles, steps, 2048]; eight loads of a lane for its eight tiles of 16 columns."""
    by_tile = rows.view(len(rows) // TILE_N, 2, 8, -1, 4, 4, 2, 2, 2)  # tile h g step k32 t half pair element
    return by_tile.permute(0, 3, 4, 6, 2, 5, 7, 1, 8).reshape(len(by_tile), by_tile.shape[3], -1)


def _bfloat16_rows(fragments: torch.Tensor) -> torch.Tensor:
    tiles, steps = fragments.shape[:2]
    by_lane = fragments.view(tiles, steps, 4, 2, 8, 4, 2, 2, 2)  # tile step k32 half g t pair h element
    return by_lane.permute(0, 7, 4, 1, 2, 5, 3, 6, 8).reshape(tiles * TILE_N, -1)


def _by_lane(values: torch.Tensor, kind: FragmentFormat) -> torch.Tensor:
    """Of [tiles * 16, groups], as ``FragmentWeight.scales``; a copy."""
    by_tile = values.view(len(values) // TILE_N, 2, 8, -1, STEP_K // kind.step_group).permute(0, 3, 2, 4, 1)
    if kind.step_group == HALF_OF_LANES:
        by_tile = by_tile.unflatten(3, (-1, 2)).transpose(3, 4).flatten(3, 4)
    return by_tile.clone()


def _by_row(values: torch.Tensor, kind: FragmentFormat) -> torch.Tensor:
    by_tile = _as_bytes(values)
    if kind.step_group == HALF_OF_LANES:
        by_tile = by_tile.unflatten(3, (2, -1)).transpose(3, 4).flatten(3, 4)
    return by_tile.permute(0, 4, 2, 1, 3).reshape(len(values) * TILE_N, -1).view(values.dtype)
