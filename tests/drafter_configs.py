"""Drafters of the kinds that are DFlash decoders, read as such; and what the registry knows of published models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_local.catalog.shapes import shape
from dflash_local.config.features import ModelConfig
from dflash_local.config.read_model import read_model
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


def decoder_of_shape(config: Mapping[str, Any], source: str) -> DFlashConfig:
    """Read the registry's copy of one."""
    return decoder(drafter_of_shape(config, source))


def published(repo: str) -> dict[str, Any]:
    """The registry's shape."""
    found = shape(repo)
    assert found is not None, f"the registry has no shape of {repo}"
    return found


def published_target(repo: str, **changes: Any) -> ModelConfig:
    return read_model({**published(repo), **changes}, repo)


def published_drafter(repo: str) -> DFlashConfig:
    return decoder_of_shape(published(repo), repo)
