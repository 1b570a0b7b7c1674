"""Weights put into another order on a card: what a function in PyTorch does to bits, done by one kernel.

Such a function works on units, blocks of a file or tiles of a weight, and each bit of its result is a bit of the unit,
or the opposite of one, or always the same. Which one is found by giving it units that spell the numbers of their bits.
So the function stays the only description of an order, and a card needs one launch where PyTorch needs a hundred.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dflash_local.kernels.jit import jit, tl

BLOCK = 1024  # bytes that one program writes
NO_SOURCE = -1
WIDTHS = (8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class BitMoves:
    """Hold where the bits of a result of ``size`` bytes come from, in runs of ``width`` bits.

    Attributes:
        sources: int32 [size * 8 / width], the number of the first bit in the unit, or ``NO_SOURCE``.
        flips: uint8 [size], what the result is for a unit of zeros.
    """

    sources: torch.Tensor
    flips: torch.Tensor
    width: int

    @property
    def size(self) -> int:
        return len(self.flips)


def trace(move: Callable[[torch.Tensor], torch.Tensor], unit_bytes: int, device: torch.device) -> BitMoves:
    """Find what ``move`` does to units uint8 [n, unit_bytes]; it returns uint8 [n, size]. The result is on ``device``.

    Raises:
        ValueError: a bit of the result depends on several bits.
    """
    bits = 8 * unit_bytes
    numbers, digits = torch.arange(bits), max(1, (bits - 1).bit_length())
    spelled = torch.stack([numbers >> digit & 1 for digit in range(digits)])
    generator = torch.Generator().manual_seed(0)
    probes = torch.randint(0, 2, (8, bits), generator=generator)
    constant = torch.tensor([[0], [1]]).expand(2, bits)
    given = torch.cat((constant, spelled, probes))
    found = move(_bytes(given))
    flips = found[0].clone()
    told = _bits(found ^ flips)
    sources = (told[2 : 2 + digits] << torch.arange(digits).unsqueeze(1)).sum(0)
    sources = torch.where(told[1].bool(), sources, NO_SOURCE)
    want = torch.where(sources == NO_SOURCE, 0, probes[:, sources.clamp(min=0)])
    if not torch.equal(want, told[2 + digits :]):
        raise ValueError("a bit of the result depends on several bits")
    width = next(width for width in WIDTHS if _in_runs(sources.view(-1, width)))
    return BitMoves(sources[::width].to(device, torch.int32), flips.to(device), width)


def _in_runs(sources: torch.Tensor) -> bool:
    """Return True where each row [n, width] is neighbouring bits of one byte, or has no source."""
    first, width = sources[:, :1], sources.shape[1]
    runs = (sources == first + torch.arange(width)).all(1) & (first[:, 0] % 8 + width <= 8) & (first[:, 0] >= 0)
    return bool((runs | (sources == NO_SOURCE).all(1)).all())


def _bits(given: torch.Tensor) -> torch.Tensor:
    return (given.unsqueeze(2).long() >> torch.arange(8) & 1).flatten(1)


def _bytes(bits: torch.Tensor) -> torch.Tensor:
    return (bits.unflatten(1, (-1, 8)) << torch.arange(8)).sum(2).to(torch.uint8)


def move_bits(
    moves: BitMoves, source: torch.Tensor, out: torch.Tensor, unit: tuple[int, int, int], first_plane: int
) -> None:
    """Write the result of each unit.

    Args:
        source: uint8 [rows, bytes], rows of one stride; where it ends before a unit does, zeros are read.
        out: uint8 [rows of units, units of a row * moves.size], rows of one stride.
        unit: rows of a unit, and bytes of each of these rows in the first plane and in the one behind it.
        first_plane: bytes of a source's row before the second plane begins.
    """
    rows, row_bytes = source.shape
    low, above = unit[1:]
    _move_kernel[(out.shape[0], -(-out.shape[1] // BLOCK))](
        source, out, moves.sources, moves.flips, rows, row_bytes, first_plane, source.stride(0), out.stride(0),
        out.shape[1], unit[0], low, above, moves.size, moves.width, BLOCK, num_warps=4,
    )  # fmt: skip


# One kernel for all shapes and units: each more is compiled before the first pair is loaded.
@jit(do_not_specialize=tuple(range(14)))
def _move_kernel(
    source, out, sources, flips, rows, row_bytes, first_plane, source_stride, out_stride, out_row, unit_rows, unit_low,
    unit_above, size, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program: some neighbouring bytes of a row of units; its bytes of the source lie near each other, in the cache.
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < out_row
    unit, byte = column // size, column % size
    found = tl.load(flips + byte).to(tl.int32)
    for part in tl.static_range(8 // WIDTH):
        bit = tl.load(sources + byte * (8 // WIDTH) + part)
        place, of_unit = bit >> 3, unit_low + unit_above
        from_row = row * unit_rows + place // of_unit
        low = place % of_unit
        above = low - unit_low
        from_column = tl.where(above < 0, unit * unit_low + low, first_plane + unit * unit_above + above)
        end = tl.where(above < 0, first_plane, row_bytes)
        there = inside & (bit >= 0) & (from_row < rows) & (from_column < end)
        value = tl.load(source + from_row * source_stride + from_column, mask=there, other=0).to(tl.int32)
        found ^= ((value >> (bit & 7)) & ((1 << WIDTH) - 1)) << part * WIDTH
    tl.store(out + row * out_stride + column, found.to(tl.uint8), mask=inside)
