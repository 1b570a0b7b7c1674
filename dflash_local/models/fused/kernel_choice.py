"""The choice of a kernel configuration for each shape of weight, by measuring on the device at hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dflash_local.kernels import skinny_gemm
from dflash_local.kernels.jit import power_of_two, runs_kernels
from dflash_local.kernels.timing import replay_ms
from dflash_local.models.fused.formats import LIBRARY, KernelConfig, format_of
from dflash_local.models.fused.linear import GateUp, Linear

REPLAYS = 5
RESERVED_SHARED_MEMORY = 1024  # bytes of shared memory that the system keeps


def choose_configs(layers: Sequence[Linear | GateUp], rows: int) -> dict[tuple[int, int], KernelConfig | None]:
    """Measure every shape once with ``rows`` rows and give each layer the fastest product.

    Layers of one shape are run one after the other, so that no weight is found in a cache. Without
    CUDA nothing is measured and the library's product is kept.

    Returns:
        what was chosen, by weight shape.
    """
    chosen: dict[tuple[int, int], KernelConfig | None] = {}
    groups: dict[tuple[bool, type, torch.Size], list[Linear | GateUp]] = {}
    for layer in layers:
        if runs_kernels(layer.weight):
            groups.setdefault(layer.kind, []).append(layer)
    for (_, _, shape), members in groups.items():
        best = _fastest(members, rows)
        for member in members:
            member.config = best
        chosen[shape[0], shape[1]] = best
    return chosen


def candidates(layer: Linear | GateUp, shared_memory: int, rows: int) -> list[Any]:
    """Kernel configurations that divide a weight and fit a device's shared memory (bytes for one program)."""
    paired, weight = layer.paired, layer.weight
    kind, block_m = format_of(weight), max(skinny_gemm.MIN_ROWS, power_of_two(rows))

    def fits(config: KernelConfig) -> bool:
        gemm = config.gemm
        if not config.fits(layer.out_features, weight.shape[1]):
            return False
        stage = kind.stage_bytes(config, block_m, gemm.block_n * (2 if paired else 1), weight)
        return stage * gemm.num_stages <= shared_memory - RESERVED_SHARED_MEMORY

    usual, small = kind.configs(paired)
    return [config for config in usual if fits(config)] or [config for config in small if fits(config)]


def _fastest(members: list[Linear | GateUp], rows: int) -> KernelConfig | None:
    first = members[0]
    device, dtype = first.weight.device, first.weight.dtype
    x = torch.randn(rows, first.weight.shape[1], device=device, dtype=dtype)
    out = torch.empty(rows, first.out_features, device=device, dtype=dtype)
    shared = int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]
    configs = candidates(first, shared, rows)
    kind = format_of(first.weight)
    if kind.has_library:
        configs = [LIBRARY, *configs]
    times: dict[KernelConfig | None, float] = {}
    for config in configs:
        for member in members:
            member.config = config
        spent = replay_ms(lambda: [member(x, out) for member in members], REPLAYS)
        times[config] = spent * kind.penalty(config)
    return min(times, key=lambda config: times[config], default=LIBRARY)
