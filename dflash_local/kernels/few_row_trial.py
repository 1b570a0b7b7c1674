"""Trials of few-row products, for ``kernel_trial``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from dflash_local.kernels import few_row_gemm
from dflash_local.kernels.few_row_gemm import ROW_TILE, FewRowConfig, row_tiles
from dflash_local.kernels.fragment_packing import TILE_N, FragmentFormat, FragmentWeight
from dflash_local.kernels.product_check import ProductCheck, many_rows
from dflash_local.kernels.random_weight import random_weight

MAX_CODES = 2**27  # of a weight that is tried: rows beyond are left out


@dataclass(frozen=True, slots=True)
class FewRowTrial:
    """One kernel, and the product of ``shape`` [N, K] that it is tried with. ``rows``: that a launch takes at most."""

    format: FragmentFormat
    shape: tuple[int, int]
    paired: bool
    config: FewRowConfig
    rows: int

    @property
    def kernel(self) -> str:
        options = few_row_gemm.compile_options(self.format, self.shape[1], self.config, self.rows, self.paired)
        return " ".join([*options, f"N={self.shape[0]}", f"TAIL={self.format.tail}"])

    @property
    def configuration(self) -> object:
        return replace(self, rows=0)

    @property
    def group(self) -> object:
        return self.format

    def compile(self, device: torch.device) -> None:
        few_row_gemm.compiled(device, self.format, self.shape[1], self.config, self.rows, self.paired)

    def prepare(self, device: torch.device) -> None:
        self._check(device)

    def passes(self, device: torch.device) -> bool:
        return self._check(device).passes(self.config, self.rows)

    def _check(self, device: torch.device) -> ProductCheck:
        return _check(self.format, self.shape, self.paired, self.rows, device)


def trials_of(weight: FragmentWeight, paired: bool, config: FewRowConfig, rows: int) -> tuple[FewRowTrial, ...]:
    """The kernels that a configuration's products of up to ``rows`` rows launch."""
    n, k = weight.shape
    unit = TILE_N * (2 if paired else 1)
    most = max(MAX_CODES // k // unit, 1) * unit
    tiles = range(1, row_tiles(rows) + 1)
    return tuple(FewRowTrial(weight.format, (min(n, most), k), paired, config, each * ROW_TILE) for each in tiles)


@lru_cache(maxsize=1)
def _check(kind: FragmentFormat, shape: tuple[int, int], paired: bool, rows: int, device: torch.device) -> ProductCheck:
    return ProductCheck(_weight(kind, shape, device), paired, many_rows(rows, shape[1], device))


@lru_cache(maxsize=1)
def _weight(kind: FragmentFormat, shape: tuple[int, int], device: torch.device) -> FragmentWeight:
    return random_weight(kind, shape, device)
