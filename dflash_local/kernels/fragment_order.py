"""Describe where each code of a weight lies in its fragments: bits from rows to what lanes of a warp multiply, and
back.

Within 32 columns, lane (g, t) = (lane / 4, lane % 4) holds columns 8t to 8t + 7 of features g and g + 8; so the eight
numbers of a row of x that it needs lie side by side. Axes below: h: feature g or g + 8. k32: 32 columns of a step.
half, pair, element: of the columns 8t + 4 half + 2 pair + element. Operand h + 2 pair is the pair of columns that a
lane hands to the tensor core as one register. Where groups are of 16 columns whose sums are scaled, a lane's columns
are 16 half + 4t + 2 pair + element: then what is multiplied at once is one group (``in_order``).
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Literal

import torch

from dflash_local.kernels.jit import runs_kernels
from dflash_local.kernels.move_bits import BitMoves, move_bits, trace
from dflash_local.kernels.quantized_weight import planes
from dflash_local.layout.linear import INT4_PER_WORD, STEP_K, TILE_N

Codes = Literal["int4", "int5", "int6", "int8", "e4m3", "e2m1", "iq4", "bfloat16"]
BITS: dict[Codes, int] = {"int4": 4, "int5": 5, "int6": 6, "e2m1": 4, "iq4": 4, "bfloat16": 16}  # others have eight
Fields = tuple[tuple[int, int, tuple[int, int, int, int]], ...]
_INTEGER: Fields = ((15, 0, (0, 4, 8, 12)),)
# Fields of the lowest four bits of a code: their mask, their lowest bit in the code, and where each operand's lie in a
# word; those of its second column lie ELEMENT_SHIFT further.
NIBBLES: dict[Codes, Fields] = {
    "int4": _INTEGER,
    "int5": _INTEGER,
    "int6": _INTEGER,
    "e2m1": ((7, 0, (6, 3, 0, 9)), (1, 3, (15, 12, 14, 13))),  # exponent and mantissa; sign
    "iq4": ((15, 0, (0, 8, 16, 24)),),  # of an operand side by side, as they are looked up
}
ELEMENT_SHIFT: dict[Codes, int] = {"iq4": 4}  # 16 for others
NIBBLE_STEP = STEP_K * TILE_N // INT4_PER_WORD  # words of a tile's step of four bits; what is above them follows
SIGNS = -0x7F7F7F80  # 0x80808080: the highest bit of each byte of a word
FOUR_COLUMNS = {2: torch.uint8, 4: torch.int16, 16: torch.int64}  # of so many bits each


def fragments(words: torch.Tensor, height: int, steps: int, codes: Codes, ordered: bool) -> torch.Tensor:
    """Order rows of words [n, words] as [tiles, steps, words], filled up with zeros to whole tiles and steps.

    Args:
        ordered: see ``in_order``.
    """
    if not runs_kernels(words):
        return _fragments(words, height, steps, codes, ordered)
    moves, (low, above) = _moves(codes, ordered, words.device), _row_bytes(codes)
    out = words.new_empty(height // TILE_N, steps, moves.size // 4)
    first_plane = words.shape[1] * 4 * low // (low + above)
    move_bits(moves, words.view(torch.uint8), out.view(torch.uint8).flatten(1), (TILE_N, low, above), first_plane)
    return out


@cache
def _moves(codes: Codes, ordered: bool, device: torch.device) -> BitMoves:
    def move(units: torch.Tensor) -> torch.Tensor:
        words = units.view(len(units) * TILE_N, -1).view(torch.int32)
        return _fragments(words, len(words), 1, codes, ordered).view(torch.uint8).flatten(1)

    return trace(move, TILE_N * sum(_row_bytes(codes)), device)


@cache
def _moves_back(codes: Codes, ordered: bool, device: torch.device) -> BitMoves:
    def move(units: torch.Tensor) -> torch.Tensor:
        words = units.view(torch.int32).unsqueeze(1)
        return _rows_of(words, STEP_K, codes, ordered).contiguous().view(torch.uint8).view(len(units), -1)

    return trace(move, TILE_N * sum(_row_bytes(codes)), device)


def _row_bytes(codes: Codes) -> tuple[int, int]:
    """Return the bytes of a row of a tile's step in the first plane of codes and in the second."""
    bits = BITS.get(codes, 8)
    low = STEP_K * (4 if codes in NIBBLES else bits) // 8
    return low, STEP_K * bits // 8 - low


