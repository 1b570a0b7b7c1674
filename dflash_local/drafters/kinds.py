"""The table of kinds of drafters. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
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
    "mtp": (),  # a layer of the target's own
    "lookup": ("LookupDrafter",),
}
ARCHITECTURES = {architecture: kind for kind, names in KINDS.items() for architecture in names}
# Kinds that are a part of a target's checkpoint, by the target's architecture.
OF_TARGETS: Mapping[str, str] = {
    **dict.fromkeys(("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), "mtp"),
    **dict.fromkeys(("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"), "mtp"),
}
OWN = "mtp"  # as ``--drafter`` takes it: the kind that needs no folder but the target's
LOOKUP = "lookup"  # as ``--drafter`` takes it: the kind that needs no files but those of this program
# Relatives with other forward passes, and of DSpark those of other layers.
RELATIVES = {"dspark": "a dspark drafter of other layers", "domino": "a domino drafter", "eagle": "an EAGLE drafter"}
# Where no source tells how positions rotate: no size depends on it.
PLAIN_ROPE = {"rope_theta": 1e7}


def folder_of(kind: str) -> Path:
    """Return the folder of a kind, which is a drafter's where it stores nothing: its config.json is there."""
    return Path(__file__).parent / kind


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
    kind = known_kind(config)
    if kind is not None:
        return kind
    name = _architecture(config)
    for mark, relative in RELATIVES.items():
        if isinstance(name, str) and mark in name.lower():
            raise CheckpointError(
                f"{where}: {shown(name)} is {relative}, which is not supported yet",
                f"use a drafter of architecture {' or '.join(ARCHITECTURES)}",
            )
    what = f"architecture {shown(name)}" if name is not None else "no architecture"
    raise CheckpointError(
        f"{where}: {what} is not a drafter's; supported: {', '.join(ARCHITECTURES)}",
        "give the DFlash drafter of this target, not the target or another model; a layer of its own has a target of"
        f" architecture {' or '.join(OF_TARGETS)}",
    )


def known_kind(config: Mapping[str, Any]) -> str | None:
    """Return what ``kind_of`` does, but None where it raises."""
    name = _architecture(config)
    return {**OF_TARGETS, **ARCHITECTURES}.get(name) if isinstance(name, str) else None


def _architecture(config: Mapping[str, Any]) -> object:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names else None
