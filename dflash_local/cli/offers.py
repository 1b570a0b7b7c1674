"""The registry's pairs with their state on this machine, for the screens to offer."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_local.cli import fit
from dflash_local.cli.pair_text import in_all
from dflash_local.cli.places import places_or_none, registry, standing
from dflash_local.cli.resolve import of_row
from dflash_local.cli.tables import gib
from dflash_local.settings import Settings
from dflash_local.ui.offers import Offer


def offers(user: Settings) -> Sequence[Offer]:
    """All of them, in the registry's order; may take a second.

    Raises:
        SettingsError: the registry cannot be read.
    """
    places, where = places_or_none(user), fit.machine(user, None, None)
    found = []
    for row in registry(user).rows:
        word = "fits" if row.bundled else fit.verdict(row, fit.shapes(of_row(row), None), where)[0]
        size = "" if row.bundled else gib(in_all(row))
        found.append(Offer(row.bundled or row.name, standing(row, places).state, word, size))
    return found
