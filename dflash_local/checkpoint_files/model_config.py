"""A model folder's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_local.checkpoint_files.json_file import read_object

CONFIG = "config.json"
MODELOPT_CONFIG = "hf_quant_config.json"  # beside a config.json in which older versions of ModelOpt say nothing
QUANTIZATION = "quantization_config"


def read_model_config(folder: Path, hint: str = "") -> dict[str, Any]:
    """``config.json`` with its ``quantization_config``, where ModelOpt may have left that to a file of its own."""
    config = read_object(folder / CONFIG, hint)
    beside = {} if config.get(QUANTIZATION) else read_object(folder / MODELOPT_CONFIG, optional=True)
    return {**config, QUANTIZATION: {"quant_method": "modelopt", **beside}} if beside else config
