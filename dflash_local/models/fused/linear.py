"""The one seam through which a weight matrix is used: its format, and the product that is fastest for it here.

A weight format is named nowhere else. There are two: the model's own dtype, and eight bits with a scale for each
output feature. A further one is a type of weight, a ``Format`` beside the two below, and a line in ``_format``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dflash_local.kernels import int8_gemm, skinny_gemm
from dflash_local.kernels.int8_gemm import Int8Config, Int8Weight
from dflash_local.kernels.jit import power_of_two, runs_kernels
from dflash_local.kernels.skinny_gemm import GemmConfig
from dflash_local.kernels.timing import replay_ms

Weight = torch.Tensor | Int8Weight
KernelConfig = GemmConfig | Int8Config
LIBRARY = None  # in place of a config: the library's own product
GEMM_CONFIGS = (
    GemmConfig(32, 128, 7),
    GemmConfig(32, 256, 5),
    GemmConfig(64, 128, 7),
    GemmConfig(64, 256, 5),
    GemmConfig(32, 128, 4),
    GemmConfig(16, 64, 4),
)
SWIGLU_CONFIGS = (GemmConfig(32, 128, 4), GemmConfig(64, 128, 3), GemmConfig(32, 64, 5), GemmConfig(16, 64, 4))
SMALL_CONFIGS = (GemmConfig(16, 32, 3), GemmConfig(16, 16, 3))  # for toys, whose shapes no larger tile divides
INT8_CONFIGS = (  # the winners of benchmarks/int8_gemm.py on an H200, and for each kernel one that smaller cards hold
    *(Int8Config(gemm) for gemm in (GemmConfig(64, 256, 4), GemmConfig(64, 128, 6))),
    *(Int8Config(GemmConfig(64, 256, 4), split_k=split) for split in (2, 4)),
    *(Int8Config(gemm, True) for gemm in (GemmConfig(128, 256, 4), GemmConfig(64, 256, 4), GemmConfig(32, 256, 7))),
)
INT8_SWIGLU_CONFIGS = (
    *(Int8Config(gemm) for gemm in (GemmConfig(32, 128, 5), GemmConfig(32, 256, 4))),
    *(Int8Config(gemm, True) for gemm in (GemmConfig(32, 256, 4), GemmConfig(64, 128, 5))),
)
SMALL_INT8_CONFIGS = (Int8Config(GemmConfig(16, 32, 3)), Int8Config(GemmConfig(16, 32, 3), True))
REPLAYS = 5
W8A8_PENALTY = 1.05  # what a product that rounds its rows to eight bits counts as: it must save more than that
RESERVED_SHARED_MEMORY = 1024  # bytes of shared memory that the system keeps


class Format(Protocol):
    """What a weight format brings along."""

    def linear(
        self, x: torch.Tensor, weight: Any, out: torch.Tensor, config: Any, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """``out = x @ weight.T (+ residual)`` for a few rows."""

    def swiglu(self, x: torch.Tensor, weight: Any, out: torch.Tensor, config: Any) -> torch.Tensor:
        """``out = silu(x @ gate.T) * (x @ up.T)`` for any number of rows."""

    def prefill(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """``x @ weight.T`` for as many rows as there are."""

    def configs(self, paired: bool) -> tuple[Sequence[KernelConfig], Sequence[KernelConfig]]:
        """Kernel configurations of a product: the usual ones, and those for toys."""

    def stage_bytes(self, config: Any, rows: int, out_features: int, weight: Any) -> int:
        """Shared memory of one stage of a program with so many rows of ``x`` and of the weight."""


class _Unquantized:
    """The model's own dtype."""

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, config: Any, residual: torch.Tensor | None
    ) -> torch.Tensor:
        if config is not None and len(x) <= skinny_gemm.MAX_ROWS:
            return skinny_gemm.linear(x, weight, out, config, residual)
        if residual is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.add(residual, torch.mm(x, weight.t()), out=out)

    def swiglu(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, config: Any) -> torch.Tensor:
        if config is not None and len(x) <= skinny_gemm.MAX_ROWS:
            return skinny_gemm.swiglu(x, weight, out, config)
        return skinny_gemm.swiglu_reference(x, weight, out)

    def prefill(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, weight.t())

    def configs(self, paired: bool) -> tuple[Sequence[KernelConfig], Sequence[KernelConfig]]:
        return SWIGLU_CONFIGS if paired else GEMM_CONFIGS, SMALL_CONFIGS

    def stage_bytes(self, config: GemmConfig, rows: int, out_features: int, weight: torch.Tensor) -> int:
        return (rows + out_features) * config.block_k * weight.element_size()


