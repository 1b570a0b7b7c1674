"""A mixture of experts for a few rows, by CUDA C++: which experts they take (``route.cu``), and what those make of them
(``expert_gate_up.cu``, ``expert_down.cu``). Each byte of an expert that occurs is read once for up to 16 rows; which do
stands in a list on the device.

Letters: M rows, E experts (a shared one is the last), S experts of a row, H wide, I wide inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_float, c_int64
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, cast

import torch

from dflash_local.kernels import cuda_driver
from dflash_local.kernels.cuda_driver import WARP_SIZE
from dflash_local.kernels.experts import ExpertWeight
from dflash_local.kernels.fragment_gemm import (
    GGUF_REGISTERS,
    MAX_LOADED,
    MAX_LOADING_THREADS,
    MAX_PARTS,
    defined,
    fragment_constants,
    partial_sums,
    row_tiles,
    source_text,
    zero_counters,
)
from dflash_local.kernels.fragment_packing import PLAIN, STEP_K, TILE_N, FragmentFormat, FragmentWeight
from dflash_local.kernels.skinny_gemm import RESERVED_SHARED_MEMORY
from dflash_local.kernels.split_kv import device_properties
from dflash_local.layout.linear import ROW_TILE, SLICE_ROWS
from dflash_local.layout.moe import list_words

Name = Literal["route", "expert_gate_up", "expert_down"]
SOURCES = {name: Path(__file__).with_name(f"{name}.cu") for name in ("route", "expert_gate_up", "expert_down")}
ROUTE_THREADS = SLICE_ROWS * WARP_SIZE


class Mixture(NamedTuple):
    """Hold what the kernels ask of a layer.

    Attributes:
        experts: that are routed. top_k: of them, of a row. shared: 0: no expert is each row's last; 1: one is; 2: one
            is, and its gate is the logit behind the routed ones. normed: weights are divided by their sum.
        clamp: limit and alpha of gpt-oss's activation; None: silu.
    """

    experts: int
    top_k: int
    shared: int = 0
    normed: bool = True
    clamp: tuple[float, float] | None = None

    @property
    def slots(self) -> int:
        return self.top_k + (self.shared > 0)

    @property
    def all_experts(self) -> int:
        return self.experts + (self.shared > 0)

    def most(self, rows: int) -> int:
        """Count experts that so many rows can have."""
        return min(self.all_experts, rows * self.top_k + (self.shared > 0))

    @property
    def list_words(self) -> int:
        """Return int32 of the list of experts that occur among ``SLICE_ROWS`` rows."""
        return list_words(self.all_experts, self.slots)


def fragment_format(weight: ExpertWeight) -> FragmentFormat:
    """Return the format of the kernels' codes. Raise ValueError where they do not take the weight; says why."""
    if isinstance(weight.weight, FragmentWeight):
        kind = weight.weight.format
    elif isinstance(weight.weight, torch.Tensor) and weight.weight.dtype == torch.bfloat16:
        kind = PLAIN
    else:
        raise ValueError(f"experts of {weight.weight.dtype} that are not packed")
    if weight.out_features % TILE_N or weight.in_features % 32:
        raise ValueError(f"experts of {weight.out_features} x {weight.in_features} do not consist of {TILE_N} x 32")
    return kind


