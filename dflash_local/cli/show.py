"""``dflash show``: all that is known of one pair, what is here of it, and whether it fits a machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer

from dflash_local.app import fitting
from dflash_local.app.models import InstallStatus, download_gib, install_status, model_store, server_commands
from dflash_local.app.resolve import choose
from dflash_local.cli import options as opt
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.load_options import add_command
from dflash_local.errors import UnknownModelError
from dflash_local.load_config import LoadConfig
from dflash_local.ui.pair_text import pair_page, terms


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, "show", show, planning=True)


def show(
    model: opt.Model,
    gpu_memory: opt.GpuMemory = None,
    gpu: opt.Gpu = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
    *,
    load: LoadConfig,
) -> None:
    """Show a pair: its drafter, sizes, licences, published figures, and the memory it takes."""
    call = Invocation.begin()
    user, console = call.user, call.console
    choice = choose(model, None, user)
    if choice.row is None:
        raise UnknownModelError(f"{model!r} is a folder, not a pair of the registry", f"dflash plan {model}")
    row = choice.row
    store = model_store(user)
    item = install_status(row, store)
    if load == user.load_config:
        load = LoadConfig()  # settings for running pairs must not keep one that they do not suit from being shown
    where = fitting.machine(user, gpu, gpu_memory, load.device)
    plans = fitting.pair_plans(fitting.row_shapes(row, user, store), where, row, load, store)
    if as_json:
        console.json(report(item, plans))
        return
    for line in pair_page(item, plans, store, console.columns):
        console.data(line)


def report(item: InstallStatus, plans: fitting.PairPlans) -> dict[str, Any]:
    """Everything, for ``--json``."""
    row = item.row
    return {
        **asdict(row),
        "download_gib": download_gib(row),
        "terms": list(terms(row)),
        "server_commands": server_commands(row),
        "local": {
            "state": item.state,
            "bytes": item.size,
            "missing": list(item.missing),
            "verified": item.verified,
            "target_commit": item.target.commit if item.target else None,
            "drafter_commit": item.drafter.commit if item.drafter else None,
        },
        "machine": plans.where.as_dict(),
        "plan": None if plans.plan is None else fitting.as_json(plans.plan),
        "fits": [fitting.as_json(plan) for plan in plans.table],
        "variant_plans": [one.as_dict() for one in plans.variants],
        "per_token_bytes": fitting.per_token(plans.known),
    }
