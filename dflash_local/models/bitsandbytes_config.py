"""transformers' configuration for weights that bitsandbytes quantises, or has quantised. Checked values only."""

from __future__ import annotations

from typing import Any

import torch

from dflash_local.checkpoint_files.config_values import Fields
from dflash_local.config.module_names import DECAY, HEAD
from dflash_local.errors import MissingDependencyError
from dflash_local.models.transformers_config import check_kept

KEPT_WHOLE = (HEAD, *DECAY)  # in 16 bits
STORAGE = ("uint8", "int8", "float16", "bfloat16", "float32")  # dtypes that four-bit codes may lie in
MAX_SKIPPED = 100_000


def config_at_load(quantize: str, dtype: torch.dtype) -> Any:
    """transformers' configuration for plain weights that are quantised as they are read.

    Args:
        quantize: of ``load_config.BITSANDBYTES``. dtype: that is computed in.

    Raises:
        MissingDependencyError: bitsandbytes is not installed.
    """
    require(f"--quantize {quantize}")
    from transformers import BitsAndBytesConfig

    if quantize == "bnb-int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=list(KEPT_WHOLE))
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules=list(KEPT_WHOLE),
    )


def stored_config(settings: Fields, dtype: torch.dtype) -> dict[str, Any]:
    """The ``quantization_config`` of weights that are stored so, as far as reading them needs it.

    Raises:
        CheckpointError: a value is of the wrong type, or is no name of a module.
        MissingDependencyError: bitsandbytes is not installed.
    """
    require("a target that bitsandbytes quantised")
    skipped = settings.optional_names("llm_int8_skip_modules", MAX_SKIPPED)
    check_kept(skipped or (), settings.where)
    found: dict[str, Any] = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": skipped}
    if settings.optional_flag("load_in_8bit"):
        threshold = settings.optional_number("llm_int8_threshold", 0, 1e6)
        return {**found, "load_in_8bit": True, "llm_int8_threshold": 6.0 if threshold is None else threshold}
    storage = settings.word("bnb_4bit_quant_storage", STORAGE) if settings.present("bnb_4bit_quant_storage") else None
    return {
        **found,
        "load_in_4bit": True,
        "bnb_4bit_quant_type": settings.values.get("bnb_4bit_quant_type"),
        "bnb_4bit_use_double_quant": bool(settings.optional_flag("bnb_4bit_use_double_quant")),
        "bnb_4bit_quant_storage": storage or "uint8",
        "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
    }


def require(what: str) -> None:
    """Pass where bitsandbytes is installed.

    Raises:
        MissingDependencyError: names what needs it.
    """
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise MissingDependencyError(f"{what} needs bitsandbytes", "pip install bitsandbytes") from None
