"""The one seam through which a weight matrix is used: its format, and the product that is fastest for it here.

A weight format is named nowhere else. Today there is one: the model's own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash_local.kernels import skinny_gemm
from dflash_local.kernels.jit import runs_kernels
from dflash_local.kernels.skinny_gemm import Tile
from dflash_local.kernels.timing import replay_ms

LIBRARY = None  # in place of a tile: the library's own product
TILES = (Tile(32, 128, 7), Tile(32, 256, 5), Tile(64, 128, 7), Tile(64, 256, 5), Tile(32, 128, 4), Tile(16, 64, 4))
PAIRED_TILES = (Tile(32, 128, 4), Tile(64, 128, 3), Tile(32, 64, 5), Tile(16, 64, 4))
SMALL = (Tile(16, 32, 3), Tile(16, 16, 3))  # for toys, whose shapes no larger tile divides
REPLAYS = 5
KEPT_FREE = 1024  # bytes of shared memory that the system keeps


@dataclass(slots=True)
class Linear:
    """A weight [N, K] with its product.

    Attributes:
        tile: how the product is cut; None takes the library's.
    """

    weight: torch.Tensor
    tile: Tile | None = LIBRARY

    @property
    def columns(self) -> int:
        """Width of the result."""
        return self.weight.shape[0]

    def __call__(self, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """``out = x @ weight.T (+ residual)`` for a few rows; ``out`` may be the residual."""
        if self.tile is not None and len(x) <= skinny_gemm.MAX_ROWS:
            return skinny_gemm.linear(x, self.weight, out, self.tile, residual)
        if residual is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.add(residual, torch.mm(x, self.weight.t()), out=out)

    def many(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T`` for as many rows as there are."""
        return torch.mm(x, self.weight.t())


@dataclass(slots=True)
class GateUp:
    """The two halves of a gated layer, [2 I, K], with their joint product."""

    weight: torch.Tensor
    tile: Tile | None = LIBRARY

    @property
    def columns(self) -> int:
        """Width of the result."""
        return self.weight.shape[0] // 2

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """``out = silu(x @ gate.T) * (x @ up.T)`` for a few rows."""
        if self.tile is not None and len(x) <= skinny_gemm.MAX_ROWS:
            return skinny_gemm.swiglu(x, self.weight, out, self.tile)
        return skinny_gemm.swiglu_twin(x, self.weight, out)

    def many(self, x: torch.Tensor) -> torch.Tensor:
        """The same for as many rows as there are."""
        return skinny_gemm.swiglu_twin(x, self.weight, x.new_empty(len(x), self.columns))


def choose_tiles(layers: Sequence[Linear | GateUp], rows: int) -> dict[tuple[int, int], Tile | None]:
    """Measure every shape once with ``rows`` rows and give each layer the fastest product.

    Layers of one shape are run one after the other, so that no weight is found in a cache. Without
    CUDA nothing is measured and the library's product is kept.

    Returns:
        what was chosen, by weight shape.
    """
    chosen: dict[tuple[int, int], Tile | None] = {}
    groups: dict[tuple[type, tuple[int, int]], list[Linear | GateUp]] = {}
    for layer in layers:
        if runs_kernels(layer.weight):
            groups.setdefault((type(layer), tuple(layer.weight.shape)), []).append(layer)  # type: ignore[arg-type]
    for (_, shape), members in groups.items():
        best = _fastest(members, rows)
        for member in members:
            member.tile = best
        chosen[shape] = best
    return chosen


def candidates(layer: Linear | GateUp, shared_memory: int, rows: int) -> list[Tile]:
    """Tiles that divide a weight and fit a device's shared memory (bytes for one program)."""
    paired = isinstance(layer, GateUp)
    size = layer.weight.element_size()
    block = max(skinny_gemm.MIN_ROWS, rows)

    def fits(tile: Tile) -> bool:
        step = (block + tile.columns * (2 if paired else 1)) * tile.depth * size
        return tile.fits(layer.columns, layer.weight.shape[1]) and step * tile.stages <= shared_memory - KEPT_FREE

    found = [tile for tile in (PAIRED_TILES if paired else TILES) if fits(tile)]
    return found or [tile for tile in SMALL if fits(tile)]


def _fastest(members: list[Linear | GateUp], rows: int) -> Tile | None:
    first = members[0]
    device, dtype = first.weight.device, first.weight.dtype
    x = torch.randn(rows, first.weight.shape[1], device=device, dtype=dtype)
    out = torch.empty(rows, first.columns, device=device, dtype=dtype)
    shared = int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]
    times: dict[Tile | None, float] = {}
    for tile in (LIBRARY, *candidates(first, shared, rows)):
        for member in members:
            member.tile = tile
        times[tile] = replay_ms(lambda: [member(x, out) for member in members], REPLAYS)
    return min(times, key=lambda tile: times[tile])
