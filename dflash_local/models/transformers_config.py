"""What transformers is told of a target: a configuration built of checked values, and none of its own reading.

transformers' configurations take any key, and obey some that have nothing to do with a shape: names of code
(``auto_map``), of kernels to fetch (``attn_implementation``), of other weights (``transformers_weights``), of
plug-ins. So it never reads a checkpoint's config.json; the values come from ``text_values``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from dflash_local.checkpoint_files.config_values import shown
from dflash_local.config.families import NAMED
from dflash_local.errors import CheckpointError

# What transformers raises while it builds or fills a model whose configuration and weights do not fit together.
BUILD_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError),
    *(OSError, RuntimeError, TypeError, ValueError, StrictDataclassError, SafetensorError),
)


# Of modules that stay in 16 bits: transformers takes such names for regular expressions, which may not end.
KEPT_NAME = re.compile(r"[\w.\-]+([*][\w.\-]+)?[*]?")


def check_kept(names: Iterable[str], where: str) -> None:
    """Refuse what is more than names of modules, with a wildcard or two.

    Raises:
        CheckpointError: names the first one.
    """
    for name in names:
        if not KEPT_NAME.fullmatch(name):
            raise CheckpointError(
                f"{where}: quantization_config leaves out {shown(name)}, which is no name of a module",
                "write the modules' names without regular expressions",
            )


def text_model_config(family: str, values: Mapping[str, Any], quantization: Mapping[str, Any] | None = None) -> Any:
    """The configuration of a family's text model; of a multimodal one, too, of which no other part is loaded.

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
