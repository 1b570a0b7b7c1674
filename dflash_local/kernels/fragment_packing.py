"""Quantised weights laid out as ``fragment_gemm.cu`` reads them, and back.

Codes of a tile of 16 features and a step of 128 along K are the fragments of mma.m16n8k16's A operand, in such an order
that each 16 bytes are what one lane of a warp multiplies. A weight of whole tiles and steps takes the same memory as
before and may be packed where it lies; what another lacks of its last tile and step is filled up with zeros.

Where a code lies stands in ``fragment_order``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch

from dflash_local.config.quantization import SUPER_BLOCK
from dflash_local.kernels.fragment_order import (
    BITS,
    Codes,
    bfloat16_fragments,
    bfloat16_rows,
    fragments,
    int4_codes,
    padded,
    rows_of,
)
from dflash_local.kernels.quantized_weight import INT4_ZERO, CodedWeight, Fp4Weight, Fp8Weight, GgufWeight, IntWeight
from dflash_local.layout.linear import DEQUANTIZED_SLICE, STEP_K, TILE_N, code_room, scale_room

GROUP_SIZES = (32, 64, 128)  # of integers, and multiples of the last
GGUF_CODES: dict[int, Codes] = {4: "int4", 5: "int5", 6: "int6"}
FP4_SCALES = {torch.uint8: 32, torch.float8_e4m3fn: 16}  # MXFP4's and NVFP4's, and the groups that they are of
MAX_E8M0 = 188  # 2^61; with the 2^66 that FP4's products lack it is as large as a float32 gets
LANE_COLUMNS = 32  # of which each lane takes eight
HALF_OF_LANES = 16  # columns of 32 that lanes t of 0 and 1 hold; their scales lie before those of the others
MAX_TAIL_ROWS = 256  # more are worth a launch of their own
WORD_BYTES = 4
FACTOR_STEPS = SUPER_BLOCK // STEP_K  # that a float16 is a factor of the scales of
PACKED_SLICE = 2**24  # codes that are packed at a time: copies of 8 to 16 MiB, of which about four live at once

Codable = IntWeight | Fp8Weight | Fp4Weight | GgufWeight


@dataclass(frozen=True, slots=True)
class FragmentFormat:
    """Hold what a weight's codes and scales are.

    Attributes:
        block: rows and columns of the weight that share a scale; None: a row has one, which its results are
            multiplied with.
        zeros: zero points are stored. scales: their dtype; uint8 of e2m1: powers of two, as of ``Fp4Weight``; bytes
            of other codes: whole numbers under the factors of ``GgufWeight``.
        row_scales: each row has another scale, in float32, beside those of its groups.
        tail: rows below the coded ones that are bfloat16. minima: those of ``GgufWeight`` are stored.
    """

    codes: Codes
    block: tuple[int, int] | None
    zeros: bool
    scales: torch.dtype
    row_scales: bool = False
    tail: int = 0
    minima: bool = False

    @property
    def bits(self) -> int:
        return BITS.get(self.codes, 8)

    @property
    def step_words(self) -> int:
        return self.bits * TILE_N * STEP_K // (8 * WORD_BYTES)

    @property
    def grouped(self) -> bool:
        """Return True where scales are of groups along a row: they are packed, too."""
        return self.block is not None and self.block[0] == 1

    @property
    def step_group(self) -> int:
        return STEP_K if self.block is None or STEP_K % self.block[1] else self.block[1]

    @property
    def group_steps(self) -> int:
        return 1 if self.block is None else -(-self.block[1] // STEP_K)

    @property
    def sum_bytes(self) -> int:
        """Return bytes of a row's sum over a group, which products need where codes have an offset, or minima."""
        if self.nested and self.minima:
            return 8  # as three bfloat16, and nothing
        return 4 if self.codes in ("int4", "int5") or self.zeros or self.minima else 0

    @property
    def nested(self) -> bool:
        """Return True where scales are whole numbers of a byte, under factors."""
        return self.codes != "e2m1" and self.scales in (torch.uint8, torch.int8)

    @property
    def factors(self) -> int:
        """Count factors of a row's 256 columns, where scales are nested."""
        return 1 + self.minima

    @property
    def of_gguf(self) -> bool:
        """Return True for what ``GgufWeight`` has, and not ``IntWeight``."""
        return self.codes in ("int5", "int6", "iq4") or self.nested or self.minima

    @property
    def by_halves(self) -> bool:
        """Return True where a group is what half of the lanes hold of 32 columns; its scale multiplies the codes."""
        return self.codes == "e2m1" and self.step_group == HALF_OF_LANES

    @property
    def ordered(self) -> bool:
        """Return True where a group is what the tensor core multiplies at once: see ``fragment_order``."""
        return self.codes != "e2m1" and self.step_group == HALF_OF_LANES


