"""``dflash rm``: shows what would go, asks, and removes it.

What another pair uses, or another program put there, goes only when it is agreed to by name or with
``--all``; ``--yes`` alone keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_local import settings
from dflash_local.catalog.bundled import BUNDLED
from dflash_local.cli import options as opt
from dflash_local.cli.console import Console
from dflash_local.cli.places import Places, registry, standing
from dflash_local.cli.tables import Column, amount, in_gib, listing, table
from dflash_local.errors import BusyError, UsageError

if TYPE_CHECKING:
    from dflash_local.catalog.registry import Registry
    from dflash_local.catalog.row import Row
    from dflash_local.store.removal import Removal, RepoRemoval

COLUMNS = (Column("REPOSITORY", shrinks=True), Column("SIZE", right=True), Column("", shrinks=True))


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("rm")(rm)


def rm(
    models: opt.Models,
    everything: Annotated[
        bool, typer.Option("--all", help="Also what other pairs use or other programs put there.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: opt.Yes = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Remove pairs from this machine; a drafter's own name removes the drafter alone."""
    from dflash_local.store import removal as store

    user = settings.load()
    console = Console(user.environ)
    plan = planned(models, user)
    if not as_json:
        _show(console, models, plan)
    if dry_run or not plan.repos:
        if as_json:
            console.json(_report(plan, (), 0, dry_run))
        return
    refuse_in_use(plan)
    chosen = _agreed(console, plan, everything, yes)
    freed = 0
    for items, all_of_it in ((easy(chosen), everything), (_delicate(chosen), True)):
        if items:
            freed += store.remove(replace(plan, repos=items), shared=True, foreign=all_of_it)
    if as_json:
        console.json(_report(plan, chosen, freed, dry_run))
        return
    kept = [item for item in plan.repos if item not in chosen and why(item)]
    for item in kept:
        console.note(f"kept: {item.repo} ({why(item)}); --all removes it too")
    if chosen:
        console.data(f"removed {listing([item.repo for item in chosen])}: {amount(freed)} freed")
    else:
        console.data("nothing was removed")


def planned(models: Iterable[str], user: settings.Settings) -> Removal:
    """What removing pairs, or a drafter by its own name, means on this machine.

    Raises:
        UnknownModelError: no such name. UsageError: it comes with the package.
    """
    from dflash_local.store import removal as store

    places, rows = Places.of(user), registry(user)
    repos = list(dict.fromkeys(repo for model in models for repo in _repos(model, rows, places)))
    return store.plan_removal(places.cache, places.manifests, places.locks, repos, _kept_for(repos, rows, places))


def _repos(model: str, rows: Registry, places: Places) -> Iterable[str]:
    """The repositories that a name stands for: both of a pair, or the one that was named in full."""
    from dflash_local.catalog.repo_id import is_repo_id
    from dflash_local.cli.resolve import unknown

    wanted = model.strip().lower()
    drafter = next((name for row in rows.rows for name in _drafters(row) if name.lower() == wanted), None)
    if drafter is not None:
        return (drafter,)
    row = rows.find(model)
    if model in BUNDLED or (row is not None and row.bundled):
        raise UsageError(f"{model} comes with the package: it goes when dflash-local is uninstalled", "")
    if row is not None:
        return ([row.target.id] if row.target else []) + _drafters(row)
    if is_repo_id(model) and model in places.cache.repos():
        return (model,)
    raise unknown(model, rows)


def _drafters(row: Row) -> list[str]:
    """A row's drafter and its mirrors."""
    return [*([row.drafter.id] if row.drafter else []), *row.mirrors]


def _kept_for(repos: list[str], rows: Registry, places: Places) -> dict[str, tuple[str, ...]]:
    """Repository -> other pairs on this machine that use it and are not removed with it.

    A drafter that was named itself is not kept for its only pair.
    """
    kept: dict[str, tuple[str, ...]] = {}
    for repo in repos:
        users = [row for row in rows.rows if repo in (*_drafters(row), row.target.id if row.target else "")]
        staying = [row for row in users if not (row.target and row.target.id in repos)]
        here = [row.name for row in staying if standing(row, places).state == "local"]
        if here and len(users) > 1:
            kept[repo] = tuple(here)
    return kept


def _show(console: Console, models: list[str], plan: Removal) -> None:
    if not plan.repos:
        console.note(f"nothing of {listing(models)} is on this machine")
        return
    rows = [(item.repo, amount(item.whole_size if item.foreign else item.size), _told(item)) for item in plan.repos]
    for line in table(COLUMNS, rows, console.note_columns):
        console.note(line)


def _told(item: RepoRemoval) -> str:
    if item.in_use:
        return f"in use by process {', '.join(map(str, item.in_use))}"
    if item.downloading:
        return "being downloaded by another program"
    return why(item)


def why(item: RepoRemoval) -> str:
    """What speaks against removing it unasked; empty when nothing does."""
    if item.shared_with:
        return f"also used by {listing(item.shared_with)}"
    if item.foreign:
        return "put there by another program"
    if item.others:
        return f"{len(item.others)} entries of other programs stay: {listing(item.others, 2)}"
    return ""


def refuse_in_use(plan: Removal) -> None:
    """Nothing is taken from under a process that works with it.

    Raises:
        BusyError: names it.
    """
    for repo, pids in plan.in_use.items():
        raise BusyError(f"{repo} is in use by process {', '.join(map(str, pids))}", "quit it, then run dflash rm again")


def easy(items: Iterable[RepoRemoval]) -> tuple[RepoRemoval, ...]:
    """Those against whose removal nothing speaks."""
    return tuple(item for item in items if not item.shared_with and not item.foreign)


def _delicate(items: Iterable[RepoRemoval]) -> tuple[RepoRemoval, ...]:
    return tuple(item for item in items if item.shared_with or item.foreign)


def _agreed(console: Console, plan: Removal, everything: bool, yes: bool) -> tuple[RepoRemoval, ...]:
    """The repositories whose removal the user agreed to.

    Raises:
        UsageError: nobody can be asked, and ``--yes`` was not given.
    """
    plain, delicate = easy(plan.repos), _delicate(plan.repos)
    if yes:
        return (*plain, *(delicate if everything else ()))
    if not console.can_ask:
        raise UsageError("nobody can be asked whether to remove this", "--yes says so, --dry-run only shows it")
    chosen: tuple[RepoRemoval, ...] = ()
    if plain:
        size = amount(sum(item.whole_size if everything else item.size for item in plain))
        if not console.ask(f"Remove {listing([item.repo for item in plain])} ({size})?", default=False):
            return ()
        chosen = plain
    for item in delicate:
        if console.ask(f"{item.repo} is {why(item)}. Remove it too ({amount(item.whole_size)})?", default=False):
            chosen += (item,)
    return chosen


def _report(plan: Removal, chosen: tuple[RepoRemoval, ...], freed: int, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "freed": freed,
        "freed_gib": in_gib(freed),
        "repos": [
            {
                "repo": item.repo,
                "bytes": item.size,
                "folder_bytes": item.whole_size,
                "removed": item in chosen,
                "shared_with": list(item.shared_with),
                "foreign": item.foreign,
                "others": list(item.others),
                "in_use": list(item.in_use),
            }
            for item in plan.repos
        ],
    }
