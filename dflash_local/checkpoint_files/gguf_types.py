"""The types of tensors in GGUF files: their numbers, and which of them are not read. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable

from dflash_local.checkpoint_files.config_values import shown
from dflash_local.checkpoint_files.tensor_info import TensorInfo
from dflash_local.errors import CheckpointError

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
    """CheckpointError at the first tensor of a type that is not read; it names the nearest form that is."""
    for info in tensors:
        if info.dtype in UNREAD:
            raise CheckpointError(
                f"{info.file}: {info.dtype} weights are not read ({shown(info.name)})",
                f"the nearest form that is: {UNREAD[info.dtype]}",
            )