def _fragments(words: torch.Tensor, height: int, steps: int, codes: Codes, ordered: bool) -> torch.Tensor:
    bits = BITS.get(codes, 8)
    if codes not in NIBBLES:
        filled = padded(words, height, steps * STEP_K * bits // 32)
        return _byte_fragments(filled ^ SIGNS if codes == "int8" else filled)
    lowest, above = planes(words, bits)
    lowest = padded(lowest, height, steps * STEP_K // INT4_PER_WORD)
    found = _nibble_fragments(in_order(lowest, 4) if ordered else lowest, codes)
    if bits == 4:
        return found
    above = padded(above, height, steps * STEP_K * (bits - 4) // 32)
    above = _plane_fragments(in_order(above, bits - 4) if ordered else above, bits - 4)
    return torch.cat((found, above), 2)


def rows_of(given: torch.Tensor, columns: int, codes: Codes, ordered: bool) -> torch.Tensor:
    """Invert ``fragments``: the words of so many columns of rows."""
    if not runs_kernels(given):
        return _rows_of(given, columns, codes, ordered)
    (tiles, steps, _), (low, above) = given.shape, _row_bytes(codes)
    packed = given.contiguous().view(torch.uint8).view(tiles, -1)
    out = torch.empty_like(packed)
    unit = TILE_N * (low + above)
    move_bits(_moves_back(codes, ordered, given.device), packed, out, (1, unit, 0), packed.shape[1])
    rows = out.view(tiles, steps, TILE_N, low + above).transpose(1, 2)
    planes_of_rows = (each.reshape(tiles * TILE_N, -1) for each in rows.split((low, above), 3))
    return torch.cat([each[:, : each.shape[1] * columns // (steps * STEP_K)] for each in planes_of_rows], 1).view(
        torch.int32
    )


def _rows_of(given: torch.Tensor, columns: int, codes: Codes, ordered: bool) -> torch.Tensor:
    bits = BITS.get(codes, 8)
    if codes not in NIBBLES:
        rows = _byte_rows(given)
        return (rows ^ SIGNS if codes == "int8" else rows)[:, : columns * bits // 32]
    found = _nibble_rows(given[..., :NIBBLE_STEP].contiguous(), codes)
    found = (in_order(found, 4, back=True) if ordered else found)[:, : columns // INT4_PER_WORD]
    if bits == 4:
        return found
    above = _plane_rows(given[..., NIBBLE_STEP:], bits - 4)
    above = in_order(above, bits - 4, back=True) if ordered else above
    return torch.cat((found, above[:, : columns * (bits - 4) // 32]), 1)


def in_order(rows: torch.Tensor, bits: int, back: bool = False) -> torch.Tensor:
    """Order rows so that each lane's columns of 32 lie side by side where they else are half its own and half of those
    16 columns further; ``back``: the other way round. ``bits``: of a column.
    """
    fours = rows.view(FOUR_COLUMNS[bits]).unflatten(1, (-1, *((4, 2) if back else (2, 4))))
    return fours.transpose(2, 3).flatten(1).view(rows.dtype)


def padded(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return a matrix with zeros beyond its last row and column."""
    if tensor.shape == (rows, columns):
        return tensor.contiguous()
    wide = tensor.new_zeros(rows, columns)
    wide[: tensor.shape[0], : tensor.shape[1]] = tensor
    return wide


def _nibble_fragments(words: torch.Tensor, codes: Codes) -> torch.Tensor:
    rows = words.view(len(words) // TILE_N, 2, 8, -1, 4, 4)  # tile h g step k32 t
    tiles, steps = len(rows), rows.shape[3]
    found = torch.zeros(tiles, steps, 4, 8, 4, 2, dtype=torch.int32, device=words.device)  # k32 g t half
    for h, place in product(range(2), range(INT4_PER_WORD)):
        half, pair, element = place >> 2, place >> 1 & 1, place & 1
        for mask, lowest, places in NIBBLES[codes]:
            bits = rows[:, h] >> 4 * place + lowest & mask
            into = found[..., half]  # by a name of its own: else what was changed is copied onto itself
            into |= bits.permute(0, 2, 3, 1, 4) << places[h + 2 * pair] + ELEMENT_SHIFT.get(codes, 16) * element
    # A lane's 16 bytes are of 64 columns.
    return found.view(tiles, steps, 2, 2, 8, 4, 2).permute(0, 1, 2, 4, 5, 3, 6).reshape(tiles, steps, -1)


def _nibble_rows(given: torch.Tensor, codes: Codes) -> torch.Tensor:
    tiles, steps = given.shape[:2]
    ordered = given.view(tiles, steps, 2, 8, 4, 2, 2).permute(0, 1, 2, 5, 3, 4, 6).reshape(tiles, steps, 4, 8, 4, 2)
    rows = torch.zeros(tiles, 2, 8, steps, 4, 4, dtype=torch.int32, device=given.device)
    for h, place in product(range(2), range(INT4_PER_WORD)):
        half, pair, element = place >> 2, place >> 1 & 1, place & 1
        for mask, lowest, places in NIBBLES[codes]:
            bits = ordered[..., half] >> places[h + 2 * pair] + ELEMENT_SHIFT.get(codes, 16) * element & mask
            rows[:, h] |= bits.permute(0, 3, 1, 2, 4) << 4 * place + lowest
    return rows.view(tiles * TILE_N, -1)


def _plane_fragments(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Order what codes have above four bits, one or two: a lane's words are of 64 or 32 columns, in whose halves each
    operand's bits lie in the order of the tensor core's tiles; so shifts alone bring them above the others.
    """
    per = 2 // bits
    rows = words.view(torch.uint8 if bits == 1 else torch.int16).int()  # of eight columns each
    rows = rows.view(len(rows) // TILE_N, 2, 8, -1, 4 // per, per, 4)  # tile h g step word k32 t
    tiles, steps = len(rows), rows.shape[3]
    found = torch.zeros(tiles, steps, 8, 4, 4 // per, dtype=torch.int32, device=words.device)  # g t word
    for h, k32, place in product(range(2), range(per), range(8)):
        code = rows[:, h, :, :, :, k32] >> bits * place & (1 << bits) - 1
        found |= code.permute(0, 2, 1, 4, 3) << _plane_place(bits, h, k32, place)
    return found.view(tiles, steps, -1)


def _plane_rows(given: torch.Tensor, bits: int) -> torch.Tensor:
    per = 2 // bits
    tiles, steps = given.shape[:2]
    ordered = given.reshape(tiles, steps, 8, 4, 4 // per)
    rows = torch.zeros(tiles, 2, 8, steps, 4 // per, per, 4, dtype=torch.int32, device=given.device)
    for h, k32, place in product(range(2), range(per), range(8)):
        code = ordered >> _plane_place(bits, h, k32, place) & (1 << bits) - 1
        rows[:, h, :, :, :, k32] |= code.permute(0, 2, 1, 4, 3) << bits * place
    narrow = rows.to(torch.uint8) if bits == 1 else rows.to(torch.int16)
    return narrow.view(tiles * TILE_N, -1).view(torch.int32)


def _plane_place(bits: int, h: int, k32: int, place: int) -> int:
    half, pair, element = place >> 2, place >> 1 & 1, place & 1
    return bits * (k32 * 8 + half * 4 + h + 2 * pair) + 16 * element


def int4_codes(given: torch.Tensor) -> torch.Tensor:
    """Return codes of rows [tiles * 16, columns] as float32, in few passes over memory."""
    tiles, steps = given.shape[:2]
    place = torch.arange(8, device=given.device, dtype=torch.int32)  # h pair element
    shifts = (place >> 2) * 4 + (place >> 1 & 1) * 8 + (place & 1) * 16
    words = given.view(tiles, steps, 2, 8, 4, 2, 2, 1, 1, 1)  # 64 columns, g t k32 half
    codes = (words >> shifts.view(2, 2, 2)).bitwise_and_(15)
    ordered = codes.permute(0, 7, 3, 1, 2, 5, 4, 6, 8, 9)
    wide = torch.empty(ordered.shape, dtype=torch.float32, device=given.device)
    return wide.copy_(ordered).view(tiles * TILE_N, -1)


def _byte_fragments(words: torch.Tensor) -> torch.Tensor:
    """Order bytes in words of two columns of both features, g + 8 below g; shifts by 4 leave e4m3's bits in place."""
    codes = words.view(torch.uint8).view(len(words) // TILE_N, 2, 8, -1, 4, 4, 2, 2, 2)
    found = codes.permute(0, 3, 4, 2, 5, 6, 7, 8, 1).flip(-1)  # tile step k32 g t half pair element h
    return found.reshape(len(codes), codes.shape[3], -1).view(torch.int32)


def _byte_rows(given: torch.Tensor) -> torch.Tensor:
    tiles, steps = given.shape[:2]
    codes = given.contiguous().view(torch.uint8).view(tiles, steps, 4, 8, 4, 2, 2, 2, 2)
    return codes.flip(-1).permute(0, 8, 3, 1, 2, 4, 5, 6, 7).reshape(tiles * TILE_N, -1).view(torch.int32)


def bfloat16_fragments(rows: torch.Tensor, height: int, steps: int, ordered: bool) -> torch.Tensor:
    """Order rows [n, columns] as [tiles, steps, 2048]; eight loads of a lane for its eight tiles of 16 columns."""
    rows = padded(rows, height, steps * STEP_K)
    rows = in_order(rows, 16) if ordered else rows
    by_tile = rows.view(len(rows) // TILE_N, 2, 8, -1, 4, 4, 2, 2, 2)  # tile h g step k32 t half pair element
    return by_tile.permute(0, 3, 4, 6, 2, 5, 7, 1, 8).reshape(len(by_tile), by_tile.shape[3], -1)


def bfloat16_rows(given: torch.Tensor, ordered: bool) -> torch.Tensor:
    tiles, steps = given.shape[:2]
    by_lane = given.view(tiles, steps, 4, 2, 8, 4, 2, 2, 2)  # tile step k32 half g t pair h element
    rows = by_lane.permute(0, 7, 4, 1, 2, 5, 3, 6, 8).reshape(tiles * TILE_N, -1)
    return in_order(rows, 16, back=True) if ordered else rows
