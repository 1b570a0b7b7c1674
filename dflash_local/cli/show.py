"""``dflash show``: all that is known of one pair, what is here of it, and whether it fits a machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

from dflash_local import settings
from dflash_local.cli import fit, pair_text
from dflash_local.cli import options as opt
from dflash_local.cli.console import Console
from dflash_local.cli.load_options import add_command
from dflash_local.cli.pair_text import spaced
from dflash_local.cli.places import Places, Standing, places_or_none, standing
from dflash_local.cli.tables import amount, field, indented, wrapped
from dflash_local.errors import UnknownModelError
from dflash_local.load_config import LoadConfig

if TYPE_CHECKING:
    from dflash_local.catalog.row import Row
    from dflash_local.cli.fit import Shapes
    from dflash_local.planner.machine import Machine
    from dflash_local.planner.plan import Plan


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, "show", show, planning=True)


@dataclass(frozen=True, slots=True)
class Memory:
    """What the planner says of a pair on a machine."""

    where: Machine
    known: Shapes | None
    plan: Plan | None
    table: tuple[Plan, ...]
    variants: tuple[fit.VariantPlan, ...] = ()


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
    from dflash_local.cli.resolve import choose, of_row

    user = settings.load()
    console = Console(user.environ)
    choice = choose(model, None, user)
    if choice.row is None:
        raise UnknownModelError(f"{model!r} is a folder, not a pair of the registry", f"dflash plan {model}")
    row = choice.row
    places = places_or_none(user)
    item = standing(row, places)
    if load == user.load_config:
        load = LoadConfig()  # settings for running pairs must not keep one that they do not suit from being shown
    where = fit.machine(user, gpu, gpu_memory, load.device)
    memory = memory_of(fit.shapes(choice if row.bundled else of_row(row), places), where, row, load, places)
    if as_json:
        console.json(report(item, memory))
        return
    for line in lines(item, memory, places, console.columns):
        console.data(line)


def memory_of(
    known: Shapes | None, where: Machine, row: Row, load: LoadConfig | None = None, places: Places | None = None
) -> Memory:
    """Ask the planner for the plan of a load and for every format."""
    if known is None:
        return Memory(where, None, None, ())
    from dflash_local.planner.plan import fits_table, plan

    found = plan(known.target, known.drafter, where, load, runs_on=row.runs_on)
    local = row.runs_on == "local" and row.kind == "dflash"
    if not local:
        return Memory(where, known, found, ())
    table = fits_table(known.target, known.drafter, where, load)
    return Memory(where, known, found, table, fit.variant_plans(row, known, where, load, places))


def lines(item: Standing, memory: Memory, places: Places | None, width: int) -> list[str]:
    """The whole page."""
    row = item.row
    told = ", ".join([row.family] * bool(row.family) + [row.kind, row.status])
    return spaced(
        [
            [f"{row.name}  ({told})"],
            [*pair_text.facts(row, width), *_here(item, places, width)],
            pair_text.generations(row, width),
            pair_text.variants(row, width),
            _memory(memory, width),
            pair_text.published(row, width),
            pair_text.server(row, width),
        ]
    )


def _here(item: Standing, places: Places | None, width: int) -> list[str]:
    """What is on this disk, and the next command."""
    row = item.row
    if row.bundled:
        return field("here", f"yes; dflash run {row.name}, dflash demo {row.name}", width)
    if row.drafter is None:
        return field("here", "no: there is nothing to download yet", width)
    if item.state == "absent":
        return field("here", f"no; dflash pull {row.name}", width)
    where = f"{amount(item.size)} in {places.cache.folder}" if places else amount(item.size)
    if item.state == "partial":
        parts = (("target", item.target), ("drafter", item.drafter))
        lacking = [name for name, part in parts if part is None or not part.complete]
        return field("here", f"in part, {where}; lacking: {', '.join(lacking)}; dflash pull {row.name}", width)
    told = "verified" if item.verified else f"complete but not verified; dflash pull {row.name} checks it"
    return field("here", f"{told}, {where}; dflash chat {row.name}", width)


def _memory(memory: Memory, width: int) -> list[str]:
    """The ledger of the plan and the table of formats."""
    found, known = memory.plan, memory.known
    if known is None or found is None:
        return ["memory", "  unknown: no source tells the target's shape"]
    page = ["memory on a server, as published"]
    if found.runs_on == "local":
        context = f"context {found.context:,}" if found.context else "context unknown"
        page = wrapped(f"memory on {fit.machine_line(memory.where)}", width)
        drafting = f"block {found.block_size or 'unknown'}"
        page.append(f"  {found.format}, {context}, {drafting}: {'fits' if found.fits else 'does not fit'}")
    inside = fit.ledger_lines(found, width - 2)
    inside += wrapped(fit.per_token_text(known), width - 2)
    if memory.table:
        inside += ["", "what fits", *fit.fit_lines(known, memory.table, width - 2)]
    if memory.variants:
        inside += ["", "pre-quantised", *fit.variant_lines(memory.variants, width - 2)]
    remarks = fit.remarks(known, width - 2)
    return [*page, *indented([*inside, *([""] if remarks else []), *remarks])]


def report(item: Standing, memory: Memory) -> dict[str, Any]:
    """Everything, for ``--json``."""
    row = item.row
    return {
        **asdict(row),
        "download_gib": pair_text.in_all(row),
        "terms": list(pair_text.terms(row)),
        "server_commands": pair_text.server_commands(row),
        "local": {
            "state": item.state,
            "bytes": item.size,
            "missing": list(item.missing),
            "verified": item.verified,
            "target_commit": item.target.commit if item.target else None,
            "drafter_commit": item.drafter.commit if item.drafter else None,
        },
        "machine": memory.where.as_dict(),
        "plan": None if memory.plan is None else fit.as_json(memory.plan),
        "fits": [fit.as_json(plan) for plan in memory.table],
        "variant_plans": [one.as_dict() for one in memory.variants],
        "per_token_bytes": fit.per_token(memory.known),
    }
