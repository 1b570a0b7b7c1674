"""The choice of a kernel configuration for each shape of weight, by measuring on the device at hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dflash_local.kernels import nvrtc
from dflash_local.kernels.fragment_packing import FragmentWeight
from dflash_local.kernels.jit import runs_kernels
from dflash_local.kernels.split_kv import device_properties
from dflash_local.kernels.timing import replay_ms
from dflash_local.models.fused.formats import LIBRARY, KernelConfig, format_of
from dflash_local.models.fused.linear import GateUp, Linear, by_kind

REPLAYS = 5


def choose_configs(layers: Sequence[Linear | GateUp], rows: int) -> dict[tuple[int, int], KernelConfig | None]:
    """Measure every shape once with ``rows`` rows and give each layer the fastest product.

    Layers of one shape are run one after the other, so that no weight is found in a cache. Without
    CUDA nothing is measured and the library's product is kept.

    Returns:
        what was chosen, by weight shape.
    """
    chosen: dict[tuple[int, int], KernelConfig | None] = {}
    for members in by_kind(layer for layer in layers if runs_kernels(layer.weight)):
        best, shape = _fastest(members, rows), members[0].weight.shape
        for member in members:
            member.config = best
        chosen[shape[0], shape[1]] = best
    return chosen


def without_kernel(layers: Sequence[Linear | GateUp]) -> tuple[str, ...]:
    """A line for each shape of packed weights whose products are the generic one here, and why."""
    lines: dict[str, None] = {}
    for layer in layers:
        if isinstance(layer.weight, FragmentWeight) and layer.config is None:
            n, k = layer.weight.shape
            lines[
                f"{_reason(layer.weight)}: quantised weights of {n} x {k} are multiplied in Triton, which is slow"
            ] = None
    return tuple(lines)


def _reason(weight: FragmentWeight) -> str:
    unmet = nvrtc.why_not(torch.cuda.get_device_capability(weight.device))
    return "no kernel gave the right product on this card" if unmet is None else str(unmet)


def candidates(layer: Linear | GateUp, shared_memory: int, rows: int) -> list[Any]:
    """Kernel configurations that divide a weight and fit a device's shared memory (bytes for one program)."""
    return format_of(layer.weight).candidates(layer.weight, layer.paired, rows, shared_memory)


def _fastest(members: list[Linear | GateUp], rows: int) -> KernelConfig | None:
    first = members[0]
    device, dtype = first.weight.device, first.weight.dtype
    x = torch.randn(rows, first.weight.shape[1], device=device, dtype=dtype)
    out = torch.empty(rows, first.out_features, device=device, dtype=dtype)
    configs = candidates(first, device_properties(device).shared_memory, rows)
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
