"""A download as the terminal shows it: what it takes, whether it is wanted, how far it is."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash_local.app.download import Download, before_download, prepare, settings_summary, slow_here
from dflash_local.app.fitting import machine
from dflash_local.app.models import ModelStore
from dflash_local.app.recommending import Summary
from dflash_local.app.resolve import Choice, Missing, Obtain
from dflash_local.cli.console import Console
from dflash_local.cli.progress import PullLines
from dflash_local.cli.reply import first_interrupt
from dflash_local.errors import DoesNotFitError, Interrupted
from dflash_local.settings import Settings
from dflash_local.tables import Column, amount, field, table
from dflash_local.ui import plan_text

if TYPE_CHECKING:
    from dflash_local.store.local import Local
    from dflash_local.store.package import PackagePlan
    from dflash_local.store.pull import RepoPlan, Wanted

COLUMNS = (
    Column("REPOSITORY", shrinks=True),
    Column("FILES", right=True),
    Column("SIZE", right=True),
    Column("HERE", right=True),
    Column("TO FETCH", right=True),
    Column("COMMIT"),
)
FINE = ("fits", "unknown")  # verdicts that need no question


def fetch(
    needs: Sequence[Wanted],
    choices: Sequence[Choice],
    user: Settings,
    console: Console,
    *,
    update: bool = False,
    force: bool = False,
    dry_run: bool = False,
    allow_mismatch: bool = False,
    xet: bool = False,
    quiet: bool = False,
) -> tuple[Download, tuple[Local, ...]]:
    """Fetch and verify repositories, showing first what that takes; a dry run finds nothing.

    Args:
        choices: what they are for; tells whether it will fit into memory.
        update: take what the revision means today. force: no question about what fits no memory here.
        dry_run: only show what would be done. xet: see ``store.hub.Hub``. quiet: no plan is shown.

    Raises:
        DoesNotFitError: the disk has no room, or the memory has none and nobody wanted it all the same.
        Interrupted: the user broke it off. DownloadError and others: see ``store.pull.pull``.
    """
    download = prepare(needs, choices, user, update, xet, None if force or dry_run else console.notify)
    if not download.ready and not quiet:
        _show_plan(console, download, dry_run)
    if dry_run:
        return download, ()
    download.check_disk()
    if not download.ready and not force:
        _agree(console, download)
    stop = threading.Event()
    screen = PullLines(console, download.totals)
    try:
        with first_interrupt(stop.set):
            return download, download.run(screen, stop.is_set, allow_mismatch)
    finally:
        screen.finish()


def obtain(user: Settings, console: Console, allow_mismatch: bool) -> Obtain:
    """Download what a pair lacks, after asking whether it is to."""

    def ask(missing: Missing) -> bool:
        if not console.can_ask:
            return False
        where = machine(user, notify=console.notify)
        found = settings_summary(missing.choice, where, user, ModelStore.of(user))
        for line in _before_download(missing.choice, user, found, console.note_columns):
            console.note(line)
        slow = slow_here(found, where, user)
        question = f"{missing.text}. {f'{slow}. ' if slow else ''}Download to {user.hub.cache} now?"
        if not console.ask(question, default=not slow):
            raise Interrupted(f"{missing.choice.name} was not downloaded")
        fetch(missing.needs, [missing.choice], user, console, force=bool(slow), allow_mismatch=allow_mismatch)
        return True

    return ask


def _before_download(choice: Choice, user: Settings, found: Summary, width: int) -> list[str]:
    """Tell what a download brings: its licence, the room for it, how it will run here and how fast."""
    before = before_download(choice, user)
    lines = field("licence", before.licence, width)
    if before.disk:
        lines += field("disk", before.disk, width)
    best = found.best
    if best is None:
        return lines
    lines += field("here", f"{plan_text.machine_line(best.plan.machine)}: {best.plan.reason}", width)
    speed = plan_text.speed_lines(best.prediction, width)
    return [*lines, *speed[1:]]


def _show_plan(console: Console, download: Download, dry_run: bool) -> None:
    """Show what will be fetched, the room for it, and whether it will run; data when that is all that was asked."""
    plan = download.plan
    write = console.data if dry_run else console.note
    width = console.columns if dry_run else console.note_columns
    rows = [*map(_package_row, download.packages), *map(_plan_row, plan.repos)]
    for line in table(COLUMNS, rows, width):
        write(line)
    for each in download.packages:
        write(f"{amount(each.to_fetch)} to fetch with pip into {each.folder}, {amount(each.free)} free")
    if plan.repos:
        write(f"{amount(plan.to_fetch)} to fetch into {plan.where}, {amount(plan.free)} free")
    for name in download.verdicts:
        write(f"memory: {_verdict(name, download)}")
    for item in plan.repos:
        if item.gated and not item.ready:
            write(f"{item.repo} is gated: its owner gives access to those who accepted the terms")


def _verdict(name: str, download: Download) -> str:
    where, word = download.where, download.verdicts[name]
    here = f"{where.name} with {amount(where.free)} {where.room}"
    if word == "server":
        return f"{name} runs on a server only"
    if word == "unknown":
        return f"whether {name} fits is not known before its config.json is here; {here}"
    if word == "target alone":
        return f"{name} fits on {here} without its drafter only"
    return f"{name} {word} on {here}" if word.startswith("fits") else f"{name} {word}, more than {here}"


def _plan_row(item: RepoPlan) -> tuple[str, ...]:
    here = item.total - item.to_fetch
    files = str(len(item.files)) if item.files else "all"
    known = "verified" if item.ready else amount(here) if here else "-"
    left = amount(item.to_fetch) if item.to_fetch else "-"
    return item.repo, files, amount(item.total), known, left, item.commit[:12]


def _package_row(item: PackagePlan) -> tuple[str, ...]:
    size = amount(item.package.wheel_bytes)
    return item.package.label, "1", size, "verified" if item.ready else "-", "-" if item.ready else size, "-"


def _agree(console: Console, download: Download) -> None:
    """Ask about what will not run here once it is downloaded, or too slowly."""
    odd = [_verdict(name, download) for name, word in download.verdicts.items() if not word.startswith(FINE)]
    if odd and not console.can_ask:
        raise DoesNotFitError("; ".join(odd), "--force downloads it all the same")
    what = "; ".join([*odd, *download.slow])
    if what and console.can_ask and not console.ask(f"{what}. Download it all the same?", default=False):
        raise Interrupted("nothing was downloaded")
