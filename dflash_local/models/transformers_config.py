"""A transformers configuration built of checked values, never read of a checkpoint's config.json.

transformers' configurations take any key and obey names of code (``auto_map``), of kernels to fetch
(``attn_implementation``), of other weights (``transformers_weights``), of plug-ins.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from dflash_local.checkpoint_files.config_values import ConfigFields, shown
from dflash_local.config.families import NAMED
from dflash_local.config.module_names import DECAY, HEAD
from dflash_local.errors import CheckpointError, MissingDependencyError

# What transformers raises while it builds or fills a model whose configuration and weights do not fit together.
BUILD_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError),
    *(OSError, RuntimeError, TypeError, ValueError, StrictDataclassError, SafetensorError),
)

# Of modules that stay in 16 bits: transformers takes such names for regular expressions, which may not end.
KEPT_NAME = re.compile(r"[\w.\-]+([*][\w.\-]+)?[*]?")
KEPT_WHOLE = (HEAD, *DECAY)  # in 16 bits
STORAGE = ("uint8", "int8", "float16", "bfloat16", "float32")  # dtypes that four-bit codes may lie in
MAX_SKIPPED = 100_000


def check_kept(names: Iterable[str], where: str) -> None:
    """Refuse what is more than names of modules, with a wildcard or two. Raises CheckpointError: names the first."""
    for name in names:
        if not KEPT_NAME.fullmatch(name):
            raise CheckpointError(
                f"{where}: quantization_config leaves out {shown(name)}, which is no name of a module",
                "write the modules' names without regular expressions",
            )


def text_model_config(family: str, values: Mapping[str, Any], quantization: Mapping[str, Any] | None = None) -> Any:
    """Return the configuration of a family's text model; of a multimodal one, too, of which no other part is loaded.

    Args:
        values: of ``text_values``. quantization: of weights that are stored quantised.

    Raises:
        one of ``BUILD_ERRORS``: transformers does not take these values.
    """
    from transformers import CONFIG_MAPPING

    known: dict[str, Any] = {**values, "attn_implementation": "sdpa" if NAMED[family].fits_sdpa else "eager"}
    if quantization is not None:
        known["quantization_config"] = dict(quantization)
    return CONFIG_MAPPING[NAMED[family].model_types[0]](**known)


def config_at_load(quantize: str, dtype: torch.dtype) -> Any:
    """Return transformers' configuration of a bitsandbytes format. Raise MissingDependencyError: not installed."""
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


def stored_config(settings: ConfigFields, dtype: torch.dtype) -> dict[str, Any]:
    """Return the ``quantization_config`` of weights stored so, as far as reading needs it. Raises CheckpointError: a
    wrong value. MissingDependencyError: bitsandbytes is not installed.
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
    """Pass where bitsandbytes is installed. Raises MissingDependencyError: names what needs it."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise MissingDependencyError(f"{what} needs bitsandbytes", "pip install bitsandbytes") from None
