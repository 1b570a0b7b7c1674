"""Check whether a skinny GEMM kernel multiplies a weight as PyTorch does, tried with rows that would show a mistake."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dflash_local.kernels import fragment_gemm
from dflash_local.kernels.fragment_gemm import FragmentGemmConfig
from dflash_local.kernels.fragment_packing import FragmentWeight

MAX_ERROR = 2**-5  # of a result, and half of it of its row's root mean square; rounding takes a third at most
ONE_HOT_ERROR = 2**-7  # of a single product, which is rounded once
MARGIN = 8  # columns beside a result, which nothing may write to
OUTLIER = 1000.0
KINDS_OF_ROWS = 4  # that ``mixed_rows`` has by turns


class ProductCheck:
    """A weight, bfloat16 rows ``x`` [M, K], and their product in float32. ``paired``: gate and up."""

    def __init__(self, weight: FragmentWeight, paired: bool, x: torch.Tensor) -> None:
        self._weight, self._paired, self._x = weight, paired, x
        wide = x.new_empty(len(x), weight.shape[0] // (2 if paired else 1), dtype=torch.float32)
        if paired:
            self._want = fragment_gemm.swiglu_reference(x.float(), weight, wide)
        else:
            self._want = fragment_gemm.linear_reference(x.float(), weight, wide)
        error = torch.full((len(x), 1), MAX_ERROR, device=x.device)
        if not paired:
            error[(x != 0).sum(1) == 1] = ONE_HOT_ERROR
        self._bound = error * (self._want.abs() + self._want.square().mean(1, keepdim=True).sqrt() / 2)

    def passes(self, config: FragmentGemmConfig, rows: int) -> bool:
        """Return True where it is right for so many rows, twice the same, and writes no more."""
        seen = torch.ones((), dtype=torch.bool, device=self._x.device)
        for begin in range(0, len(self._x), rows):
            part = slice(begin, begin + rows)
            for verdict in self._verdicts(part, config):
                seen &= verdict
        return bool(seen)

    def _verdicts(self, part: slice, config: FragmentGemmConfig) -> Iterator[torch.Tensor]:
        x, want = self._x[part], self._want[part]
        first, second = (self._product(x, config, None) for _ in range(2))
        inside = slice(MARGIN, MARGIN + want.shape[1])
        got = first[:, inside]
        yield ((got - want).abs() <= self._bound[part]).all()
        yield (second[:, inside] == got).all()
        yield first[:, :MARGIN].isnan().all() & first[:, inside.stop :].isnan().all()
        if not self._paired:
            residual = torch.randn_like(first)
            added = self._product(x, config, residual)
            yield (added[:, inside] == (got.float() + residual[:, inside].float()).to(got.dtype)).all()

    def _product(self, x: torch.Tensor, config: FragmentGemmConfig, residual: torch.Tensor | None) -> torch.Tensor:
        """Multiply into the middle of wider rows, whose other numbers are NaN."""
        features = self._want.shape[1]
        wide = x.new_full((len(x), features + 2 * MARGIN), float("nan"))
        out = wide[:, MARGIN : MARGIN + features]
        if self._paired:
            fragment_gemm.swiglu(x, self._weight, out, config)
        else:
            inner = None if residual is None else residual[:, MARGIN : MARGIN + features]
            fragment_gemm.linear(x, self._weight, out, config, inner)
        return wide


def mixed_rows(rows: int, in_features: int, device: torch.device) -> torch.Tensor:
    """Return [rows, K]: Gaussian rows, rows with an outlier, one-hot rows and rows of zeros, by turns."""
    x = torch.randn(rows, in_features, device=device, generator=torch.Generator(device).manual_seed(0))
    x[1::KINDS_OF_ROWS, in_features // 3] = OUTLIER
    x[2::KINDS_OF_ROWS] = 0
    x[2::KINDS_OF_ROWS, in_features - 1] = 1
    x[3::KINDS_OF_ROWS] = 0
    return x.to(torch.bfloat16)


def many_rows(rows: int, in_features: int, device: torch.device) -> torch.Tensor:
    """Return ``mixed_rows``, Gaussian rows, one-hot rows all over K, and at the end fewer than ``rows``."""
    gaussian = torch.randn(rows, in_features, device=device, generator=torch.Generator(device).manual_seed(1))
    places = torch.linspace(0, in_features - 1, min(8 * rows, in_features), device=device).long()
    one_hot = torch.zeros(len(places), in_features, device=device).scatter_(1, places[:, None], 1.0)
    last = mixed_rows(max(1, rows - 3), in_features, device)
    parts = (mixed_rows(rows, in_features, device), gaussian.to(torch.bfloat16), one_hot.to(torch.bfloat16), last)
    return torch.cat(parts)
