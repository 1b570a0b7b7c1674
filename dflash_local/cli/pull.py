"""``dflash pull``: says what would be fetched and whether it fits, fetches it, and says what was proven."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_local import settings
from dflash_local.cli import fit
from dflash_local.cli import options as opt
from dflash_local.cli.console import Console
from dflash_local.cli.load_options import VARIANT_HELP
from dflash_local.cli.places import Places
from dflash_local.cli.progress import PullScreen
from dflash_local.cli.reply import first_interrupt
from dflash_local.cli.resolve import Choice, choose, drafter_option, of_variant, wanted
from dflash_local.cli.tables import Column, amount, in_gib, listing, table
from dflash_local.errors import DoesNotFitError, DownloadError, Interrupted, UsageError
from dflash_local.events import Notice, PullProgress
from dflash_local.load_config import LOAD_OPTIONS

if TYPE_CHECKING:
    from dflash_local.planner.machine import Machine
    from dflash_local.store.local import Local
    from dflash_local.store.pull import PullPlan, RepoPlan, Wanted

COLUMNS = (
    Column("REPOSITORY", shrinks=True),
    Column("FILES", right=True),
    Column("SIZE", right=True),
    Column("HERE", right=True),
    Column("TO FETCH", right=True),
    Column("COMMIT"),
)
FINE = ("fits", "unknown")  # verdicts that need no question


@dataclass(frozen=True, slots=True)
class PullOptions:
    """How a pull is to be done.

    Attributes:
        update: ask what the revision means today. force: also what fits no memory here.
        yes: ask nothing. dry_run: only say what would be done.
    """

    update: bool = False
    force: bool = False
    yes: bool = False
    dry_run: bool = False
    allow_mismatch: bool = False


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull came to; ``found`` is empty for a dry run."""

    plan: PullPlan
    verdicts: dict[str, str]
    where: Machine
    found: tuple[Local, ...]


@dataclass(frozen=True, slots=True)
class Watch:
    """Who follows a pull and may break it off, where that is not the terminal. Called on the pull's threads."""

    on_event: Callable[[PullProgress | Notice], None]
    cancelled: Callable[[], bool]


