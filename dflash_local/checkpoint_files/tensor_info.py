"""Describe what a file's header says of one tensor, the same for safetensors and GGUF, and the table of sizes.
Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dflash_local.checkpoint_files.config_values import shown
from dflash_local.checkpoint_files.undo import Undo
from dflash_local.errors import CheckpointError

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


AGAIN = "the download is damaged or incomplete: download the checkpoint again"
READ = "only safetensors and GGUF are read"

IMPOSTORS = (
    (b"version https://git-lfs", "is a git-lfs pointer, not the weights"),
    (b"<", "is a web page, not weights"),
    (b"PK\x03\x04", f"is a pickle or zip archive; {READ}"),
    (b"\x80\x02", f"is a pickle; {READ}"),
    (b"\x80\x04", f"is a pickle; {READ}"),
    (b"\x80\x05", f"is a pickle; {READ}"),
)


def refuse_impostor(file: Path, start: bytes) -> None:
    """Raise CheckpointError that says what ``file`` is, where its first bytes are those of a known other thing."""
    for magic, what in IMPOSTORS:
        if start.lstrip().startswith(magic):
            raise CheckpointError(f"{file} {what}", AGAIN)


# `enum ggml_type`; 4 and 5 are older than GGUF, 31 to 33 and 36 to 38 were taken back.
GGML_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0",
}  # fmt: skip

# What is not read -> the nearest form that is, by the name that files of it carry.
UNREAD = {
    **dict.fromkeys(("Q1_0", "Q2_0", "Q2_K", "Q3_K", "TQ1_0", "TQ2_0", "NVFP4"), "Q4_K_M"),
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), "IQ4_XS"),
    **dict.fromkeys(("Q8_1", "Q8_K"), "Q8_0"),
    **dict.fromkeys(("Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8"), "Q4_0"),
    **dict.fromkeys(("IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8"), "IQ4_NL"),
}


def check_types(tensors: Iterable[TensorInfo]) -> None:
    """Raise CheckpointError at the first tensor of a type that is not read; it names the nearest form that is."""
    for info in tensors:
        if info.dtype in UNREAD:
            raise CheckpointError(
                f"{info.file}: {info.dtype} weights are not read ({shown(info.name)})",
                f"the nearest form that is: {UNREAD[info.dtype]}",
            )
