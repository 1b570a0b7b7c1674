"""A model's own sampling defaults, from ``generation_config.json`` or the registry. Knows no torch."""

from __future__ import annotations

from typing import Any

from dflash_local.checkpoint_files.source import Source
from dflash_local.errors import CheckpointError, UsageError
from dflash_local.request import SamplingParams

REPAIR = "correct the file or remove it"
KEYS = ("temperature", "top_p", "min_p", "repetition_penalty", "top_k")


def sampling_defaults(source: Source, advised: SamplingParams | None = None) -> SamplingParams:
    """Return the sampling that a model's authors advise; without ``do_sample`` greedy, unless ``advised``.

    With ``do_sample`` an absent temperature is 1 and an absent filter is off: what the authors did
    not write is not added.

    Raises:
        CheckpointError: the file is not JSON or holds a value outside its range.
    """
    config = source.generation_config()
    if config.get("do_sample") is not True:
        return advised or SamplingParams()
    given: dict[str, Any] = {name: config[name] for name in KEYS if config.get(name) is not None}
    try:
        return SamplingParams(**{"temperature": 1.0, **given})
    except UsageError as error:
        raise CheckpointError(f"generation_config.json of {source.path}: {error.message}", REPAIR) from error