PLAIN = FragmentFormat("bfloat16", None, False, torch.bfloat16)  # as a checkpoint has it: no scales, nothing packed


@dataclass(frozen=True, slots=True)
class FragmentWeight(CodedWeight):
    """A weight [N, K] in fragments.

    Attributes:
        codes: [tiles, steps, words] int32; ``PLAIN``: [N, K] bfloat16, which also stands for the scales that there are
            not. scales: of groups [tiles, groups / groups of a step, 8, groups of a step,
            2], the last axis being features g and g + 8 (groups of 16: see ``HALF_OF_LANES``); else as of the weight.
        zeros: uint8, as the scales, or None; or minima as the format says, bytes or float16.
        row_scales: [N] float32, or None; or factors [tiles, 256 columns, 8, 2, 1 or 2] float16, the last axis of scales
            and of minima.
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
        """Wrap a matrix [N, K] in bfloat16 as it lies. Raise ValueError where the kernels do not take it; says why."""
        if weight.dtype != torch.bfloat16 or not weight.is_contiguous() or weight.shape[1] % LANE_COLUMNS:
            raise ValueError(f"rows are no multiples of {LANE_COLUMNS} bfloat16, one behind the other")
        return cls(weight, weight, None, None, weight.shape, PLAIN, weight.dtype)

    @classmethod
    def of(cls, weight: Codable, in_place: bool = False) -> FragmentWeight:
        """Pack a weight; beside both a slice is held.

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
        scales, offsets, row_scales = weight.scales, offsets_of(weight), _row_scales_of(weight)
        packed_groups: list[tuple[torch.Tensor, torch.Tensor]] = []
        if kind.grouped:
            sizes = _scale_sizes(tiles, steps, kind)
            packed_groups.append((scales, scales := place(scales, *sizes)))
            if offsets is not None:
                packed_groups.append((offsets, offsets := place(offsets, *sizes)))
        packed_factors: list[tuple[torch.Tensor, torch.Tensor]] = []
        if row_scales is not None and kind.nested:
            packed_factors.append((row_scales, row_scales := place(row_scales, *_factor_sizes(tiles, steps, kind))))
        packed = cls(codes, scales, offsets, row_scales, weight.shape, kind, weight.dtype)
        # From the last one up: what is packed may reach into what has been read, and no further.
        for part, rows in reversed(list(packed.slices(PACKED_SLICE))):
            height = TILE_N * len(codes[part])
            codes[part] = fragments(words[rows], height, steps, kind.codes, kind.ordered)
            for given, target in packed_groups:
                values = padded(_as_bytes(given)[rows], height, target[0].numel() // TILE_N)
                _as_bytes(target)[part] = _by_lane(values, kind)
            for given, target in packed_factors:
                target[part] = _factors_by_lane(padded(given[rows], height, target[0].numel() // TILE_N), kind)
        return packed

    def with_tail(self, rows: torch.Tensor) -> FragmentWeight:
        """Append rows [n, K] in bfloat16, packed over their memory where they are whole tiles and steps."""
        n, k = rows.shape
        tiles, steps = -(-n // TILE_N), self.codes.shape[1]
        packed = bfloat16_fragments(rows, tiles * TILE_N, steps, self.format.ordered)
        tail = rows.view(packed.shape).copy_(packed) if rows.numel() == packed.numel() else packed
        shape = torch.Size((self.shape[0] + n, k))
        return replace(self, shape=shape, format=replace(self.format, tail=n), tail=tail)

    def tail_rows(self) -> torch.Tensor:
        if self.tail is None:
            return torch.empty(0, self.shape[1], dtype=torch.bfloat16, device=self.device)
        return bfloat16_rows(self.tail, self.format.ordered)[: self.format.tail, : self.shape[1]].contiguous()

    def slices(self, codes: int = DEQUANTIZED_SLICE) -> Iterator[tuple[slice, slice]]:
        """Return parts of the tiles of about so many codes, and the coded rows that they hold."""
        length = max(1, codes // (TILE_N * STEP_K * self.steps))
        for at in range(0, self.tiles, length):
            end = min(at + length, self.tiles)
            yield slice(at, end), slice(at * TILE_N, min(end * TILE_N, self.coded_rows))

    def first_rows(self, stop: int) -> FragmentWeight:
        """Return its first coded rows, over the same memory. Raise ValueError where they do not consist of tiles."""
        if stop % TILE_N or stop > self.coded_rows:
            raise ValueError(f"{stop} rows do not consist of tiles of {TILE_N}")
        tiles = slice(stop // TILE_N)
        of_rows = tiles if self.format.nested else slice(stop)
        of_scales = tiles if self.format.grouped else slice(stop if self.format.block is None else None)
        return replace(
            self,
            codes=self.codes[tiles],
            scales=self.scales[of_scales],
            zeros=None if self.zeros is None else self.zeros[tiles],
            row_scales=None if self.row_scales is None else self.row_scales[of_rows],
            shape=torch.Size((stop, self.shape[1])),
            format=replace(self.format, tail=0),
            tail=None,
        )

    def dequantized(self, rows: slice = slice(None)) -> torch.Tensor:
        """Return what some coded rows [n, K] stand for, in float32; they begin with a tile's first."""
        if self.format == PLAIN:
            return self.codes[rows].float()
        if self.format.codes != "int4" or self.format.minima:
            return self.unpacked(rows).dequantized()
        begin, end, part = self._tiles(rows)
        wide, scales = int4_codes(self.codes[part]), _by_row(self.scales[part], self.format).float().unsqueeze(-1)
        zeros = INT4_ZERO if self.zeros is None else _by_row(self.zeros[part], self.format).unsqueeze(-1)
        wide.view(len(wide), scales.shape[1], -1).sub_(zeros).mul_(scales)
        return wide[: end - begin, : self.shape[1]]

    def unpacked(self, rows: slice = slice(None)) -> Codable:
        """Unpack the weight that was coded, bit by bit; or some rows, from a tile's first, with a block of a tile."""
        begin, end, part = self._tiles(rows)
        kind, n, k = self.format, end - begin, self.shape[1]
        words = rows_of(self.codes[part], k, kind.codes, kind.ordered)[:n].contiguous()
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
        if kind.of_gguf:
            factors = None if self.row_scales is None else _factors_by_row(self.row_scales[part], n, k)
            return GgufWeight(words, scales, zeros, factors, self.dtype, kind.bits, kind.codes == "iq4")
        return IntWeight(words, scales, zeros, self.dtype, kind.bits)

    def _tiles(self, rows: slice) -> tuple[int, int, slice]:
        """Return the first of some coded rows, the one behind the last, and the tiles that hold them."""
        begin, end, _ = rows.indices(self.coded_rows)
        if begin % TILE_N:
            raise ValueError(f"row {begin} is not the first of a tile")
        return begin, end, slice(begin // TILE_N, -(-end // TILE_N))


def is_whole(weight: Codable) -> bool:
    return weight.shape[0] % TILE_N == 0 and weight.shape[1] % STEP_K == 0


def has_room(weight: Codable) -> bool:
    """Return True where a weight may be packed in place: what its last tile and step lack can lie behind it."""
    if is_whole(weight):
        return True
    (n, k), kind = weight.shape, fragment_format(weight)
    if not _reaches(weight.codes.view(torch.int32), prod(code_room(n, k, kind.bits))):
        return False
    if isinstance(weight, Fp8Weight) or not kind.grouped:
        return True
    of_groups, offsets = prod(scale_room(n, k, weight.group_size)), offsets_of(weight)
    rooms = [(weight.scales, of_groups)] + ([] if offsets is None else [(offsets, of_groups)])
    if isinstance(weight, GgufWeight) and weight.factors is not None:
        rooms.append((weight.factors, prod(scale_room(n, k, SUPER_BLOCK)) * kind.factors))
    return all(_reaches(each, room) for each, room in rooms)


def offsets_of(weight: Codable) -> torch.Tensor | None:
    """Return zero points or minima of groups."""
    if isinstance(weight, GgufWeight):
        return weight.minima
    return weight.zeros if isinstance(weight, IntWeight) else None


def _row_scales_of(weight: Codable) -> torch.Tensor | None:
    if isinstance(weight, GgufWeight):
        return weight.factors
    return weight.row_scales if isinstance(weight, Fp4Weight) else None


def _reaches(tensor: torch.Tensor, numbers: int) -> bool:
    """Return True where so many numbers lie from a tensor's first one to the end of its memory."""
    behind = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    return tensor.is_contiguous() and behind >= numbers * tensor.element_size()


def _over(tensor: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """View other sizes from a tensor's first number on."""
    strides = [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    return tensor.as_strided(sizes, strides, tensor.storage_offset())


def fragment_format(weight: Codable) -> FragmentFormat:
    """Return what the fragments of a weight will be. Raises ValueError: the kernel does not take it; says why."""
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
    if isinstance(weight, GgufWeight):
        codes: Codes = "iq4" if weight.table else GGUF_CODES[weight.bits]
        return FragmentFormat(codes, (1, group), False, weight.scales.dtype, minima=weight.minima is not None)
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


def _factor_sizes(tiles: int, steps: int, kind: FragmentFormat) -> tuple[int, ...]:
    return tiles, -(-steps // FACTOR_STEPS), 8, 2, kind.factors


def _as_bytes(scales: torch.Tensor) -> torch.Tensor:
    """View numbers as what can be copied everywhere."""
    return scales.view(torch.uint8) if scales.dtype == torch.float8_e4m3fn else scales


def _by_lane(values: torch.Tensor, kind: FragmentFormat) -> torch.Tensor:
    """Order [tiles * 16, groups] as ``FragmentWeight.scales``; a copy."""
    by_tile = values.view(len(values) // TILE_N, 2, 8, -1, STEP_K // kind.step_group).permute(0, 3, 2, 4, 1)
    if kind.by_halves:
        by_tile = by_tile.unflatten(3, (-1, 2)).transpose(3, 4).flatten(3, 4)
    return by_tile.clone()


def _by_row(values: torch.Tensor, kind: FragmentFormat) -> torch.Tensor:
    by_tile = _as_bytes(values)
    if kind.by_halves:
        by_tile = by_tile.unflatten(3, (2, -1)).transpose(3, 4).flatten(3, 4)
    return by_tile.permute(0, 4, 2, 1, 3).reshape(len(values) * TILE_N, -1).view(values.dtype)


def _factors_by_lane(values: torch.Tensor, kind: FragmentFormat) -> torch.Tensor:
    """Order [tiles * 16, factors] as ``FragmentWeight.row_scales``."""
    return values.view(len(values) // TILE_N, 2, 8, -1, kind.factors).permute(0, 3, 2, 1, 4).clone()


def _factors_by_row(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    by_row = values.permute(0, 3, 2, 1, 4).reshape(len(values) * TILE_N, -1)
    return by_row[:rows, : columns // SUPER_BLOCK * values.shape[-1]].contiguous()
