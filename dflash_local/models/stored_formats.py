"""Which format each matrix of a checkpoint is read in: what its configuration says, as far as the files hold it."""

from __future__ import annotations

from dflash_local.config.quantization import Quantization, StoredPlain
from dflash_local.layout.linear import UNQUANTIZED, FormatOf, WeightFormat, unquantized, weight_format
from dflash_local.models.checkpoint import Checkpoint

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def formats_in(checkpoint: Checkpoint, quantization: Quantization | None) -> FormatOf:
    """The format of a module by its name: the plain dtype where a plain ``weight`` lies in its place."""
    if quantization is None:
        return unquantized

    def format_of(module: str) -> WeightFormat:
        stored = quantization.rule(module)  # also of what is usually left out: the file decides
        if isinstance(stored, StoredPlain):
            return weight_format(stored)
        plain = checkpoint.tensors.get(f"{module}.weight")
        if stored is None or (plain is not None and plain.dtype in FLOATS):
            return UNQUANTIZED
        scales = next((name for name in stored.scale_names if f"{module}.{name}" in checkpoint.tensors), "")
        if not scales:
            return weight_format(stored)
        return weight_format(stored, FLOATS.get(checkpoint.tensors[f"{module}.{scales}"].dtype, ""), scales)

    return format_of
