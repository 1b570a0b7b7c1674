"""What a file's header says of one tensor, the same for safetensors and GGUF, and the table of sizes. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from dflash_local.checkpoint_files.undo import Undo

MAX_NAME = 500  # characters of a tensor's name; patterns over names take longer than in proportion to them

# dtype -> weights and bytes of one block; a plain dtype is a block of one weight.
SAFETENSORS = {
    "BOOL": (1, 1), "U8": (1, 1), "I8": (1, 1), "U16": (1, 2), "I16": (1, 2), "U32": (1, 4), "I32": (1, 4),
    "U64": (1, 8), "I64": (1, 8), "F16": (1, 2), "BF16": (1, 2), "F32": (1, 4), "F64": (1, 8), "C64": (1, 8),
    "F8_E4M3": (1, 1), "F8_E5M2": (1, 1), "F8_E8M0": (1, 1), "F4": (2, 1), "F6_E2M3": (4, 3), "F6_E3M2": (4, 3),
}  # fmt: skip
GGML = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q8_1": (32, 36),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "Q8_K": (256, 292), "IQ1_S": (256, 50), "IQ1_M": (256, 56), "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82), "IQ3_XXS": (256, 98), "IQ3_S": (256, 110), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54), "TQ2_0": (256, 66), "MXFP4": (32, 17), "NVFP4": (64, 36), "Q1_0": (128, 18), "Q2_0": (64, 18),
    "Q4_0_4_4": (32, 18), "Q4_0_4_8": (32, 18), "Q4_0_8_8": (32, 18),
    "IQ4_NL_4_4": (32, 18), "IQ4_NL_4_8": (32, 18), "IQ4_NL_8_8": (32, 18),
}  # fmt: skip
BLOCKS = SAFETENSORS | GGML


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor by its file's header.

    ``dtype`` is a word of ``BLOCKS``; ``shape`` has the outermost axis first, and blocks run along the last one;
    ``offset`` is where its bytes begin in the file; ``undo`` is what a converter did to the values and a reader takes
    back, in this order. Where a converter cut a tensor in pieces, ``parts`` are they, to be joined along the first axis
    before anything is undone; their dtypes may differ, and ``dtype`` is that of the first.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int = 0
    undo: tuple[Undo, ...] = ()
    parts: tuple[TensorInfo, ...] = ()

    @property
    def nbytes(self) -> int:
        if self.parts:
            return sum(part.nbytes for part in self.parts)
        weights, size = BLOCKS[self.dtype]
        return math.prod(self.shape) // weights * size
