"""The table of kinds of drafters. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dflash_local.checkpoint_files.config_values import fill, shown
from dflash_local.errors import CheckpointError

if TYPE_CHECKING:
    from dflash_local.drafters.drafter import Drafter

# A kind is a folder beside this file; with it stand the names that config.json's ``architectures`` has for it.
KINDS: Mapping[str, tuple[str, ...]] = {
    "dflash": ("DFlashDraftModel",),
    "dflash2": ("DFlash2DraftModel",),
    "dspark": ("Qwen3DSparkModel", "DSparkDraftModel"),  # DeepSpec's name, and SpecForge's
}
ARCHITECTURES = {architecture: kind for kind, names in KINDS.items() for architecture in names}
# Relatives with other forward passes, and of DSpark those of other layers.
RELATIVES = {"dspark": "a dspark drafter of other layers", "domino": "a domino drafter", "eagle": "an EAGLE drafter"}
# Where no source tells how positions rotate: no size depends on it.
PLAIN_ROPE = {"rope_theta": 1e7}


def config_of(kind: str) -> type[Drafter]:
    """Import the configuration of a kind."""
    found: type[Drafter] = import_module(f"dflash_local.drafters.{kind}.layout").CONFIG
    return found


def read_drafter(config: Mapping[str, Any], source: object) -> Drafter:
    """Read a ``config.json``. Raises UnknownValue, CheckpointError."""
    return config_of(kind_of(config, str(source))).from_config(config, str(source))


def drafter_of_shape(shape: Mapping[str, Any], source: str) -> Drafter:
    """Read sizes of the registry's copy; ``_inferred`` has likely values. Raises as ``read_drafter``."""
    known, inferred = fill(shape)
    if not any(known.get(key) for key in ("rope_theta", "rope_parameters")):
        known |= PLAIN_ROPE
    return config_of(kind_of(known, source)).from_config(known, source, inferred)


def kind_of(config: Mapping[str, Any], where: str) -> str:
    """Find the kind by ``architectures``; ``auto_map`` plays no part. CheckpointError: not a drafter's."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if isinstance(name, str) and name in ARCHITECTURES:
        return ARCHITECTURES[name]
    for mark, relative in RELATIVES.items():
        if isinstance(name, str) and mark in name.lower():
            raise CheckpointError(
                f"{where}: {shown(name)} is {relative}, which is not supported yet",
                f"use a drafter of architecture {' or '.join(ARCHITECTURES)}",
            )
    what = f"architecture {shown(name)}" if name is not None else "no architecture"
    raise CheckpointError(
        f"{where}: {what} is not a drafter's; supported: {', '.join(ARCHITECTURES)}",
        "give the DFlash drafter of this target, not the target or another model",
    )
