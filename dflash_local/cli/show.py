"""``dflash show``: everything that is known of a pair of the registry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflash_local.app import fitting
from dflash_local.app.models import InstallStatus, download_gib, install_status, model_store, server_commands
from dflash_local.app.recommending import PairPlans, pair_plans
from dflash_local.app.resolve import choose
from dflash_local.cli import options as opt
from dflash_local.cli.console import Console
from dflash_local.cli.invocation import Invocation
from dflash_local.errors import CheckpointError, SettingsError, UnknownModelError
from dflash_local.load_config import LoadConfig
from dflash_local.ui import pair_text

if TYPE_CHECKING:
    from dflash_local.catalog.row import Row
    from dflash_local.settings import Settings

EXAMPLES = ("dflash show Qwen/Qwen3.5-9B", "dflash show Qwen/Qwen3.5-9B --gpu-memory 24 --details")


def show(
    model: opt.Model,
    gpu_memory: opt.GpuMemory = None,
    gpu: opt.Gpu = None,
    nodes: opt.Nodes = None,
    details: opt.Details = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
    *,
    load: LoadConfig,
) -> None:
    """Show a pair: how it runs here, its parts and licences. More with --details: memory and published figures."""
    call = Invocation.begin()
    user, console = call.user, call.console
    choice = choose(model, None, user)
    if choice.row is None:
        raise UnknownModelError(f"{model!r} is a folder, not a pair of the registry", f"dflash plan {model}")
    row = choice.row
    if nodes is not None:
        _show_nodes(console, row, nodes, as_json)
        return
    store = model_store(user)
    item = install_status(row, store)
    device = None if load.device == user.load_config.device else load.device
    if load == user.load_config:
        load = LoadConfig()  # settings for running pairs must not keep one that they do not suit from being shown
    where = fitting.machine(user, gpu, gpu_memory, device)
    own = fitting.row_choice(row, user)
    plans = pair_plans(own, fitting.shapes(own, store), where, user, load, store=store)
    lines = [*pair_text.pair_page(item, plans, store, console.columns, details), *_adapted(model, user)]
    console.result(_show_report(item, plans), lines, as_json)


def _adapted(model: str, user: Settings) -> list[str]:
    """Tell what the pair's drafter has learnt on this machine."""
    from dflash_local.app.removal import adaptations_here
    from dflash_local.store.adaptations import read

    lines = []
    for path in adaptations_here([model], user):
        if path.is_dir():
            lines.append(f"dflash adapt {model} was not finished: the same command goes on")
            continue
        try:
            found = read(path)
        except CheckpointError as error:
            lines.append(f"{error.message}: its drafter is taken as it was published ({error.hint})")
            continue
        if found is not None:
            lines.append(
                f"its drafter has learnt your text ({found.label}): {found.gain:.2f} times the tokens a cycle, "
                f"held-out; dflash rm {model} --adaptation takes it away"
            )
    return lines


def _show_nodes(console: Console, row: Row, nodes: int, as_json: bool) -> None:
    """Show how a server of several machines is started, and reached."""
    from dflash_local.app.server_command import node_commands

    commands = node_commands(row, nodes)
    if not commands:
        raise SettingsError(f"no command is known that serves {row.name}", f"dflash show {row.name} tells the rest")
    lines = pair_text.nodes(row, nodes, commands, console.columns)
    console.result({"model": row.name, "nodes": nodes, "server_commands": commands}, lines, as_json)


def _show_report(item: InstallStatus, plans: PairPlans) -> dict[str, Any]:
    import msgspec  # not for ``dflash --help``

    row = item.row
    return {
        **msgspec.to_builtins(row),
        "why_not_here": row.why_not_here,
        "summary": plans.summary.as_dict(),
        "download_gib": download_gib(row),
        "terms": list(pair_text.terms(row)),
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
