"""A model whose plain weights are quantised as they are read: which matrices, and in which format each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from dflash_local.config.features import LayerConfig, ModelConfig, MoEConfig
from dflash_local.config.module_names import DECAY, ROUTERS
from dflash_local.config.quantization import WHOLE, Quantization, Rule, StoredFp8, StoredInt, StoredPlain
from dflash_local.layout.linear import INT8_ROWS, KEPT_AS
from dflash_local.layout.target import PARTS, part_layout
from dflash_local.load_config import QUANTIZED

GROUP_SIZES = (128, 64, 32)  # of four bits: the largest that divides a matrix's inputs
FP8_BLOCK = (128, 128)  # as published files have it
FP8_ROWS = (1, WHOLE)  # of experts whose rows those do not divide


def quantize_refusal(model: ModelConfig, quantize: str | None) -> str:
    """Return why a target's weights cannot be quantised as they are read, for any format; empty when they can."""
    stored = model.quantization
    if quantize is None or (stored is not None and stored.at_load):
        return ""
    if stored is not None:
        return f"{quantize} on top of {stored.name} is not supported"
    if quantize not in QUANTIZED:
        return "" if model.dense else f"{quantize} would leave its experts in 16 bits: dense targets only"
    why = next((reason for layer in model.layers if (reason := _unknown(layer))), "")
    return f"{quantize} is not supported where {why}" if why else ""


@lru_cache(maxsize=256)  # one object for all plans of a model: what is worked out of it is kept with it
def quantized(model: ModelConfig, quantize: str | None) -> ModelConfig:
    """Return the model as a ``LoadConfig.quantize`` of this program's own keeps it; itself under another or a refused
    one. The layers' matrices are quantised; embedding, head, norms, convolutions, decay projections and routers are
    not, nor a matrix whose inputs no group divides.
    """
    if quantize not in QUANTIZED or quantize_refusal(model, quantize) or model.quantization is not None:
        return model
    mixtures = dict.fromkeys(layer.mlp for layer in model.layer_kinds if isinstance(layer.mlp, MoEConfig))
    patterns = tuple(dict.fromkeys(rule for each in mixtures for rule in _expert_rules(model, each, quantize)))
    names = tuple(_rules(model, quantize))
    return replace(model, quantization=Quantization(quantize, names=names, patterns=patterns, at_load=True))


def _unknown(layer: LayerConfig) -> str:
    """Return which feature of a layer hides matrices from the rules; empty where none does."""
    if any(type(config) not in PARTS for config in (layer.mixer, layer.mlp)):
        return "attention is latent"
    if isinstance(layer.mlp, MoEConfig) and layer.mlp.expert_bias:
        return "experts have biases"
    return ""


def _rules(model: ModelConfig, quantize: str) -> Iterator[Rule]:
    for index, layer in enumerate(model.layers):
        for config in (layer.mixer, layer.mlp):
            part = part_layout(config)
            for spec in part.projections(f"layers.{index}.{part.module}", model.hidden_size):
                names = [matrix.module for matrix in spec.parts]
                kept = _kept(quantize, spec.in_features)
                if kept is not None:
                    taken = (name for name in names if name.rpartition(".")[2] not in (*DECAY, *ROUTERS))
                    yield from ((name, StoredPlain(kept)) for name in taken)


def _expert_rules(model: ModelConfig, mixture: MoEConfig, quantize: str) -> Iterator[Rule]:
    """Yield the rules of the routed experts, by pattern: they are many."""
    hidden, inner = model.hidden_size, mixture.intermediate_size
    for names, rows, columns in (("(gate|up)", inner, hidden), ("down", hidden, inner)):
        kept = _kept(quantize, columns)
        if isinstance(kept, StoredFp8) and rows % FP8_BLOCK[0]:
            kept = StoredFp8(FP8_ROWS)
        if kept is not None:
            yield rf".*[.]experts[.]\d+[.]{names}_proj$", StoredPlain(kept)


def _kept(quantize: str, in_features: int) -> StoredInt | StoredFp8 | None:
    if quantize == "fp8":
        return StoredFp8(FP8_BLOCK)
    group = next((size for size in GROUP_SIZES if in_features % size == 0), None)
    if group is None:
        return None
    return INT8_ROWS if quantize == "int8" else StoredInt(KEPT_AS, group)
