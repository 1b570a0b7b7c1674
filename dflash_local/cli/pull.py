"""``dflash pull``: says what would be fetched and whether it fits, fetches it, and says what was proven."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_local.app.models import model_store
from dflash_local.app.recommending import suited
from dflash_local.app.resolve import Choice, choose, drafter_option, of_variant, refuse_announced, wanted
from dflash_local.cli import options as opt
from dflash_local.cli.console import Console
from dflash_local.cli.fetch import fetch
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.load_options import VARIANT_HELP
from dflash_local.errors import UsageError
from dflash_local.load_config import LOAD_OPTIONS
from dflash_local.tables import amount, in_gib, listing

if TYPE_CHECKING:
    from dflash_local.app.download import Download
    from dflash_local.store.local import Local
    from dflash_local.store.package import PackagePlan
    from dflash_local.store.pull import RepoPlan

AllowMismatch = Annotated[
    bool, typer.Option(LOAD_OPTIONS["allow_mismatch"].flag, help=LOAD_OPTIONS["allow_mismatch"].help)
]


Xet = Annotated[
    bool,
    typer.Option(
        "--xet",
        help="Weights over Hugging Face's Xet client, which makes its own connections: no list of trusted hosts, no "
        "going on in the middle of a file. Every byte is verified all the same.",
    ),
]

EXAMPLES = ("dflash pull smollm2", "dflash pull Qwen/Qwen3.5-9B --variant autoround-int4 --dry-run")


def pull(
    models: opt.Models,
    drafter: opt.Drafter = None,
    variant: Annotated[str | None, opt.named("--variant", "NAME", VARIANT_HELP)] = None,
    update: Annotated[bool, typer.Option("--update", help="Take the newest commit, not the one on record.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Own weights, also where they do not fit the memory here.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be fetched.")] = False,
    yes: opt.Yes = False,
    allow_mismatch: AllowMismatch = False,
    xet: Xet = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Download pairs and verify every byte. They go into the shared Hugging Face cache."""
    call = Invocation.begin()
    user, console = call.user, call.console
    if drafter is not None and len(models) > 1:
        raise UsageError("--drafter belongs to one MODEL", "pull them one by one")
    if variant is not None:
        models = [of_variant(model, variant, user) for model in models]
    choices = [choose(model, drafter, user) for model in dict.fromkeys(models)]
    for choice in choices:
        refuse_announced(choice)
        choice.announce(console.notify)
    if not force and (store := model_store(user)) is not None:
        suit = suited(user.load_config, user, console.notify)
        with suppress(UsageError):  # settings that do not suit this machine or one of them, which a load says
            choices = [suit(choice, store) for choice in choices]
    with_repos = [choice for choice in choices if choice.roles]
    if not as_json:
        for choice in choices:
            if choice not in with_repos:
                console.data(
                    f"{choice.name} {'comes with the package' if choice.row else 'is a folder'}: nothing to pull"
                )
    needs = tuple(dict.fromkeys(want for choice in with_repos for want in wanted(choice)))
    done = None
    if with_repos:
        sure = force or yes
        flags = {"dry_run": dry_run, "allow_mismatch": allow_mismatch, "xet": xet, "quiet": as_json}
        done = fetch(needs, with_repos, user, console, update=update, force=sure, **flags)
    if as_json:
        console.json(_report(done, dry_run))
    elif done is not None and not dry_run:
        _conclude(console, *done, with_repos)


def _conclude(console: Console, download: Download, found: Sequence[Local], choices: Sequence[Choice]) -> None:
    """Tell what is proven now, and what can be done with it."""
    ready = {item.repo for item in download.plan.repos if item.ready}
    ready |= {each.package.label for each in download.packages if each.ready}
    for item in found:
        before = "was here and verified" if item.repo in ready else "verified"
        state = before if item.verified else "here, but not recorded as verified"
        commit = f", commit {item.commit[:12]}" if item.commit else ""
        console.data(f"{item.repo}: {amount(item.size)} {state}{commit}")
    local = [choice for choice in choices if download.verdicts[choice.name] != "server"]
    if local:
        console.data(f"next: {' or '.join(f'dflash chat {choice.name}{drafter_option(choice)}' for choice in local)}")
    served = [choice.name for choice in choices if choice not in local]
    if served:
        console.data(f"{listing(served)} needs a server: dflash plan {served[0]} says how to start one")


def _report(done: tuple[Download, tuple[Local, ...]] | None, dry_run: bool) -> dict[str, Any]:
    if done is None:
        return {"dry_run": dry_run, "repos": [], "packages": [], "fits": {}, "to_fetch": 0, "free": None, "cache": None}
    download, locals_ = done
    plan, found = download.plan, {item.repo: item for item in locals_}
    return {
        "dry_run": dry_run,
        "cache": str(plan.where),
        "free": plan.free,
        "to_fetch": download.to_fetch,
        "to_fetch_gib": in_gib(download.to_fetch),
        "fits": download.verdicts,
        "machine": download.where.as_dict(),
        "repos": [_repo_report(item, found.get(item.repo)) for item in plan.repos],
        "packages": [_package_report(item, found.get(item.package.label)) for item in download.packages],
    }


def _package_report(item: PackagePlan, found: Local | None) -> dict[str, Any]:
    return {
        "package": item.package.name,
        "version": item.package.version,
        "bytes": item.package.wheel_bytes,
        "to_fetch": item.to_fetch,
        "was_ready": item.ready,
        "verified": None if found is None else found.verified,
        "file": None if found is None else str(found.folder),
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
