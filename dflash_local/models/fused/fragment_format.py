"""Weights of published quantised checkpoints once they are read: packed where they lie, for the few-row kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from dflash_local.kernels import decode_gemm, few_row_gemm, fragment_decode, nvrtc
from dflash_local.kernels.few_row_gemm import FewRowConfig
from dflash_local.kernels.fragment_packing import TILE_N, FragmentWeight, fragment_format, is_whole
from dflash_local.kernels.jit import runs_kernels
from dflash_local.kernels.quantized_weight import Fp8Weight, IntWeight
from dflash_local.kernels.skinny_gemm import MAX_ROWS
from dflash_local.layout.linear import Part, WeightFormat
from dflash_local.models.place import Places

MAX_ERROR = 2**-5  # of a result, and half of it of its row's root mean square; rounding takes a third at most


def takes(weight: IntWeight | Fp8Weight) -> bool:
    """True where kernels read fragments on the weight's device, and take its shape and its groups."""
    if not (runs_kernels(weight) and weight.dtype == torch.bfloat16 and is_whole(weight)):
        return False
    try:
        fragment_format(weight)
    except ValueError:
        return False
    return True


def _right(weight: FragmentWeight, paired: bool, rows: int, configs: Sequence[FewRowConfig]) -> list[FewRowConfig]:
    """Those whose results are PyTorch's, tried with the weight at hand: nobody has run them on every card."""
    x = _trial_rows(rows, weight.shape[1], weight.device)
    wide = x.new_empty(rows, weight.shape[0] // (2 if paired else 1), dtype=torch.float32)
    if paired:
        want = few_row_gemm.swiglu_reference(x.float(), weight, wide)
    else:
        want = few_row_gemm.linear_reference(x.float(), weight, wide)
    bound = MAX_ERROR * want.abs() + MAX_ERROR / 2 * want.square().mean(1, keepdim=True).sqrt()
    found = []
    for config in configs:
        out = torch.full_like(want, float("nan"), dtype=x.dtype)
        got = (few_row_gemm.swiglu if paired else few_row_gemm.linear)(x, weight, out, config)
        if bool(((got - want).abs() <= bound).all()):
            found.append(config)
    return found


def _trial_rows(rows: int, in_features: int, device: torch.device) -> torch.Tensor:
    """Gaussian rows, rows with an outlier, one-hot rows and rows of zeros, by turns."""
    x = torch.randn(rows, in_features, device=device, generator=torch.Generator(device).manual_seed(0))
    x[1::4, in_features // 3] = 1000
    x[2::4] = 0
    x[2::4, in_features - 1] = 1
    x[3::4] = 0
    return x.to(torch.bfloat16)


class _Fragments:
    has_library = False

    def weight(self, form: WeightFormat, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> FragmentWeight:
        raise TypeError("a weight is packed once it is read")

    def places(self, weight: FragmentWeight, form: WeightFormat, parts: Sequence[Part]) -> Places:
        raise TypeError("a weight is packed once it is read")

    def finish(self, weight: FragmentWeight) -> FragmentWeight:
        return weight

    def randomize(self, weight: FragmentWeight, generator: torch.Generator) -> None:
        raise TypeError("a weight is packed once it is filled")

    def rows(self, weight: FragmentWeight, stop: int) -> FragmentWeight:
        if stop % TILE_N:
            raise ValueError(f"{stop} rows do not consist of tiles of {TILE_N}")
        tiles = slice(stop // TILE_N)
        scales = weight.scales if weight.format.bits == 8 else weight.scales[tiles]
        zeros = None if weight.zeros is None else weight.zeros[tiles]
        shape = torch.Size((stop, weight.shape[1]))
        return replace(weight, codes=weight.codes[tiles], scales=scales, zeros=zeros, shape=shape)

    def linear(
        self,
        x: torch.Tensor,
        weight: FragmentWeight,
        out: torch.Tensor,
        config: FewRowConfig | None,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        if len(x) > MAX_ROWS:
            product = self.prefill(x, weight)
            return out.copy_(product) if residual is None else torch.add(residual, product, out=out)
        if config is None:
            return decode_gemm.linear(x, weight, out, residual)
        return few_row_gemm.linear(x, weight, out, config, residual)

    def swiglu(
        self, x: torch.Tensor, weight: FragmentWeight, out: torch.Tensor, config: FewRowConfig | None
    ) -> torch.Tensor:
        if len(x) <= MAX_ROWS:
            if config is None:
                return decode_gemm.swiglu(x, weight, out)
            return few_row_gemm.swiglu(x, weight, out, config)
        gate, up = self.prefill(x, weight).chunk(2, -1)
        return torch.mul(F.silu(gate), up, out=out)

    def prefill(self, x: torch.Tensor, weight: FragmentWeight) -> torch.Tensor:
        return fragment_decode.linear(x, weight)

    def candidates(self, weight: FragmentWeight, paired: bool, rows: int, shared_memory: int) -> list[FewRowConfig]:
        found = few_row_gemm.candidates(weight, paired, rows, shared_memory)
        if not (found and runs_kernels(weight)):
            return found
        if nvrtc.why_not(torch.cuda.get_device_capability(weight.device)):
            return []
        few_row_gemm.compile_ahead(weight, paired, rows, found)
        return _right(weight, paired, rows, found)

    def penalty(self, config: Any) -> float:
        return 1.0


FRAGMENTS = _Fragments()
