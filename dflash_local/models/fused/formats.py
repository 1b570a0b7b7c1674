"""Weight formats as the engine uses them: how a matrix is filled from a checkpoint, finished, and multiplied.

A format is one class in ``layout.linear`` (which tensors a matrix is kept as), one here, and a line in ``FORMATS``.
A product asks its weight's format; nothing else knows which one it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from dflash_local.kernels import int8_gemm, skinny_gemm
from dflash_local.kernels.few_row_gemm import FewRowConfig
from dflash_local.kernels.fragment_packing import FragmentWeight
from dflash_local.kernels.int8_gemm import Int8Config, Int8Weight
from dflash_local.kernels.jit import power_of_two
from dflash_local.kernels.quantized_weight import Fp4Weight, Fp8Weight, IntWeight
from dflash_local.kernels.skinny_gemm import GemmConfig
from dflash_local.layout import linear as layout
from dflash_local.layout.linear import Part, WeightFormat, part_rows
from dflash_local.models.fused.at_load import QUANTIZED_AT_LOAD
from dflash_local.models.fused.fragment_format import FRAGMENTS
from dflash_local.models.fused.quantized_formats import FP4, FP8, INT
from dflash_local.models.place import Places

Weight = torch.Tensor | Int8Weight | IntWeight | Fp8Weight | Fp4Weight | FragmentWeight
KernelConfig = GemmConfig | Int8Config | FewRowConfig
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
W8A8_PENALTY = 1.05  # what a product that rounds its rows to eight bits counts as: it must save more than that


class Reading(Protocol):
    """How matrices of a layout come to be weights. A weight is [N, K] of whatever type its format has for it."""

    def weight(self, form: Any, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> Any:
        """A weight over the tensors of its buffers.

        Args:
            form: of ``layout.linear``. dtype: of the activations.
        """

    def places(self, weight: Any, form: Any, parts: Sequence[Part]) -> Places:
        """Where the checkpoint's tensors of the parts are read to, one part's rows below the other's."""


