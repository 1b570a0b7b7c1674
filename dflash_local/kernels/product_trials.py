"""Trials of the skinny GEMMs and of the kernels of a mixture of experts, for ``kernel_trial``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm

import torch

from dflash_local.kernels import expert_gemm, fragment_gemm
from dflash_local.kernels.expert_check import ExpertCheck, RouteCheck
from dflash_local.kernels.expert_gemm import GATE_UP_CONFIGS, ExpertConfig, GateUpConfig, KernelSpec, Mixture, spec_of
from dflash_local.kernels.experts import ExpertWeight
from dflash_local.kernels.fragment_gemm import ROW_TILE, FragmentGemmConfig, row_tiles
from dflash_local.kernels.fragment_packing import TILE_N, FragmentFormat, FragmentWeight
from dflash_local.kernels.product_check import ProductCheck, many_rows
from dflash_local.kernels.random_weight import random_weight
from dflash_local.layout.linear import SLICE_ROWS

MAX_EXPERT_CODES = 2**26  # of all experts' weight that is tried: features of each beyond are left out
MAX_CODES = 2**27  # of a weight that is tried: rows beyond are left out


@dataclass(frozen=True, slots=True)
class RouteTrial:
    """A ``KernelTrial`` of the router of a mixture."""

    mixture: Mixture
    biased: bool

    @property
    def kernel(self) -> str:
        return " ".join(["route", *expert_gemm.route_options(self.mixture, self.biased)])

    @property
    def configuration(self) -> object:
        return self

    @property
    def group(self) -> object:
        return self

    def compile(self, device: torch.device) -> None:
        expert_gemm.compiled_route(device, self.mixture, self.biased)

    def prepare(self, device: torch.device) -> None:
        """Prepare nothing: the check makes its logits."""

    def passes(self, device: torch.device) -> bool:
        return RouteCheck(self.mixture, self.biased, device).passes(SLICE_ROWS)


@dataclass(frozen=True, slots=True)
class ExpertTrial:
    """A ``KernelTrial`` of one product, with fewer experts and perhaps features: that changes none of its options."""

    spec: KernelSpec
    features: int

    @property
    def kernel(self) -> str:
        return " ".join([self.spec.name, *self.spec.options, f"N={self.features}"])

    @property
    def configuration(self) -> object:
        mixture, config = self.spec.mixture, self.spec.config
        return config, self.group, mixture.slots, mixture.clamp, self.spec.biased, self.spec.in_features

    @property
    def group(self) -> object:
        return self.spec.name, self.spec.format

    def compile(self, device: torch.device) -> None:
        expert_gemm.compiled(device, self.spec)

    def prepare(self, device: torch.device) -> None:
        self._check(device)

    def passes(self, device: torch.device) -> bool:
        return self._check(device).passes(self.spec.config)

    def _check(self, device: torch.device) -> ExpertCheck:
        spec, gate_up = self.spec, isinstance(self.spec.config, GateUpConfig)
        return _expert_check(
            spec.format, (self.features, spec.in_features), spec.biased, spec.mixture, gate_up, spec.rows, device
        )


def trial_of(weight: ExpertWeight, mixture: Mixture, config: ExpertConfig, rows: int) -> ExpertTrial:
    """Build the trial of the kernel that multiplies a weight. ``rows``: of a launch, 8 or 16."""
    few = mixture._replace(experts=mixture.most(rows) - (mixture.shared > 0))
    spec = spec_of(weight, few, config, rows)
    block_rows = spec.format.block[0] if spec.format.block else 1
    unit_tiles = max(each.unit_tiles for each in GATE_UP_CONFIGS)
    unit = 2 * lcm(unit_tiles * TILE_N // 2, block_rows)  # a gate and an up of whole units and blocks
    room = max(MAX_EXPERT_CODES // (few.all_experts * spec.in_features) // unit, 1) * unit
    return ExpertTrial(spec, min(weight.out_features, room))


@lru_cache(maxsize=1)
def _expert_check(
    kind: FragmentFormat,
    shape: tuple[int, int],
    biased: bool,
    mixture: Mixture,
    gate_up: bool,
    rows: int,
    device: torch.device,
) -> ExpertCheck:
    experts, (features, in_features) = mixture.all_experts, shape
    bias: torch.Tensor | None = None
    if biased:
        generator = torch.Generator(device).manual_seed(1)
        bias = torch.randn(experts, features, device=device, generator=generator).bfloat16()
    weight = random_weight(kind, (experts * features, in_features), device)
    return ExpertCheck(ExpertWeight(weight, experts, bias), mixture, gate_up, rows)


@dataclass(frozen=True, slots=True)
class FragmentGemmTrial:
    """A ``KernelTrial`` of a product of ``shape`` [N, K]. ``rows``: that a launch takes at most."""

    format: FragmentFormat
    shape: tuple[int, int]
    paired: bool
    config: FragmentGemmConfig
    rows: int

    @property
    def kernel(self) -> str:
        options = fragment_gemm.compile_options(self.format, self.shape[1], self.config, self.rows, self.paired)
        return " ".join([*options, f"N={self.shape[0]}", f"TAIL={self.format.tail}"])

    @property
    def configuration(self) -> object:
        return replace(self, rows=0)

    @property
    def group(self) -> object:
        return self.format

    def compile(self, device: torch.device) -> None:
        fragment_gemm.compiled(device, self.format, self.shape[1], self.config, self.rows, self.paired)

    def prepare(self, device: torch.device) -> None:
        _product_check(self.format, self.shape, self.paired, self.rows, device)

    def passes(self, device: torch.device) -> bool:
        check = _product_check(self.format, self.shape, self.paired, self.rows, device)
        return check.passes(self.config, self.rows)


def trials_of(
    weight: FragmentWeight, paired: bool, config: FragmentGemmConfig, rows: int
) -> tuple[FragmentGemmTrial, ...]:
    """Build the trials of the kernels that a configuration's products of up to ``rows`` rows launch."""
    n, k = weight.shape
    unit = TILE_N * (2 if paired else 1)
    most = max(MAX_CODES // k // unit, 1) * unit
    tiles = range(1, row_tiles(rows) + 1)
    return tuple(FragmentGemmTrial(weight.format, (min(n, most), k), paired, config, each * ROW_TILE) for each in tiles)


@lru_cache(maxsize=1)
def _product_check(
    kind: FragmentFormat, shape: tuple[int, int], paired: bool, rows: int, device: torch.device
) -> ProductCheck:
    return ProductCheck(_weight(kind, shape, device), paired, many_rows(rows, shape[1], device))


_weight = lru_cache(maxsize=1)(random_weight)  # one weight serves the checks of 8 and of 16 rows
