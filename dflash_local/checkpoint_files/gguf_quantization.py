"""Describe which matrices of a GGUF file lie in blocks, said as a ``quantization_config``. Torch-free."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any

from dflash_local.checkpoint_files.tensor_info import GGML, TensorInfo
from dflash_local.checkpoint_files.undo import moves_columns, moves_rows_only

METHOD = "gguf"
WEIGHT = ".weight"
# Its columns are value heads in the converter's order, which cannot be undone in blocks of two heads; so the layer puts
# the heads in that order before they are multiplied (``models.fused.gated_delta_net``).
HEADS_AS_STORED = ".linear_attn.out_proj.weight"
OF_EXPERT = re.compile(r"model[.]layers[.](\d+)[.](.+)[.]experts[.]\d+[.](\w+)[.]weight")


def quantization_config(tensors: Mapping[str, TensorInfo]) -> dict[str, Any] | None:
    """Describe the formats of tensors by the model's names; None where no matrix is in blocks.

    ``type`` is that of most weights; ``modules`` has the others', null where a matrix is plain, or becomes plain since
    its blocks cannot be put in order; ``experts`` those of a mixture by patterns, since they are many.
    """
    matrices = {name: info for name, info in tensors.items() if name.endswith(WEIGHT) and len(info.shape) == 2}
    types = {name: info.dtype if keeps_blocks(info) else None for name, info in matrices.items()}
    weights: Counter[str] = Counter()
    for name, kind in types.items():
        if kind is not None:
            weights[kind] += prod(matrices[name].shape)
    if not weights:
        return None
    usual = weights.most_common(1)[0][0]
    modules: dict[str, str | None] = {}
    layers: dict[tuple[str, str, str | None], dict[str, None]] = {}
    for name, kind in types.items():
        expert = OF_EXPERT.fullmatch(name)
        if kind != usual and expert:
            layers.setdefault((expert[2], expert[3], kind), {})[expert[1]] = None
        elif kind != usual:
            modules[name.removesuffix(WEIGHT)] = kind
    experts = {
        rf"model[.]layers[.]({'|'.join(numbers)})[.]{mixture}[.]experts[.]\d+[.]{matrix}$": kind
        for (mixture, matrix, kind), numbers in layers.items()
    }
    return {"quant_method": METHOD, "type": usual, "modules": modules, "experts": experts}


def keeps_blocks(info: TensorInfo) -> bool:
    """Return True of a tensor in blocks of one type, that can be used once their rows are in order."""
    steps = info.undo
    if info.name.endswith(HEADS_AS_STORED):
        steps = tuple(step for step in steps if not moves_columns(step))
    one_type = all(part.dtype == info.dtype for part in info.parts)
    return one_type and info.dtype in GGML and moves_rows_only(steps)
