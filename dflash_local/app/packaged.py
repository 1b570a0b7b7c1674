"""Pairs whose target a package of the Python registry has, too: which copy is taken, and what is to be fetched."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from dflash_local.app.models import ModelStore, model_store
from dflash_local.errors import DFlashError

if TYPE_CHECKING:
    from dflash_local.app.resolve import Choice
    from dflash_local.catalog.row import Repo
    from dflash_local.settings import Settings
    from dflash_local.store.package import PackagePlan


def with_package(choice: Choice, model: str, user: Settings) -> Choice:
    """The choice with the package's file for its target: not where the Hub's repository was named, or is all that is
    here.

    Args:
        model: as the user typed it.
    """
    from dflash_local.store.package import file_of, find

    row, store = choice.row, model_store(user)
    if row is None or row.package is None or row.target is None or choice.target != row.target:
        return choice
    wanted, full = model.strip().lower(), row.target.id.lower()
    if wanted in (full, full.partition("/")[2]):
        return replace(choice, name=row.target.id)
    if (
        store is None
        or store.packages is None
        or (find(store.packages, row.package) is None and _here(row.target, store))
    ):
        return choice
    return replace(choice, target=file_of(store.packages, row.package), package=row.package)


def _here(repo: Repo, store: ModelStore) -> bool:
    with suppress(DFlashError):  # a damaged repository is not here
        found = store.find(repo)
        return found is not None and found.complete
    return False


def package_plan(choice: Choice, store: ModelStore) -> PackagePlan | None:
    """What is to be fetched for the target of a choice; None where it is no package's file."""
    from dflash_local.store.package import prepare

    if choice.package is None or store.packages is None or choice.row is None or choice.row.target is None:
        return None
    return prepare(store.packages, choice.package, f"dflash pull {choice.row.target.id} takes it from the Hub")
