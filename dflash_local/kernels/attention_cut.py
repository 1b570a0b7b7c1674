"""How a long cache is shared out among programs: as measured for its kind, or fixed by position alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

PIECES = 64  # of an even cut, at most; more would only be more to join
FEWEST = 16  # keys of a piece in any cut
LEAST = 128  # keys of the fixed cut's smallest pieces
OCTAVE = 32  # pieces of the fixed cut from a length to its double
READS_EIGHT = (8, 9)  # the compute capability from which a load can be told that its bytes are float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Cut:
    """How a cache is walked.

    Attributes:
        step: keys at a time. warps, stages: of a program. programs: of an even cut, for one multiprocessor.
        least: keys of an even cut's pieces, at least.
    """

    step: int = 32
    warps: int = 4
    stages: int = 2
    programs: int = 4
    least: int = 128


# The one place where measured cuts are entered (benchmarks/attention.py), by the cache's bytes for a number and the
# width of a head, the next of these that is not smaller.
CUTS = {
    (2, 128): Cut(step=32, stages=4, programs=2),
    (2, 256): Cut(step=32, stages=3, programs=1),
    (1, 128): Cut(step=64, stages=3, programs=2),
    (1, 256): Cut(step=32, stages=3, programs=2),
}


@dataclass(frozen=True, slots=True)
class Card:
    """What a cut depends on: shared memory of a program (bytes), multiprocessors, compute capability."""

    shared_memory: int
    processors: int
    capability: tuple[int, int]


@cache
def card_of(device: torch.device) -> Card:
    """A CUDA device's."""
    found = torch.cuda.get_device_properties(device)
    shared = int(found.shared_memory_per_block_optin)  # type: ignore[attr-defined]
    return Card(shared, found.multi_processor_count, (found.major, found.minor))


def cut_of(lines: int, width: int, number: int, shared_memory: int) -> Cut:
    """The cut for caches of ``number`` bytes a number; where a card has no room for it (bytes), as much as fits.

    A program holds its queries and, for each stage, a step's keys and values. Fewer stages are tried before fewer
    keys, and two stages are kept.
    """
    cut = CUTS[(min(number, 2), 128 if width <= 128 else 256)]
    step, stages = cut.step, cut.stages
    while lines * width * max(number, 2) + 2 * stages * step * width * number > shared_memory:
        if stages > 2:
            stages -= 1
        elif step > FEWEST:
            step //= 2
        else:
            break
    return Cut(step, cut.warps, stages, cut.programs, cut.least)


def fixed_pieces(reach: int) -> int:
    """Pieces of the fixed cut below a position: ``OCTAVE`` for each doubling, all of ``LEAST`` keys up to the first."""
    octave = max((max(reach - 1, 0) // (OCTAVE * LEAST)).bit_length() - 1, 0)
    return octave * OCTAVE + math.ceil(reach / (LEAST << octave))
