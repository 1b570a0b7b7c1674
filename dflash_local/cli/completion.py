"""What the shell completes after the name of a command. Loads the registry only when asked."""

from __future__ import annotations

from dflash_local import settings
from dflash_local.app.models import registry
from dflash_local.catalog.bundled import BUNDLED
from dflash_local.errors import DFlashError


def model_names(incomplete: str) -> list[str]:
    """Bundled pairs, targets, aliases and, when none of them fits, bare names; any case of letters will do.

    What was typed stays as it was, since shells only add to it; names are found in any case. Nothing
    but the bundled ones when the registry cannot be read.
    """
    try:
        rows = registry(settings.load()).rows
    except DFlashError:
        rows = ()
    names = [*BUNDLED, *(row.name for row in rows), *(alias for row in rows for alias in row.aliases)]
    found = _beginning(incomplete, names)
    return found or _beginning(incomplete, [name.partition("/")[2] for name in names])


def _beginning(start: str, names: list[str]) -> list[str]:
    matching = (name for name in names if name and name.lower().startswith(start.lower()))
    return list(dict.fromkeys(start + name[len(start) :] for name in matching))
