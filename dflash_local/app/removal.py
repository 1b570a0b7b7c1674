"""Removing pairs from this machine: which repositories a name stands for, and who else needs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_local.app.models import ModelStore, install_status, registry
from dflash_local.app.resolve import unknown
from dflash_local.catalog.bundled import BUNDLED
from dflash_local.errors import BusyError, UsageError
from dflash_local.settings import Settings

if TYPE_CHECKING:
    from dflash_local.catalog.registry import Registry
    from dflash_local.catalog.row import Row
    from dflash_local.store.removal import Removal


def plan_removal(models: Sequence[str], user: Settings) -> Removal:
    """Plan to remove pairs, or a drafter by its own name.

    Raises:
        UnknownModelError: no such name. UsageError: it comes with the package.
    """
    from dflash_local.store import package, removal

    store, rows = ModelStore.of(user), registry(user)
    repos = list(dict.fromkeys(repo for model in models for repo in _repos(model, rows, store)))
    kept = _kept_for(repos, rows, store) | _files_beside(models, repos, rows, store)
    plan = removal.plan_removal(store.cache, store.manifests, store.locks, repos, kept)
    known = (row.package for row in rows.rows if row.package and row.target and row.target.id in repos)
    files = (package.removal_of(store.packages, one, store.locks) for one in known)
    return replace(plan, repos=(*plan.repos, *(item for item in files if item is not None)))


def adaptations_here(models: Iterable[str], user: Settings) -> list[Path]:
    """List the files of what drafters of these pairs have learnt here, and the folders of unfinished runs."""
    from dflash_local.app.resolve import choose
    from dflash_local.store.adaptations import of_targets

    choices = [choose(model, None, user) for model in models]
    folders = {str(each.target.resolve()) for each in choices if isinstance(each.target, Path)}
    return of_targets(user, folders | {each.name for each in choices})


def refuse_in_use(plan: Removal) -> None:
    """Take nothing from under a process that works with it.

    Raises:
        BusyError: names it.
    """
    for item in plan.repos:
        if item.in_use:
            pids = ", ".join(map(str, item.in_use))
            raise BusyError(f"{item.repo} is in use by process {pids}", "quit it, then run dflash rm again")


def _repos(model: str, rows: Registry, store: ModelStore) -> Iterable[str]:
    """List the repositories that a name stands for: all of a pair, or the one that was named."""
    from dflash_local.catalog.repo_id import is_repo_id

    wanted = model.strip().lower()
    drafters = [name for row in rows.rows for name in (*_drafters(row), *_other_drafters(row))]
    drafter = next((name for name in drafters if name.lower() == wanted), None)
    if drafter is not None:
        return (drafter,)
    row = rows.find(model)
    if row is not None and (named := _drafters_called(wanted, row)):
        return named
    if model in BUNDLED or (row is not None and row.bundled):
        raise UsageError(f"{model} comes with the package: it goes when dflash-local is uninstalled", "")
    if (listed := rows.find_variant(model)) is not None:
        return (listed[1].repo,)
    if row is not None:
        variants = [each.repo for each in row.variants]  # without the drafter they would be of no use
        return [*([row.target.id] if row.target else []), *variants, *_drafters(row)]
    if is_repo_id(model) and model in store.cache.repos():
        return (model,)
    raise unknown(model, rows)


def _drafters(row: Row) -> list[str]:
    return [*([row.drafter.id] if row.drafter else []), *row.mirrors]


def _other_drafters(row: Row) -> list[str]:
    return [other.repo for other in row.other_drafters]


def _drafters_called(name: str, row: Row) -> list[str]:
    """List a row's drafters that a name in lower case without an owner means: its own and mirrors, else another."""
    pair = (row.name, *row.aliases, *((row.target.id, row.target.id.partition("/")[2]) if row.target else ()))
    if name in (each.lower() for each in pair):
        return []
    own, others = (
        [each for each in names if each.lower().partition("/")[2] == name]
        for names in (_drafters(row), _other_drafters(row))
    )
    return own or others[:1]


def _files_beside(
    models: Sequence[str], repos: list[str], rows: Registry, store: ModelStore
) -> dict[str, tuple[str, ...]]:
    """Find the other files here that would go with the repository of a GGUF file that was named without its pair."""
    named = [listed for model in models if (listed := rows.find_variant(model)) is not None]
    going = {variant.model for _, variant in named}
    beside: dict[str, tuple[str, ...]] = {}
    for row, variant in named:
        if row.target is None or row.target.id not in repos:
            here = [each.model for each, _ in install_status(row, store).variants if each.repo == variant.repo]
            if others := tuple(each for each in here if each not in going):
                beside[variant.repo] = others
    return beside


def _kept_for(repos: list[str], rows: Registry, store: ModelStore) -> dict[str, tuple[str, ...]]:
    """Find the other pairs here that use each repository and are not removed with it.

    A drafter that was named itself is not kept for its only pair.
    """
    kept: dict[str, tuple[str, ...]] = {}
    for repo in repos:
        users = [row for row in rows.rows if repo in (*_drafters(row), row.target.id if row.target else "")]
        staying = [row for row in users if not (row.target and row.target.id in repos)]
        here = [row.name for row in staying if install_status(row, store).state in ("local", "variant")]
        if here and len(users) > 1:
            kept[repo] = tuple(here)
    return kept