@dataclass(frozen=True, slots=True)
class GateUpConfig:
    """Describe how the first product is shared; see ``fragment_gemm.FragmentGemmConfig``."""

    warps_k: int
    warps_n: int
    tiles: int
    num_stages: int
    blocks_per_sm: int = 1

    @property
    def threads(self) -> int:
        return self.warps_k * self.warps_n * WARP_SIZE

    @property
    def unit_tiles(self) -> int:
        """Count tiles that a block works on at a time, half of them the gate's."""
        return self.warps_n * self.tiles

    def shared_bytes(self, kind: FragmentFormat, in_features: int, mixture: Mixture, rows: int) -> int:
        """Return shared memory of a block: x, its sums over groups, twice the warps' sums, and the list."""
        steps = -(-in_features // STEP_K)
        all_k = -(-steps // self.warps_k) * self.warps_k * STEP_K
        group_sums = all_k // kind.step_group * rows * kind.sum_bytes
        sums = 2 * self.warps_k * rows * (self.unit_tiles * TILE_N + 4) * 4
        words = 2 * mixture.most(rows) + 1 + rows * mixture.slots
        return rows * (all_k * 2 + 64) + group_sums + sums + (words + 3) // 4 * 16

    def constants(self, kind: FragmentFormat, in_features: int, mixture: Mixture, rows: int) -> dict[str, int]:
        return {
            **fragment_constants(kind, in_features, self.tiles),
            "WARPS_K": self.warps_k,
            "WARPS_N": self.warps_n,
            "CLAMPED": int(mixture.clamp is not None),
        }


@dataclass(frozen=True, slots=True)
class DownConfig:
    """Describe how the second product is shared.

    Attributes:
        warps: of a block, which go through the experts. k_parts: parts of K that a warp takes one of.
        num_stages: steps of 128 along K that a warp loads ahead. blocks_per_sm: that a multiprocessor holds at a time.
        shares_tiles: blocks have equal parts of all tiles and experts, not whole tiles.
    """

    warps: int
    k_parts: int
    num_stages: int
    blocks_per_sm: int = 1
    shares_tiles: bool = False

    @property
    def threads(self) -> int:
        return self.warps * WARP_SIZE

    @property
    def tiles(self) -> int:
        return 1

    def shared_bytes(self, kind: FragmentFormat, in_features: int, mixture: Mixture, rows: int) -> int:
        """Sum shared memory of a block: twice a tile's results, the list, and the slots' weights and experts."""
        slots = rows * mixture.slots
        return (2 * self.k_parts * slots * (TILE_N + 1) + 2 * mixture.most(rows) + 2 + 3 * slots) * 4

    def constants(self, kind: FragmentFormat, in_features: int, mixture: Mixture, rows: int) -> dict[str, int]:
        sizes = fragment_constants(kind, in_features, self.tiles)
        return {**sizes, "WARPS": self.warps, "K_PARTS": self.k_parts, "SHARES_TILES": int(self.shares_tiles)}


ExpertConfig = GateUpConfig | DownConfig
STEP_REGISTERS = 16  # of a lane for a step of eight rows, which the second product holds; eight more for their sums
# Worth measuring, most promising first on an H200 (benchmarks/results/h200_expert_gemm.json).
GATE_UP_CONFIGS = (
    GateUpConfig(8, 2, 1, 2), GateUpConfig(16, 1, 2, 2), GateUpConfig(8, 1, 2, 2, 2), GateUpConfig(4, 2, 2, 2, 2),
    GateUpConfig(4, 4, 1, 2), GateUpConfig(4, 2, 1, 4, 1), GateUpConfig(4, 2, 1, 3, 2), GateUpConfig(8, 2, 1, 3),
)  # fmt: skip
DOWN_CONFIGS = (
    DownConfig(16, 1, 2), DownConfig(16, 1, 4), DownConfig(16, 2, 2), DownConfig(8, 1, 4, 2), DownConfig(8, 1, 2, 2),
    DownConfig(16, 4, 2), DownConfig(8, 1, 4), DownConfig(8, 2, 3), DownConfig(8, 4, 2, 2),
    DownConfig(16, 1, 2, 1, True), DownConfig(8, 1, 4, 2, True), DownConfig(8, 4, 2, 2, True),
    DownConfig(16, 4, 2, 1, True),
)  # fmt: skip


def fits(config: ExpertConfig, weight: ExpertWeight, mixture: Mixture, rows: int, shared_memory: int) -> bool:
    """Return True where a multiprocessor (bytes of shared memory for its blocks) holds a kernel for so many rows."""
    kind, in_features = fragment_format(weight), weight.in_features
    loaded = config.tiles * config.num_stages * kind.bits * 2
    if kind.of_gguf:
        loaded += config.tiles * config.num_stages * GGUF_REGISTERS[row_tiles(rows)]
        if isinstance(config, DownConfig):
            loaded += row_tiles(rows) * (STEP_REGISTERS + (kind.sum_bytes > 0) * 8)
    most = MAX_LOADED * MAX_LOADING_THREADS * 2 // (config.threads * config.blocks_per_sm)
    if loaded > min(most, 128):
        return False
    if isinstance(config, GateUpConfig) and (
        config.unit_tiles % 2 or weight.out_features // TILE_N % config.unit_tiles
    ):
        return False
    if isinstance(config, DownConfig) and config.shares_tiles and weight.out_features // TILE_N > MAX_PARTS:
        return False
    taken = config.shared_bytes(kind, in_features, mixture, rows) + RESERVED_SHARED_MEMORY
    return taken * config.blocks_per_sm <= shared_memory


def candidates(
    gate_up: bool, weight: ExpertWeight, mixture: Mixture, rows: int, shared_memory: int
) -> Iterator[ExpertConfig]:
    """Return configurations worth measuring for a product and so many rows, a multiple of 8."""
    configs: tuple[ExpertConfig, ...] = GATE_UP_CONFIGS if gate_up else DOWN_CONFIGS
    return (config for config in configs if fits(config, weight, mixture, rows, shared_memory))


def slice_rows(rows: int) -> int:
    """Count rows of a launch, filled up to whole tiles of eight."""
    return min(-(-rows // ROW_TILE) * ROW_TILE, SLICE_ROWS)


def route(
    logits: torch.Tensor,
    mixture: Mixture,
    weights: torch.Tensor,
    experts: torch.Tensor,
    expert_list: torch.Tensor,
    bias: torch.Tensor | None = None,
    distinct: torch.Tensor | None = None,
) -> None:
    """Choose the experts of up to ``SLICE_ROWS`` rows, their weights, and the list of those that occur.

    Args:
        logits: [M, >= E] bfloat16. weights: [M, S] float32. experts: [M, S] int32. expert_list: [``list_words``] int32.
        bias: of the router [experts]. distinct: [1] int32, gets how many routed experts occur.
    """
    kernel = _route_kernel(logits.device, mixture, bias is not None)
    kernel.launch(
        1,
        (
            logits, bias, weights, experts, expert_list, distinct, c_int64(logits.stride(0)), len(logits),
            mixture.all_experts,
        ),
    )  # fmt: skip


def gate_up(
    x: torch.Tensor,
    weight: ExpertWeight,
    mixture: Mixture,
    expert_list: torch.Tensor,
    intermediate: torch.Tensor,
    config: GateUpConfig,
) -> torch.Tensor:
    """Compute ``intermediate`` [M, S, I] = act(x @ gate.T) * (x @ up.T) by the list's experts; M <= ``SLICE_ROWS``."""
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        raise ValueError("rows of activations must begin at multiples of 16 bytes")
    codes, scales, zeros, row_scales = _operands(weight)
    limit, alpha = mixture.clamp or (0.0, 0.0)
    kernel = _kernel(x.device, weight, mixture, config, slice_rows(len(x)))
    kernel.launch(
        device_properties(x.device).num_sms * config.blocks_per_sm,
        (
            x, codes, scales, zeros, row_scales, weight.bias, intermediate, expert_list, c_int64(x.stride(0)), len(x),
            weight.weight.shape[0], weight.out_features // TILE_N, mixture.all_experts, c_float(limit),
            c_float(alpha),
        ),
    )  # fmt: skip
    return intermediate


def down(
    intermediate: torch.Tensor,
    weight: ExpertWeight,
    mixture: Mixture,
    routed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    config: DownConfig,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``out`` [M, H] = the weighed sum of the experts' results (+ residual); ``out`` may be the residual.

    Args:
        intermediate: [M, S, I]. routed: weights, experts and the list, as ``route`` fills them.
    """
    weights, experts, expert_list = routed
    codes, scales, zeros, row_scales = _operands(weight)
    tiles, most = weight.out_features // TILE_N, device_properties(out.device).num_sms * config.blocks_per_sm
    results: torch.Tensor | None = None
    if config.shares_tiles:
        results = partial_sums(out.device, SLICE_ROWS * mixture.slots * weight.out_features)
    kernel = _kernel(out.device, weight, mixture, config, slice_rows(len(out)))
    kernel.launch(
        most if config.shares_tiles else min(tiles, most),
        (
            intermediate, codes, scales, zeros, row_scales, weight.bias, weights, experts, out, residual, expert_list,
            c_int64(out.stride(0)), len(out), weight.weight.shape[0], tiles, mixture.all_experts, results,
            zero_counters(out.device),
        ),
    )  # fmt: skip
    return out


def _operands(
    weight: ExpertWeight,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return codes, scales, zero points and scales of rows."""
    coded = weight.weight
    if not isinstance(coded, FragmentWeight):
        return cast(torch.Tensor, coded), None, None, None
    return coded.codes, coded.scales, coded.zeros, coded.scales if coded.format.block is None else coded.row_scales


class KernelSpec(NamedTuple):
    """All that a product's kernel is compiled for, but for the card. ``rows``: of a launch at most, 8 or 16."""

    format: FragmentFormat
    in_features: int
    biased: bool
    mixture: Mixture
    config: ExpertConfig
    rows: int

    @property
    def name(self) -> Name:
        return "expert_gate_up" if isinstance(self.config, GateUpConfig) else "expert_down"

    @property
    def shared_bytes(self) -> int:
        return self.config.shared_bytes(self.format, self.in_features, self.mixture, self.rows)

    @property
    def options(self) -> list[str]:
        return defined(
            **self.config.constants(self.format, self.in_features, self.mixture, self.rows),
            ROW_TILES=self.rows // ROW_TILE,
            NUM_STAGES=self.config.num_stages,
            BLOCKS_PER_SM=self.config.blocks_per_sm,
            SLOTS=self.mixture.slots,
            MAX_EXPERTS=self.mixture.most(self.rows),
            HAS_BIAS=int(self.biased),
            SHARED_BYTES=self.shared_bytes,
        )


def spec_of(weight: ExpertWeight, mixture: Mixture, config: ExpertConfig, rows: int) -> KernelSpec:
    return KernelSpec(fragment_format(weight), weight.in_features, weight.bias is not None, mixture, config, rows)


def route_options(mixture: Mixture, bias: bool) -> list[str]:
    return defined(
        EXPERTS=mixture.experts,
        TOP_K=mixture.top_k,
        SHARED=mixture.shared,
        NORMED=int(mixture.normed),
        HAS_BIAS=int(bias),
        SHARED_BYTES=0,
    )


_kernels: dict[tuple[torch.device, KernelSpec], cuda_driver.LoadedKernel] = {}


def _kernel(
    device: torch.device, weight: ExpertWeight, mixture: Mixture, config: ExpertConfig, rows: int
) -> cuda_driver.LoadedKernel:
    spec = spec_of(weight, mixture, config, rows)
    if (device, spec) not in _kernels:
        _kernels[device, spec] = make_kernel(
            source_of(spec.name), spec.options, spec.name, config.threads, spec.shared_bytes, device
        )
    return _kernels[device, spec]


@cache
def _route_kernel(device: torch.device, mixture: Mixture, biased: bool) -> cuda_driver.LoadedKernel:
    return make_kernel(source_of("route"), route_options(mixture, biased), "route", ROUTE_THREADS, 0, device)


def source_of(name: str) -> str:
    """Return what is compiled of a kernel in ``SOURCES``; the router reads no weights."""
    return SOURCES["route"].read_text(encoding="utf-8") if name == "route" else source_text(SOURCES[name])


def make_kernel(
    source: str, options: list[str], name: str, threads: int, shared_bytes: int, device: torch.device
) -> cuda_driver.LoadedKernel:
    return cuda_driver.LoadedKernel(cuda_driver.cubin(source, options, device), name, threads, shared_bytes, device)


def compiled(device: torch.device, spec: KernelSpec) -> bytes:
    return cuda_driver.cubin(source_of(spec.name), spec.options, device)


def compiled_route(device: torch.device, mixture: Mixture, biased: bool) -> bytes:
    return cuda_driver.cubin(source_of("route"), route_options(mixture, biased), device)
