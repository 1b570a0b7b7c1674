"""Rows of an embedding, whatever format it is in."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from dflash_local.kernels import fragment_decode
from dflash_local.kernels.fragment_packing import FragmentWeight
from dflash_local.kernels.gather_rows import gather_rows
from dflash_local.models.fused.formats import Weight


def embedding_rows(table: Weight, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out[i] = table[ids[i]]``, decoded; ids [M] int64 that only the device knows. ``out``: [M, H]."""
    if isinstance(table, torch.Tensor):
        return gather_rows(table, ids, out)
    if isinstance(table, FragmentWeight):
        return fragment_decode.gather(table, ids, out)
    tensors = {each.name: getattr(table, each.name) for each in fields(table)}
    rows: dict[str, Any] = {name: each[ids] for name, each in tensors.items() if isinstance(each, torch.Tensor)}
    return out.copy_(replace(table, **rows).dequantized())
