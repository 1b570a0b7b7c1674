"""The registry's pairs with their state on this machine, for the screens to offer, and to download."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dflash_local.cli import fit
from dflash_local.cli.fit import Loaded
from dflash_local.cli.pair_text import in_all
from dflash_local.cli.places import Places, places_or_none, registry, standing
from dflash_local.cli.resolve import choose, refuse_what_does_not_run, wanted
from dflash_local.cli.tables import gib
from dflash_local.errors import UsageError
from dflash_local.events import Notice, PullProgress
from dflash_local.settings import Settings
from dflash_local.ui.offers import Offer

if TYPE_CHECKING:
    from dflash_local.catalog.row import Row
    from dflash_local.planner.machine import Machine


def offers(user: Settings, loaded: Loaded | None = None) -> Sequence[Offer]:
    """All of them, in the registry's order; may take a second.

    Args:
        loaded: what this process has loaded: its memory counts as free.

    Raises:
        SettingsError: the registry cannot be read.
    """
    places, where = places_or_none(user), fit.machine(user, loaded=loaded)
    return [_offer(row, places, where) for row in registry(user).rows]


def offer(name: str, user: Settings, loaded: Loaded | None = None) -> Offer:
    """The pair that a name or an alias means; see ``offers``.

    Raises:
        UnknownModelError: none of the registry does. UsageError: a folder, which needs no download.
    """
    choice = choose(name, None, user)
    if choice.row is None:
        raise UsageError(f"{choice.name} is not in the registry", "/model takes folders as they are")
    return _offer(choice.row, places_or_none(user), fit.machine(user, loaded=loaded))


def pull(
    name: str, user: Settings, hear: Callable[[PullProgress | Notice], None], cancelled: Callable[[], bool]
) -> None:
    """Download and verify a pair for a screen that has asked before.

    Raises:
        Interrupted: cancelled; says what is kept. DoesNotFitError: the disk has no room.
        DFlashError: see ``store.pull.pull``.
    """
    from dflash_local.cli.console import Console
    from dflash_local.cli.pull import PullOptions, Watch, fetch

    choice = choose(name, None, user)
    refuse_what_does_not_run(choice)
    if choice.repos:
        watch = Watch(hear, cancelled)
        fetch(wanted(choice), [choice], user, Console(user.environ), PullOptions(force=True), quiet=True, watch=watch)


def _offer(row: Row, places: Places | None, where: Machine) -> Offer:
    size = "" if row.bundled else gib(in_all(row))
    return Offer(row.bundled or row.name, standing(row, places).state, fit.row_verdict(row, where)[0], size)
