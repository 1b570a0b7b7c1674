"""Weight formats as the engine uses them: how a matrix is filled from a checkpoint, finished, and multiplied.

A format is one class in ``layout.linear``, one here, and a line in ``FORMATS``; only these know which one a weight has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from dflash_local.kernels import fragment_gemm, skinny_gemm
from dflash_local.kernels.experts import StackedWeight as Weight
from dflash_local.kernels.fragment_gemm import FragmentGemmConfig
from dflash_local.kernels.fragment_packing import FragmentFormat, FragmentWeight
from dflash_local.kernels.jit import power_of_two
from dflash_local.kernels.quantize_weight import quantize
from dflash_local.kernels.quantized_weight import Fp4Weight, Fp8Weight, GgufWeight, IntWeight
from dflash_local.kernels.skinny_gemm import GemmConfig
from dflash_local.layout import linear as layout
from dflash_local.layout.linear import Fp8Blocks, IntGroups, MatrixPart, QuantizedAtLoad, WeightFormat, matrix_rows
from dflash_local.models.fused.fragment_kernels import FRAGMENTS, KernelConfig, product_of, right_configs
from dflash_local.models.fused.gguf_formats import GGUF, GGUF_BLOCKS
from dflash_local.models.fused.quantized_formats import FP4, FP8, INT
from dflash_local.models.place import Conversion, Places

KEPT: Mapping[type, Any] = {IntGroups: INT, Fp8Blocks: FP8}


class _QuantizedAtLoad:
    def weight(
        self, form: QuantizedAtLoad, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype
    ) -> IntWeight | Fp8Weight:
        weight: IntWeight | Fp8Weight = KEPT[type(form.kept)].weight(form.kept, tensors, dtype)
        return weight

    def places(self, weight: IntWeight | Fp8Weight, form: QuantizedAtLoad, parts: Sequence[MatrixPart]) -> Places:
        kept = KEPT[type(form.kept)]
        places: Places = {}
        for part, rows in matrix_rows(parts):
            take = partial(quantize, weight=kept.rows_of(weight, rows))
            places[f"{part.module}.weight"] = Conversion((part.out_features, weight.shape[1]), weight.dtype, take)
        return places


QUANTIZED_AT_LOAD = _QuantizedAtLoad()


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


class FormatReader(Protocol):
    """Say how matrices of a layout come to be weights. A weight is [N, K] of whatever type its format has for it."""

    def weight(self, form: Any, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> Any:
        """Build a weight over its tensors. ``form``: of ``layout.linear``. ``dtype``: of the activations."""

    def places(self, weight: Any, form: Any, parts: Sequence[MatrixPart]) -> Places:
        """Return where the checkpoint's tensors of the parts are read to, one part's rows below the other's."""