class _Int8:
    """``kernels.int8_gemm``: with activations as they are, and as codes (w8a8)."""

    linear = staticmethod(int8_gemm.linear)
    swiglu = staticmethod(int8_gemm.swiglu)

    def prefill(self, x: torch.Tensor, weight: Int8Weight) -> torch.Tensor:
        return int8_gemm.linear_reference(x, weight, x.new_empty(len(x), weight.shape[0]))

    def configs(self, paired: bool) -> tuple[Sequence[KernelConfig], Sequence[KernelConfig]]:
        return INT8_SWIGLU_CONFIGS if paired else INT8_CONFIGS, SMALL_INT8_CONFIGS

    def stage_bytes(self, config: Int8Config, rows: int, out_features: int, weight: Int8Weight) -> int:
        return (rows * (1 if config.w8a8 else weight.dtype.itemsize) + out_features) * config.gemm.block_k


UNQUANTIZED = _Unquantized()
INT8 = _Int8()


def _format(weight: Weight) -> Format:
    return INT8 if isinstance(weight, Int8Weight) else UNQUANTIZED


@dataclass(slots=True)
class Linear:
    """A weight [N, K] with its product.

    Attributes:
        config: of the product's kernel; None takes the library's product.
    """

    weight: Weight
    config: KernelConfig | None = LIBRARY

    @property
    def out_features(self) -> int:
        """Numbers of a row of the result."""
        return self.weight.shape[0]

    def __call__(self, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """``out = x @ weight.T (+ residual)`` for a few rows; ``out`` may be the residual."""
        return _format(self.weight).linear(x, self.weight, out, self.config, residual)

    def prefill(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T`` for as many rows as there are."""
        return _format(self.weight).prefill(x, self.weight)


@dataclass(slots=True)
class GateUp:
    """The two halves of a gated layer, [2 I, K], with their joint product."""

    weight: Weight
    config: KernelConfig | None = LIBRARY

    @property
    def out_features(self) -> int:
        """Numbers of a row of the result."""
        return self.weight.shape[0] // 2

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """``out = silu(x @ gate.T) * (x @ up.T)`` for a few rows."""
        return _format(self.weight).swiglu(x, self.weight, out, self.config)

    def prefill(self, x: torch.Tensor) -> torch.Tensor:
        """The same for as many rows as there are."""
        out = x.new_empty(len(x), self.out_features)
        return _format(self.weight).swiglu(x, self.weight, out, LIBRARY)


def quantise_layer(layer: Linear | GateUp, device: torch.device | None = None) -> None:
    """Give a layer the codes of its weight, on ``device`` or where it lies; its kernel is to be chosen."""
    if isinstance(layer.weight, torch.Tensor):
        layer.weight, layer.config = Int8Weight.of(layer.weight, device), LIBRARY


def int8_copy(layer: Linear) -> Linear:
    """A layer with the codes of that one's weight beside it; the same one where its weight is coarse already."""
    return Linear(Int8Weight.of(layer.weight)) if isinstance(layer.weight, torch.Tensor) else layer


def first_out_features(layer: Linear, out_features: int) -> Linear:
    """A layer with the first features of that one's result; it takes no memory of its own."""
    weight = layer.weight
    if isinstance(weight, Int8Weight):
        return Linear(Int8Weight(weight.codes[:out_features], weight.scales[:out_features], weight.dtype))
    return Linear(weight[:out_features])


def choose_configs(layers: Sequence[Linear | GateUp], rows: int) -> dict[tuple[int, int], KernelConfig | None]:
    """Measure every shape once with ``rows`` rows and give each layer the fastest product.

    Layers of one shape are run one after the other, so that no weight is found in a cache. Without
    CUDA nothing is measured and the library's product is kept.

    Returns:
        what was chosen, by weight shape.
    """
    chosen: dict[tuple[int, int], KernelConfig | None] = {}
    groups: dict[tuple[type, type, torch.Size], list[Linear | GateUp]] = {}
    for layer in layers:
        weight = layer.weight
        if runs_kernels(weight):
            groups.setdefault((type(layer), type(weight), weight.shape), []).append(layer)
    for (_, _, shape), members in groups.items():
        best = _fastest(members, rows)
        for member in members:
            member.config = best
        chosen[shape[0], shape[1]] = best
    return chosen


def candidates(layer: Linear | GateUp, shared_memory: int, rows: int) -> list[Any]:
    """Kernel configurations that divide a weight and fit a device's shared memory (bytes for one program)."""
    paired = isinstance(layer, GateUp)
    weight = layer.weight
    kind, block_m = _format(weight), max(skinny_gemm.MIN_ROWS, power_of_two(rows))

    def fits(config: KernelConfig) -> bool:
        gemm = config.gemm if isinstance(config, Int8Config) else config
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
    if isinstance(first.weight, torch.Tensor):
        configs = [LIBRARY, *configs]  # for the other formats no library has one
    times: dict[KernelConfig | None, float] = {}
    for config in configs:
        for member in members:
            member.config = config
        spent = replay_ms(lambda: [member(x, out) for member in members], REPLAYS)
        times[config] = spent * (W8A8_PENALTY if isinstance(config, Int8Config) and config.w8a8 else 1.0)
    return min(times, key=lambda config: times[config], default=LIBRARY)
