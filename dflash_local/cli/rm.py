"""``dflash rm``: shows what would go, asks, and removes it.

What another pair uses, or another program put there, goes only when it is agreed to by name or with
``--all``; ``--yes`` alone keeps it.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_local.app.removal import adaptations_here, plan_removal, refuse_in_use
from dflash_local.cli import options as opt
from dflash_local.cli.console import Console
from dflash_local.cli.invocation import Invocation
from dflash_local.errors import UsageError
from dflash_local.tables import Column, amount, in_gib, listing, table

if TYPE_CHECKING:
    from dflash_local.store.removal import Removal, RepoRemoval

COLUMNS = (Column("REPOSITORY", shrinks=True), Column("SIZE", right=True), Column("", shrinks=True))

EXAMPLES = ("dflash rm Qwen/Qwen3.5-9B --dry-run", "dflash rm Qwen/Qwen3.5-9B --yes")


def rm(
    models: opt.Models,
    everything: Annotated[
        bool, typer.Option("--all", help="Also what other pairs use or other programs put there.")
    ] = False,
    learnt: Annotated[
        bool, typer.Option("--adaptation", help="Only what dflash adapt has taught the drafters.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: opt.Yes = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Remove pairs from this machine. A drafter's own name removes the drafter alone."""
    from dflash_local.store import removal as store

    call = Invocation.begin()
    user, console = call.user, call.console
    if learnt:
        _remove_adaptations(call, models, dry_run, as_json)
        return
    plan = plan_removal(models, user)
    if not as_json:
        _show(console, models, plan)
    if dry_run or not plan.repos:
        if as_json:
            console.json(_report(plan, (), 0, dry_run))
        return
    refuse_in_use(plan)
    chosen = _agreed(console, plan, everything, yes)
    freed = store.remove(replace(plan, repos=chosen), whole=everything) if chosen else 0
    if as_json:
        console.json(_report(plan, chosen, freed, dry_run))
        return
    kept = [item for item in plan.repos if item not in chosen and item.why]
    for item in kept:
        console.note(f"kept: {item.repo} ({item.why}); --all removes it too")
    if chosen:
        console.data(f"removed {listing([item.repo for item in chosen])}: {amount(freed)} freed")
    else:
        console.data("nothing was removed")


def _remove_adaptations(call: Invocation, models: list[str], dry_run: bool, as_json: bool) -> None:
    """Take away files that dflash adapt makes again."""
    found = adaptations_here(models, call.user)
    for path in () if dry_run else found:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    lines = [f"{'would remove' if dry_run else 'removed'} {path}" for path in found]
    report = {"dry_run": dry_run, "adaptations": [str(path) for path in found]}
    call.console.result(report, lines or [f"no drafter of {listing(models)} has learnt anything here"], as_json)


def _show(console: Console, models: list[str], plan: Removal) -> None:
    if not plan.repos:
        console.note(f"nothing of {listing(models)} is on this machine")
        return
    rows = [(item.repo, amount(item.whole_size if item.foreign else item.size), _summary(item)) for item in plan.repos]
    for line in table(COLUMNS, rows, console.note_columns):
        console.note(line)


def _summary(item: RepoRemoval) -> str:
    if item.in_use:
        return f"in use by process {', '.join(map(str, item.in_use))}"
    if item.downloading:
        return "being downloaded by another program"
    return item.why


def _agreed(console: Console, plan: Removal, everything: bool, yes: bool) -> tuple[RepoRemoval, ...]:
    """Return the repositories whose removal the user agreed to."""
    plain = tuple(item for item in plan.repos if not item.delicate)
    other = tuple(item for item in plan.repos if item.delicate)
    if yes:
        return (*plain, *(other if everything else ()))
    if not console.can_ask:
        raise UsageError("nobody can be asked whether to remove this", "--yes says so, --dry-run only shows it")
    chosen: tuple[RepoRemoval, ...] = ()
    if plain:
        size = amount(sum(item.whole_size if everything else item.size for item in plain))
        if not console.ask(f"Remove {listing([item.repo for item in plain])} ({size})?", default=False):
            return ()
        chosen = plain
    for item in other:
        if console.ask(f"{item.repo} is {item.why}. Remove it too ({amount(item.whole_size)})?", default=False):
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