class WeightOperations(Protocol):
    """Hold what a weight format brings along. A weight is as of ``FormatReader``, or what ``finish`` has made of it."""

    has_library: bool  # the library has a product for few rows, which kernels are measured against

    def finish(self, weight: Any) -> Any:
        """Return what is used once all places are filled, over the same memory."""

    def randomize(self, weight: Any, generator: torch.Generator) -> None:
        """Fill random numbers that keep the scale of what is multiplied."""

    def rows(self, weight: Any, stop: int) -> Any:
        """Return the first ``stop`` rows; no memory of their own."""

    def linear(
        self, x: torch.Tensor, weight: Any, out: torch.Tensor, config: Any, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute ``out = x @ weight.T (+ residual)`` for a few rows."""

    def swiglu(self, x: torch.Tensor, weight: Any, out: torch.Tensor, config: Any) -> torch.Tensor:
        """Compute ``out = silu(x @ gate.T) * (x @ up.T)`` for any number of rows."""

    def prefill(self, x: torch.Tensor, weight: Any, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x @ weight.T`` for as many rows as there are; or ``residual`` with that added, rounded once where
        the library does so.
        """

    def candidates(self, weight: Any, paired: bool, rows: int, shared_memory: int) -> list[Any]:
        """Return kernel configurations for so many rows that divide a weight and fit a device's shared memory.

        Args:
            paired: gate and up, which are multiplied with each other. shared_memory: bytes for one program.
        """


class _Unquantized:
    """The model's own dtype: a weight is a tensor."""

    has_library = True

    def weight(self, form: WeightFormat, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        (weight,) = tensors
        return weight

    def places(self, weight: torch.Tensor, form: WeightFormat, parts: Sequence[MatrixPart]) -> Places:
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
            if isinstance(config, FragmentGemmConfig):
                return fragment_gemm.linear(x, FragmentWeight.plain(weight), out, config, residual)
            return skinny_gemm.linear(x, weight, out, config, residual)
        if residual is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.add(residual, torch.mm(x, weight.t()), out=out)

    def swiglu(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, config: Any) -> torch.Tensor:
        if config is not None and len(x) <= skinny_gemm.MAX_ROWS:
            if isinstance(config, FragmentGemmConfig):
                return fragment_gemm.swiglu(x, FragmentWeight.plain(weight), out, config)
            return skinny_gemm.swiglu(x, weight, out, config)
        return skinny_gemm.swiglu_reference(x, weight, out)

    def prefill(self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if residual is None:
            return torch.mm(x, weight.t())
        return skinny_gemm.multiply(x, weight, residual, add=True)

    def candidates(self, weight: torch.Tensor, paired: bool, rows: int, shared_memory: int) -> list[KernelConfig]:
        """List skinny GEMM kernels, and Triton's usual ones that divide a weight and fit, else those for toys."""
        triton = self.triton_candidates(weight, paired, rows, shared_memory)
        product = product_of(weight, paired)
        return [*triton, *(right_configs(product, rows, shared_memory) if product is not None else ())]

    @staticmethod
    def triton_candidates(weight: torch.Tensor, paired: bool, rows: int, shared_memory: int) -> list[GemmConfig]:
        """List those of Triton among ``candidates``."""
        matrices = 2 if paired else 1
        out_features, block_m = weight.shape[0] // matrices, max(skinny_gemm.MIN_ROWS, power_of_two(rows))
        room = shared_memory - skinny_gemm.RESERVED_SHARED_MEMORY

        def fits(config: GemmConfig) -> bool:
            stage = (block_m + config.block_n * matrices) * config.block_k * weight.element_size()
            return config.fits(out_features, weight.shape[1]) and stage * config.num_stages <= room

        usual: Sequence[GemmConfig] = SWIGLU_CONFIGS if paired else GEMM_CONFIGS
        found = [config for config in usual if fits(config)] or [config for config in SMALL_CONFIGS if fits(config)]
        return found


UNQUANTIZED = _Unquantized()
FORMATS: Mapping[type, FormatReader] = {
    layout.Unquantized: UNQUANTIZED,
    layout.IntGroups: INT,
    layout.Fp8Blocks: FP8,
    layout.Fp4Groups: FP4,
    layout.GgufBlocks: GGUF_BLOCKS,
    layout.QuantizedAtLoad: QUANTIZED_AT_LOAD,
}
_BY_TYPE: Mapping[type, WeightOperations] = {
    torch.Tensor: UNQUANTIZED,
    IntWeight: INT,
    Fp8Weight: FP8,
    Fp4Weight: FP4,
    GgufWeight: GGUF,
    FragmentWeight: FRAGMENTS,
}


def form_of(weight: Weight) -> type | FragmentFormat:
    """Return what kernels know a weight by: the type, or how its fragments are packed."""
    return weight.format if isinstance(weight, FragmentWeight) else type(weight)


def format_of(weight: Weight) -> WeightOperations:
    return _BY_TYPE[type(weight)]


def _row_places(parts: Sequence[MatrixPart], tensors: Mapping[str, torch.Tensor]) -> Places:
    """Return tensors whose rows are the parts' rows, by ``MODULE.NAME``."""
    return {
        f"{part.module}.{name}": tensor[rows] for part, rows in matrix_rows(parts) for name, tensor in tensors.items()
    }