class Format(Reading, Protocol):
    """What a weight format brings along."""

    has_library: bool  # the library has a product for few rows, which kernels are measured against

    def finish(self, weight: Any) -> Any:
        """Once all places are filled: what is used, over the same memory."""

    def randomize(self, weight: Any, generator: torch.Generator) -> None:
        """Random numbers that keep the scale of what is multiplied."""

    def rows(self, weight: Any, stop: int) -> Any:
        """The first ``stop`` rows; no memory of their own."""

    def linear(
        self, x: torch.Tensor, weight: Any, out: torch.Tensor, config: Any, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """``out = x @ weight.T (+ residual)`` for a few rows."""

    def swiglu(self, x: torch.Tensor, weight: Any, out: torch.Tensor, config: Any) -> torch.Tensor:
        """``out = silu(x @ gate.T) * (x @ up.T)`` for any number of rows."""

    def prefill(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """``x @ weight.T`` for as many rows as there are."""

    def candidates(self, weight: Any, paired: bool, rows: int, shared_memory: int) -> list[Any]:
        """Kernel configurations for so many rows that divide a weight and fit a device's shared memory.

        Args:
            paired: gate and up, which are multiplied with each other. shared_memory: bytes for one program.
        """

    def penalty(self, config: Any) -> float:
        """What a measured time counts as many times, for results that are coarser than they need be."""


class _Unquantized:
    """The model's own dtype: a weight is a tensor."""

    has_library = True

    def weight(self, form: WeightFormat, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        (weight,) = tensors
        return weight

    def places(self, weight: torch.Tensor, form: WeightFormat, parts: Sequence[Part]) -> Places:
        return _row_places(parts, {"weight": weight})

    def finish(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def randomize(self, weight: torch.Tensor, generator: torch.Generator) -> None:
        weight.normal_(generator=generator).mul_(weight.shape[1] ** -0.5)

    def rows(self, weight: torch.Tensor, stop: int) -> torch.Tensor:
        return weight[:stop]

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

    def candidates(
        self, weight: torch.Tensor, paired: bool, rows: int, shared_memory: int
    ) -> list[GemmConfig | Int8Config]:
        def stage_bytes(config: Any, rows: int, out_features: int) -> int:
            return (rows + out_features) * int(config.block_k) * weight.element_size()

        usual = SWIGLU_CONFIGS if paired else GEMM_CONFIGS
        return _fitting(usual, SMALL_CONFIGS, stage_bytes, weight.shape, paired, rows, shared_memory)

    def penalty(self, config: GemmConfig | None) -> float:
        return 1.0


class _Int8:
    """``kernels.int8_gemm``: with activations as they are, and as codes (w8a8)."""

    has_library = False

    def weight(self, form: WeightFormat, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> Int8Weight:
        codes, scales = tensors
        return Int8Weight(codes, scales, dtype)

    def places(self, weight: Int8Weight, form: WeightFormat, parts: Sequence[Part]) -> Places:
        return _row_places(parts, {"weight": weight.codes, "weight_scale": weight.scales.unsqueeze(1)})

    def finish(self, weight: Int8Weight) -> Int8Weight:
        return weight

    def randomize(self, weight: Int8Weight, generator: torch.Generator) -> None:
        weight.codes.random_(-int8_gemm.MAX_CODE, int8_gemm.MAX_CODE + 1, generator=generator)
        weight.scales.fill_((weight.shape[1] / 3) ** -0.5 / int8_gemm.MAX_CODE)

    def rows(self, weight: Int8Weight, stop: int) -> Int8Weight:
        return Int8Weight(weight.codes[:stop], weight.scales[:stop], weight.dtype)

    linear = staticmethod(int8_gemm.linear)
    swiglu = staticmethod(int8_gemm.swiglu)

    def prefill(self, x: torch.Tensor, weight: Int8Weight) -> torch.Tensor:
        return int8_gemm.linear_reference(x, weight, x.new_empty(len(x), weight.shape[0]))

    def candidates(
        self, weight: Int8Weight, paired: bool, rows: int, shared_memory: int
    ) -> list[GemmConfig | Int8Config]:
        def stage_bytes(config: Any, rows: int, out_features: int) -> int:
            return (rows * (1 if config.w8a8 else weight.dtype.itemsize) + out_features) * int(config.gemm.block_k)

        usual = INT8_SWIGLU_CONFIGS if paired else INT8_CONFIGS
        return _fitting(usual, SMALL_INT8_CONFIGS, stage_bytes, weight.shape, paired, rows, shared_memory)

    def penalty(self, config: Int8Config | None) -> float:
        return W8A8_PENALTY if config is not None and config.w8a8 else 1.0


UNQUANTIZED, INT8 = _Unquantized(), _Int8()
FORMATS: Mapping[type, Reading] = {
    layout.Unquantized: UNQUANTIZED,
    layout.Int8PerChannel: INT8,
    layout.IntGroups: INT,
    layout.Fp8Blocks: FP8,
    layout.Fp4Groups: FP4,
    layout.QuantizedAtLoad: QUANTIZED_AT_LOAD,
}
_BY_TYPE: Mapping[type, Format] = {
    torch.Tensor: UNQUANTIZED,
    Int8Weight: INT8,
    IntWeight: INT,
    Fp8Weight: FP8,
    Fp4Weight: FP4,
    FragmentWeight: FRAGMENTS,
}


def format_of(weight: Weight) -> Format:
    """The format that a weight is in."""
    return _BY_TYPE[type(weight)]


def _fitting(
    usual: Sequence[GemmConfig | Int8Config],
    small: Sequence[GemmConfig | Int8Config],
    stage_bytes: Callable[[Any, int, int], int],
    shape: torch.Size,
    paired: bool,
    rows: int,
    shared_memory: int,
) -> list[GemmConfig | Int8Config]:
    """Those of the usual configurations that divide a weight and fit, else those for toys."""
    out_features, block_m = shape[0] // (2 if paired else 1), max(skinny_gemm.MIN_ROWS, power_of_two(rows))

    def fits(config: GemmConfig | Int8Config) -> bool:
        gemm = config.gemm
        stage = stage_bytes(config, block_m, gemm.block_n * (2 if paired else 1))
        room = shared_memory - skinny_gemm.RESERVED_SHARED_MEMORY
        return config.fits(out_features, shape[1]) and stage * gemm.num_stages <= room

    return [config for config in usual if fits(config)] or [config for config in small if fits(config)]


def _row_places(parts: Sequence[Part], tensors: Mapping[str, torch.Tensor]) -> Places:
    """Tensors whose rows are the parts' rows, by ``MODULE.NAME``."""
    return {
        f"{part.module}.{name}": tensor[rows] for part, rows in part_rows(parts) for name, tensor in tensors.items()
    }
