"""Weights of published quantised checkpoints once they are read: packed where they lie, for the few-row kernels."""

from __future__ import annotations

import torch

from dflash_local.kernels import decode_gemm, few_row_gemm, fragment_decode
from dflash_local.kernels.allocate import dtype_name
from dflash_local.kernels.few_row_gemm import FewRowConfig
from dflash_local.kernels.fragment_packing import Codable, FragmentWeight, fragment_format
from dflash_local.kernels.jit import runs_kernels
from dflash_local.kernels.skinny_gemm import MAX_ROWS, gated
from dflash_local.models.fused.fragment_kernels import right_configs


def takes(weight: Codable) -> bool:
    """True where kernels read fragments on the weight's device, and take its dtype, its shape and its groups."""
    return runs_kernels(weight) and not why_not(weight)


def why_not(weight: Codable) -> str:
    """Why the kernels do not take a weight, on whatever device; empty where they do."""
    if weight.dtype != torch.bfloat16:
        return f"they compute in bfloat16, not in {dtype_name(weight.dtype)}"
    try:
        fragment_format(weight)
    except ValueError as error:
        return str(error)
    return ""


class _Fragments:
    has_library = False

    def finish(self, weight: FragmentWeight) -> FragmentWeight:
        return weight

    def randomize(self, weight: FragmentWeight, generator: torch.Generator) -> None:
        raise TypeError("a weight is packed once it is filled")

    def rows(self, weight: FragmentWeight, stop: int) -> FragmentWeight:
        return weight.first_rows(stop)

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
        return gated(self.prefill(x, weight), out)

    def prefill(self, x: torch.Tensor, weight: FragmentWeight) -> torch.Tensor:
        return fragment_decode.linear(x, weight)

    def candidates(self, weight: FragmentWeight, paired: bool, rows: int, shared_memory: int) -> list[FewRowConfig]:
        if runs_kernels(weight):
            return right_configs((weight, paired), rows, shared_memory)
        return few_row_gemm.candidates(weight, paired, rows, shared_memory)


FRAGMENTS = _Fragments()
