"""The one seam through which a weight matrix is used: its format, and the product that is fastest for it here.

A weight format is named nowhere else. There are two: the model's own dtype, and eight bits with a scale for each
column. A further one is a type of weight, a ``Format`` beside the two below, and a line in ``_format``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dflash_local.kernels import eight_bit, skinny_gemm
from dflash_local.kernels.eight_bit import EightBit, Way
from dflash_local.kernels.jit import power_of_two, runs_kernels
from dflash_local.kernels.skinny_gemm import Tile
from dflash_local.kernels.timing import replay_ms

Weight = torch.Tensor | EightBit
Cut = Tile | Way
LIBRARY = None  # in place of a cut: the library's own product
TILES = (Tile(32, 128, 7), Tile(32, 256, 5), Tile(64, 128, 7), Tile(64, 256, 5), Tile(32, 128, 4), Tile(16, 64, 4))
PAIRED_TILES = (Tile(32, 128, 4), Tile(64, 128, 3), Tile(32, 64, 5), Tile(16, 64, 4))
SMALL = (Tile(16, 32, 3), Tile(16, 16, 3))  # for toys, whose shapes no larger tile divides
WAYS = (  # the winners of benchmarks/eight_bit.py on an H200, and for each kernel one that smaller cards hold
    *(Way(tile) for tile in (Tile(64, 256, 4), Tile(64, 128, 6))),
    *(Way(Tile(64, 256, 4), split=split) for split in (2, 4)),
    *(Way(tile, True) for tile in (Tile(128, 256, 4), Tile(64, 256, 4), Tile(32, 256, 7))),
)
PAIRED_WAYS = (
    *(Way(tile) for tile in (Tile(32, 128, 5), Tile(32, 256, 4))),
    *(Way(tile, True) for tile in (Tile(32, 256, 4), Tile(64, 128, 5))),
)
SMALL_WAYS = (Way(Tile(16, 32, 3)), Way(Tile(16, 32, 3), True))
REPLAYS = 5
COARSER = 1.05  # what a product that rounds its rows to eight bits counts as: it must save more than that
KEPT_FREE = 1024  # bytes of shared memory that the system keeps


class Format(Protocol):
    """What a weight format brings along."""

    def linear(
        self, x: torch.Tensor, weight: Any, out: torch.Tensor, cut: Any, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """``out = x @ weight.T (+ residual)`` for a few rows."""

    def swiglu(self, x: torch.Tensor, weight: Any, out: torch.Tensor, cut: Any) -> torch.Tensor:
        """``out = silu(x @ gate.T) * (x @ up.T)`` for any number of rows."""

    def many(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """``x @ weight.T`` for as many rows as there are."""

    def cuts(self, paired: bool) -> tuple[Sequence[Cut], Sequence[Cut]]:
        """Ways to cut a product: the usual ones, and those for toys."""

    def step_bytes(self, cut: Any, rows: int, columns: int, weight: Any) -> int:
        """Shared memory of one stage of a program with so many rows of ``x`` and columns of the weight."""


class _Full:
    """The model's own dtype."""

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, cut: Any, residual: torch.Tensor | None
    ) -> torch.Tensor:
        if cut is not None and len(x) <= skinny_gemm.MAX_ROWS:
            return skinny_gemm.linear(x, weight, out, cut, residual)
        if residual is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.add(residual, torch.mm(x, weight.t()), out=out)

    def swiglu(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, cut: Any) -> torch.Tensor:
        if cut is not None and len(x) <= skinny_gemm.MAX_ROWS:
            return skinny_gemm.swiglu(x, weight, out, cut)
        return skinny_gemm.swiglu_twin(x, weight, out)

    def many(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, weight.t())

    def cuts(self, paired: bool) -> tuple[Sequence[Cut], Sequence[Cut]]:
        return PAIRED_TILES if paired else TILES, SMALL

    def step_bytes(self, cut: Tile, rows: int, columns: int, weight: torch.Tensor) -> int:
        return (rows + columns) * cut.depth * weight.element_size()


class _EightBit:
    """``kernels.eight_bit``: its two kernels are two kinds of ways."""

    linear = staticmethod(eight_bit.linear)
    swiglu = staticmethod(eight_bit.swiglu)

    def many(self, x: torch.Tensor, weight: EightBit) -> torch.Tensor:
        return eight_bit.linear_twin(x, weight, x.new_empty(len(x), weight.shape[0]))

    def cuts(self, paired: bool) -> tuple[Sequence[Cut], Sequence[Cut]]:
        return PAIRED_WAYS if paired else WAYS, SMALL_WAYS

    def step_bytes(self, cut: Way, rows: int, columns: int, weight: EightBit) -> int:
        return (rows * (1 if cut.narrow else weight.dtype.itemsize) + columns) * cut.tile.depth


FULL, EIGHT_BIT = _Full(), _EightBit()


