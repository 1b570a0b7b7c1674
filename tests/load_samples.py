"""A value other than the default for each load option, whatever options there are."""

from __future__ import annotations

from typing import Any

from dflash_local.load_config import LOAD_OPTIONS, LoadOption


def sample(option: LoadOption) -> Any:
    """An allowed value that is not the default."""
    if option.kind is bool:
        return not option.default
    if option.choices:
        return option.choices[-1]
    if option.kind is str:
        return {"device": "cuda:1"}[option.name]
    return option.kind(option.low) + 69 if option.kind is int else option.low + 1.5


SAMPLES = {name: sample(option) for name, option in LOAD_OPTIONS.items()}