AllowMismatch = Annotated[
    bool, typer.Option(LOAD_OPTIONS["allow_mismatch"].flag, help=LOAD_OPTIONS["allow_mismatch"].help)
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("pull")(pull)


def pull(
    models: opt.Models,
    drafter: opt.Drafter = None,
    variant: Annotated[str | None, typer.Option("--variant", metavar="NAME", help=VARIANT_HELP)] = None,
    update: Annotated[bool, typer.Option("--update", help="Take the newest commit, not the one on record.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also what does not fit the memory here.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be fetched.")] = False,
    yes: opt.Yes = False,
    allow_mismatch: AllowMismatch = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Download pairs into the shared Hugging Face cache and verify every byte."""
    user = settings.load()
    console = Console(user.environ)
    if drafter is not None and len(models) > 1:
        raise UsageError("--drafter belongs to one MODEL", "pull them one by one")
    if variant is not None:
        models = [of_variant(model, variant, user) for model in models]
    choices = [choose(model, drafter, user) for model in dict.fromkeys(models)]
    for choice in choices:
        _refuse_announced(choice)
    with_repos = [choice for choice in choices if choice.repos]
    if not as_json:
        for choice in choices:
            if choice not in with_repos:
                console.data(
                    f"{choice.name} {'comes with the package' if choice.row else 'is a folder'}: nothing to pull"
                )
    needs = tuple(dict.fromkeys(want for choice in with_repos for want in wanted(choice)))
    options = PullOptions(update, force, yes, dry_run, allow_mismatch)
    done = fetch(needs, with_repos, user, console, options, quiet=as_json) if needs else None
    if as_json:
        console.json(_report(done, dry_run))
    elif done is not None and not dry_run:
        _conclude(console, done, with_repos)


def fetch(
    needs: Sequence[Wanted],
    choices: Sequence[Choice],
    user: settings.Settings,
    console: Console,
    options: PullOptions = PullOptions(),
    quiet: bool = False,
    watch: Watch | None = None,
) -> Pulled:
    """Fetch and verify repositories, showing first what that takes.

    Args:
        choices: what they are for; tells whether it will fit into memory. quiet: no plan is shown.
        watch: follows it in the terminal's place; Ctrl-C is its business then.

    Raises:
        DoesNotFitError: the disk has no room, or the memory has none and nobody wanted it all the same.
        Interrupted: the user broke it off. DownloadError and others: see ``store.pull.pull``.
    """
    from dflash_local.store import pull as store
    from dflash_local.store.hub import Hub

    settings.quiet_libraries()
    places, hub = Places.of(user), Hub.of(user)
    plan = store.prepare(needs, hub, places.cache, places.manifests, update=options.update)
    where = fit.machine(user, None, None)
    verdicts = {choice.name: _verdict(choice, places, where) for choice in choices}
    if not plan.ready and not quiet:
        _show_plan(console, plan, verdicts, where, options.dry_run)
    if options.dry_run:
        return Pulled(plan, verdicts, where, ())
    plan.check_disk()
    if not plan.ready and not options.force and not options.yes:
        _agree(console, verdicts, where)
    run = partial(
        store.pull, plan, hub, places.cache, places.manifests, places.locks, allow_mismatch=options.allow_mismatch
    )
    if watch is not None:
        return Pulled(plan, verdicts, where, run(on_event=watch.on_event, cancelled=watch.cancelled))
    stop = threading.Event()
    screen = PullScreen(console, {item.repo: item.total for item in plan.repos if not item.ready}, {})
    try:
        with first_interrupt(stop.set):
            found = run(on_event=screen, cancelled=stop.is_set)
    finally:
        screen.finish()
    return Pulled(plan, verdicts, where, found)


def _refuse_announced(choice: Choice) -> None:
    if choice.row is not None and not choice.row.bundled and choice.drafter is None:
        raise DownloadError(
            f"{choice.name} is announced: no drafter is published yet", "dflash models lists what there is"
        )


def _verdict(choice: Choice, places: Places, where: Machine) -> str:
    word, _ = fit.verdict(choice.row, fit.shapes(choice, places), where)
    return word


def _show_plan(console: Console, plan: PullPlan, verdicts: dict[str, str], where: Machine, dry_run: bool) -> None:
    """What will be fetched, the room for it, and whether it will run; data when that is all that was asked."""
    write = console.data if dry_run else console.note
    width = console.columns if dry_run else console.note_columns
    for line in table(COLUMNS, [_plan_row(item) for item in plan.repos], width):
        write(line)
    write(f"{amount(plan.to_fetch)} to fetch into {plan.where}, {amount(plan.free)} free")
    for name, word in verdicts.items():
        write(f"memory: {_said(name, word, where)}")
    for item in plan.repos:
        if item.gated and not item.ready:
            write(f"{item.repo} is gated: its owner gives access to those who accepted the terms")


def _said(name: str, word: str, where: Machine) -> str:
    """A verdict as a sentence."""
    here = f"{where.name} with {amount(where.free)} free"
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
    return (
        item.repo,
        files,
        amount(item.total),
        known,
        amount(item.to_fetch) if item.to_fetch else "-",
        item.commit[:12],
    )


def _agree(console: Console, verdicts: dict[str, str], where: Machine) -> None:
    """Ask about what will not run here once it is downloaded."""
    odd = {name: word for name, word in verdicts.items() if not word.startswith(FINE)}
    if not odd:
        return
    what = "; ".join(_said(name, word, where) for name, word in odd.items())
    if not console.can_ask:
        raise DoesNotFitError(what, "--force downloads it all the same")
    if not console.ask(f"{what}. Download it all the same?", default=False):
        raise Interrupted("nothing was downloaded")


def _conclude(console: Console, done: Pulled, choices: Sequence[Choice]) -> None:
    """What is proven now, and what can be done with it."""
    ready = {item.repo for item in done.plan.repos if item.ready}
    for item in done.found:
        before = "was here and verified" if item.repo in ready else "verified"
        state = before if item.verified else "here, but not recorded as verified"
        console.data(f"{item.repo}: {amount(item.size)} {state}, commit {item.commit[:12]}")
    local = [choice for choice in choices if done.verdicts[choice.name] != "server"]
    if local:
        console.data(f"next: {' or '.join(f'dflash chat {choice.name}{drafter_option(choice)}' for choice in local)}")
    served = [choice.name for choice in choices if choice not in local]
    if served:
        console.data(f"{listing(served)} needs a server: dflash plan {served[0]} says how to start one")


def _report(done: Pulled | None, dry_run: bool) -> dict[str, Any]:
    if done is None:
        return {"dry_run": dry_run, "repos": [], "fits": {}, "to_fetch": 0, "free": None, "cache": None}
    found = {item.repo: item for item in done.found}
    return {
        "dry_run": dry_run,
        "cache": str(done.plan.where),
        "free": done.plan.free,
        "to_fetch": done.plan.to_fetch,
        "to_fetch_gib": in_gib(done.plan.to_fetch),
        "fits": done.verdicts,
        "machine": done.where.as_dict(),
        "repos": [_repo_report(item, found.get(item.repo)) for item in done.plan.repos],
    }


def _repo_report(item: RepoPlan, found: Local | None) -> dict[str, Any]:
    return {
        "repo": item.repo,
        "role": item.wanted.role,
        "commit": item.commit,
        "bytes": item.total,
        "to_fetch": item.to_fetch,
        "files": [file.path for file in item.files],
        "was_ready": item.ready,
        "gated": item.gated,
        "verified": None if found is None else found.verified,
        "folder": None if found is None else str(found.folder),
    }
