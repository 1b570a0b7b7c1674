"""Describe which format each matrix of a checkpoint is read in: what its configuration says, as far as the files hold
it.
"""

from __future__ import annotations

from dflash_local.config.module_names import together
from dflash_local.config.quantization import Quantization, StoredFormat, StoredPlain
from dflash_local.layout.linear import (
    UNQUANTIZED,
    WORD_BITS,
    FormatOf,
    Fp4Groups,
    IntGroups,
    WeightFormat,
    stored_formats,
    weight_format,
)
from dflash_local.models.checkpoint import Checkpoint

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
MATRIX_NAMES = ("weight", "qweight", "weight_packed")  # below a module, of the tensor that decides a matrix's size
Size = tuple[int, int]


def formats_in(checkpoint: Checkpoint, quantization: Quantization | None) -> FormatOf:
    """Return the format of a module by its name. A plain ``weight`` is what it is. Codes are in the configuration's
    format if they are of its kind, else in the first of its formats whose codes they are: configurations forget
    modules, files do not. A configuration that was made of a file's tensors is right.
    """
    if quantization is None or quantization.exact:
        return stored_formats(quantization)

    def dtype_of(name: str) -> str:
        return checkpoint.tensors[name].dtype if name in checkpoint.tensors else ""

    def holds(module: str, stored: StoredFormat | None) -> bool:
        if stored is None or isinstance(stored, StoredPlain):
            return False
        name, dtype = stored.codes
        return dtype_of(f"{module}.{name}") == dtype

    def format_of(module: str) -> WeightFormat:
        rule = quantization.rule(module)
        if isinstance(rule, StoredPlain):
            return weight_format(rule)
        if dtype_of(f"{module}.weight") in FLOATS or dtype_of(together(module)) in FLOATS:
            return UNQUANTIZED
        stored = next((each for each in (rule, *quantization.formats) if holds(module, each)), rule)
        if stored is None or isinstance(stored, StoredPlain):
            return UNQUANTIZED
        scales = next((name for name in stored.scale_names if f"{module}.{name}" in checkpoint.tensors), "")
        return weight_format(stored, FLOATS.get(dtype_of(f"{module}.{scales}"), ""), scales)

    return format_of


def stored_size(form: WeightFormat, shape: Size) -> Size:
    """Return rows and columns of a matrix whose codes are stored in a tensor of some shape."""
    rows, columns = shape
    if isinstance(form, Fp4Groups):
        return rows, columns * 2
    if not isinstance(form, IntGroups):
        return rows, columns
    per_word = WORD_BITS // form.stored.bits
    sizes: dict[str, Size] = {
        "int-quantized": (rows, columns),
        "pack-quantized": (rows, columns * per_word),
        "awq": (columns * per_word, rows),
    }
    return sizes.get(form.stored.dialect, (columns, rows * per_word))
