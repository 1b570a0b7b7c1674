"""A model whose plain weights are quantised as they are read: which matrices, and in which format each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from dflash_local.config.features import ModelConfig
from dflash_local.config.module_names import DECAY
from dflash_local.config.quantization import Quantization, Rule, StoredFp8, StoredInt, StoredPlain
from dflash_local.layout.linear import INT8_ROWS, KEPT_AS
from dflash_local.layout.target import PARTS, part_layout
from dflash_local.load_config import QUANTIZED

GROUP_SIZES = (128, 64, 32)  # of four bits: the largest that divides a matrix's inputs
FP8_BLOCK = (128, 128)  # as published files have it


def quantize_refusal(model: ModelConfig, quantize: str | None) -> str:
    """Why a target's weights cannot be quantised as they are read, for any format; empty when they can."""
    stored = model.quantization
    if quantize is None or (stored is not None and stored.at_load):
        return ""
    if stored is not None:
        return f"{quantize} on top of {stored.name} is not supported"
    return "" if _is_known(model) else f"{quantize} would leave its experts in 16 bits: dense targets only"


@lru_cache(maxsize=64)
def quantized(model: ModelConfig, quantize: str | None) -> ModelConfig:
    """The model as it is kept under a ``LoadConfig.quantize`` of this program's own; itself under any other.

    The matrices of the layers are quantised; embedding, head, norms, convolutions and decay projections are not, nor
    a matrix whose inputs no group divides. A model that ``quantize_refusal`` refuses stays as it is.
    """
    if quantize not in QUANTIZED or quantize_refusal(model, quantize) or model.quantization is not None:
        return model
    found = Quantization(quantize, names=tuple(_rules(model, quantize)), at_load=True)
    return replace(model, quantization=found)


def _is_known(model: ModelConfig) -> bool:
    known = all(type(config) in PARTS for layer in model.layers for config in (layer.mixer, layer.mlp))
    return known and model.dense


def _rules(model: ModelConfig, quantize: str) -> Iterator[Rule]:
    for index, layer in enumerate(model.layers):
        for config in (layer.mixer, layer.mlp):
            part = part_layout(config)
            for spec in part.projections(f"layers.{index}.{part.module}", model.hidden_size):
                kept = _kept(quantize, spec.in_features)
                names = [matrix.module for matrix in spec.parts if matrix.module.rpartition(".")[2] not in DECAY]
                if kept is not None:
                    yield from ((name, StoredPlain(kept)) for name in names)


def _kept(quantize: str, in_features: int) -> StoredInt | StoredFp8 | None:
    if quantize == "fp8":
        return StoredFp8(FP8_BLOCK)
    group = next((size for size in GROUP_SIZES if in_features % size == 0), None)
    if group is None:
        return None
    return INT8_ROWS if quantize == "int8" else StoredInt(KEPT_AS, group)
