"""Weights that are quantised as they are read: a plain tensor is taken whole, turned into codes, and let go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from dflash_local.kernels.quantize_weight import quantize
from dflash_local.kernels.quantized_weight import Fp8Weight, IntWeight
from dflash_local.layout.linear import Fp8Blocks, IntGroups, Part, QuantizedAtLoad, part_rows
from dflash_local.models.fused.quantized_formats import FP8, INT
from dflash_local.models.place import Conversion, Places

KEPT: Mapping[type, Any] = {IntGroups: INT, Fp8Blocks: FP8}


class _QuantizedAtLoad:
    def weight(
        self, form: QuantizedAtLoad, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype
    ) -> IntWeight | Fp8Weight:
        weight: IntWeight | Fp8Weight = KEPT[type(form.kept)].weight(form.kept, tensors, dtype)
        return weight

    def places(self, weight: IntWeight | Fp8Weight, form: QuantizedAtLoad, parts: Sequence[Part]) -> Places:
        kept = KEPT[type(form.kept)]
        places: Places = {}
        for part, rows in part_rows(parts):
            take = partial(quantize, weight=kept.rows_of(weight, rows))
            places[f"{part.module}.weight"] = Conversion((part.out_features, weight.shape[1]), weight.dtype, take)
        return places


QUANTIZED_AT_LOAD = _QuantizedAtLoad()
