"""Drafters of the kinds that are DFlash decoders, read as such."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_local.drafters.dflash.layout import DFlashConfig
from dflash_local.drafters.drafter import Drafter
from dflash_local.drafters.kinds import drafter_of_shape, read_drafter


def decoder(drafter: Drafter | None) -> DFlashConfig:
    """The drafter, which is one."""
    assert isinstance(drafter, DFlashConfig)
    return drafter


def read_decoder(config: Mapping[str, Any], source: object) -> DFlashConfig:
    """Read a ``config.json``."""
    return decoder(read_drafter(config, source))


def decoder_of_shape(shape: Mapping[str, Any], source: str) -> DFlashConfig:
    """Read the registry's copy of one."""
    return decoder(drafter_of_shape(shape, source))
