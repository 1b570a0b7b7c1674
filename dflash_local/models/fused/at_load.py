"""Weights that are quantised as they are read: a plain tensor is taken whole, turned into codes, and let go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dflash_local.kernels.quantize_weight import quantize
from dflash_local.kernels.quantized_weight import Fp8Weight, IntWeight
from dflash_local.layout import linear as layout
from dflash_local.layout.linear import Part, QuantizedAtLoad, part_rows
from dflash_local.models.fused.quantized_formats import FP8, INT4
from dflash_local.models.place import Conversion, Places

KEPT: Mapping[type, Any] = {layout.Int4Groups: INT4, layout.Fp8Blocks: FP8}


class _QuantizedAtLoad:
    def weight(
        self, form: QuantizedAtLoad, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype
    ) -> IntWeight | Fp8Weight:
        weight: IntWeight | Fp8Weight = KEPT[type(form.kept)].weight(form.kept, tensors, dtype)
        return weight

    def places(self, weight: IntWeight | Fp8Weight, form: QuantizedAtLoad, parts: Sequence[Part]) -> Places:
        return {
            f"{part.module}.weight": Conversion(
                (part.out_features, weight.shape[1]), weight.dtype, partial(quantize, weight=_rows_of(weight, rows))
            )
            for part, rows in part_rows(parts)
        }


QUANTIZED_AT_LOAD = _QuantizedAtLoad()


def _rows_of(weight: IntWeight | Fp8Weight, rows: slice) -> IntWeight | Fp8Weight:
    """One part's rows, which begin with a block's first."""
    if isinstance(weight, IntWeight):
        return replace(weight, codes=weight.codes[rows], scales=weight.scales[rows])
    height = weight.block[0]
    blocks = slice(rows.start // height, -(-rows.stop // height))
    return replace(weight, codes=weight.codes[rows], scales=weight.scales[blocks])