def _format(weight: Weight) -> Format:
    return EIGHT_BIT if isinstance(weight, EightBit) else FULL


@dataclass(slots=True)
class Linear:
    """A weight [N, K] with its product.

    Attributes:
        tile: how the product is cut; None takes the library's.
    """

    weight: Weight
    tile: Cut | None = LIBRARY

    @property
    def columns(self) -> int:
        """Width of the result."""
        return self.weight.shape[0]

    def __call__(self, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """``out = x @ weight.T (+ residual)`` for a few rows; ``out`` may be the residual."""
        return _format(self.weight).linear(x, self.weight, out, self.tile, residual)

    def many(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T`` for as many rows as there are."""
        return _format(self.weight).many(x, self.weight)


@dataclass(slots=True)
class GateUp:
    """The two halves of a gated layer, [2 I, K], with their joint product."""

    weight: Weight
    tile: Cut | None = LIBRARY

    @property
    def columns(self) -> int:
        """Width of the result."""
        return self.weight.shape[0] // 2

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """``out = silu(x @ gate.T) * (x @ up.T)`` for a few rows."""
        return _format(self.weight).swiglu(x, self.weight, out, self.tile)

    def many(self, x: torch.Tensor) -> torch.Tensor:
        """The same for as many rows as there are."""
        out = x.new_empty(len(x), self.columns)
        return _format(self.weight).swiglu(x, self.weight, out, LIBRARY)


def in_eight_bits(layer: Linear | GateUp, device: torch.device | None = None) -> None:
    """Give a layer the codes of its weight, on ``device`` or where it lies; how its product is cut is to be chosen."""
    if isinstance(layer.weight, torch.Tensor):
        layer.weight, layer.tile = EightBit.of(layer.weight, device), LIBRARY


def eight_bit_copy(layer: Linear) -> Linear:
    """A layer with the codes of that one's weight beside it; the same one where its weight is coarse already."""
    return Linear(EightBit.of(layer.weight)) if isinstance(layer.weight, torch.Tensor) else layer


def first_columns(layer: Linear, columns: int) -> Linear:
    """A layer with the first columns of that one's result; it takes no memory of its own."""
    weight = layer.weight
    if isinstance(weight, EightBit):
        return Linear(EightBit(weight.codes[:columns], weight.scales[:columns], weight.dtype))
    return Linear(weight[:columns])


def choose_tiles(layers: Sequence[Linear | GateUp], rows: int) -> dict[tuple[int, int], Cut | None]:
    """Measure every shape once with ``rows`` rows and give each layer the fastest product.

    Layers of one shape are run one after the other, so that no weight is found in a cache. Without
    CUDA nothing is measured and the library's product is kept.

    Returns:
        what was chosen, by weight shape.
    """
    chosen: dict[tuple[int, int], Cut | None] = {}
    groups: dict[tuple[type, type, torch.Size], list[Linear | GateUp]] = {}
    for layer in layers:
        weight = layer.weight
        if runs_kernels(weight):
            groups.setdefault((type(layer), type(weight), weight.shape), []).append(layer)
    for (_, _, shape), members in groups.items():
        best = _fastest(members, rows)
        for member in members:
            member.tile = best
        chosen[shape[0], shape[1]] = best
    return chosen


def candidates(layer: Linear | GateUp, shared_memory: int, rows: int) -> list[Any]:
    """Cuts that divide a weight and fit a device's shared memory (bytes for one program)."""
    paired = isinstance(layer, GateUp)
    weight = layer.weight
    kind, block = _format(weight), max(skinny_gemm.MIN_ROWS, power_of_two(rows))

    def fits(cut: Cut) -> bool:
        tile = cut.tile if isinstance(cut, Way) else cut
        step = kind.step_bytes(cut, block, tile.columns * (2 if paired else 1), weight)
        return cut.fits(layer.columns, weight.shape[1]) and step * tile.stages <= shared_memory - KEPT_FREE

    usual, small = kind.cuts(paired)
    return [cut for cut in usual if fits(cut)] or [cut for cut in small if fits(cut)]


def _fastest(members: list[Linear | GateUp], rows: int) -> Cut | None:
    first = members[0]
    device, dtype = first.weight.device, first.weight.dtype
    x = torch.randn(rows, first.weight.shape[1], device=device, dtype=dtype)
    out = torch.empty(rows, first.columns, device=device, dtype=dtype)
    shared = int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]
    cuts = candidates(first, shared, rows)
    if isinstance(first.weight, torch.Tensor):
        cuts = [LIBRARY, *cuts]  # for the other formats no library has one
    times: dict[Cut | None, float] = {}
    for cut in cuts:
        for member in members:
            member.tile = cut
        spent = replay_ms(lambda: [member(x, out) for member in members], REPLAYS)
        times[cut] = spent * (COARSER if isinstance(cut, Way) and cut.narrow else 1.0)
    return min(times, key=lambda cut: times[cut], default=LIBRARY)
