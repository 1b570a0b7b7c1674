"""``dflash plan``: the memory ledger of a load on one machine, and what would fit instead."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from dflash_local.app import fitting, recommending
from dflash_local.app.fitting import Shapes
from dflash_local.app.models import ModelStore, model_store, server_commands
from dflash_local.app.resolve import Choice, choose
from dflash_local.cli import options as opt
from dflash_local.cli.console import Console
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.load_options import add_command
from dflash_local.errors import DoesNotFitError, SettingsError
from dflash_local.load_config import LoadConfig
from dflash_local.tables import indented, wrapped
from dflash_local.ui import pair_text, plan_text

if TYPE_CHECKING:
    from dflash_local.planner.machine import Machine
    from dflash_local.planner.plan import Plan
    from dflash_local.planner.recommend import Recommendation


class PlanDoesNotFit(DoesNotFitError):
    """It does not fit; under ``--json`` the error carries the plan and the nearest one that does."""

    def __init__(self, message: str, hint: str, report: dict[str, Any]) -> None:
        super().__init__(message, hint)
        self.report = report

    @property
    def kind(self) -> str:
        """The public name of this kind of error."""
        return DoesNotFitError.__name__

    def as_dict(self) -> dict[str, object]:
        """The error, and the plan it is about."""
        return {**super().as_dict(), **self.report}


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, "plan", plan, planning=True)


def plan(
    model: opt.Model,
    drafter: opt.Drafter = None,
    gpu_memory: opt.GpuMemory = None,
    gpu: opt.Gpu = None,
    prefer: opt.Prefer = opt.PreferenceChoice.balanced,
    mode: opt.Mode = opt.ModeChoice.dflash,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
    *,
    load: LoadConfig,
) -> None:
    """Say what a pair takes on this machine or another, and whether it fits; exit 5 when it does not."""
    call = Invocation.begin()
    user, console = call.user, call.console
    choice = choose(model, drafter, user)
    choice.announce(console.notify)
    store = model_store(user)
    known = fitting.shapes(choice, store)
    where = fitting.machine(user, gpu, gpu_memory, load.device)
    if _on_a_server(choice):
        _show_server(console, choice, known, where, as_json)
        return
    if known is None:
        raise SettingsError(f"nothing is known of the shape of {choice.name}", f"dflash pull {choice.name} reads it")
    draft = mode is opt.ModeChoice.dflash and known.drafter is not None
    config = replace(load, draft=draft)
    own = choice.row is not None and choice.row.target == choice.target
    row = choice.row if own else None
    found = recommending.recommended(row, known, where, config, preference=prefer.value, user=user, store=store)
    _show_plan(console, choice, known, where, store, config, found, as_json)


def _on_a_server(choice: Choice) -> bool:
    row = choice.row
    return row is not None and (row.runs_on == "server" or (row.kind != "dflash" and choice.own_drafter))


def _show_server(console: Console, choice: Choice, known: Shapes | None, where: Machine, as_json: bool) -> None:
    """The answer is a command: what a server needs, and how it is started."""
    from dflash_local.planner.plan import plan as ask

    row = choice.row
    found = None if known is None else ask(known.target, known.drafter, where, runs_on="server")
    commands = server_commands(row) if row else {}
    if as_json:
        answer = None if found is None else fitting.as_json(found)
        tensor_parallel = row.server.tensor_parallel if row and row.server else None
        console.json(
            {
                "model": choice.name,
                "runs_on": "server",
                "fits": None,
                "plan": answer,
                "server_commands": commands,
                "tensor_parallel": tensor_parallel,
            }
        )
        return
    for line in [
        f"{choice.name} on a server",
        *(indented(plan_text.ledger_lines(found, console.columns - 2)) if found else []),
    ]:
        console.data(line)
    console.data()
    for line in (
        pair_text.server(row, console.columns) if row and commands else ["  the command for a server is unknown"]
    ):
        console.data(line)


def _show_plan(
    console: Console,
    choice: Choice,
    known: Shapes,
    where: Machine,
    store: ModelStore | None,
    config: LoadConfig,
    recommendation: Recommendation,
    as_json: bool,
) -> None:
    from dflash_local.planner.plan import fits_table, nearest
    from dflash_local.planner.plan import plan as ask

    best = recommendation.best
    found = ask(known.target, known.drafter, where, config) if best is None else best.plan
    near = None if found.fits else nearest(known.target, known.drafter, where, config)
    table = fits_table(known.target, known.drafter if config.draft else None, where, config)
    own = choice.row is not None and choice.row.target == choice.target
    variants = fitting.variant_plans(choice.row, known, where, config, store) if own else ()
    report = {
        "model": choice.name,
        "runs_on": "local",
        "fits": found.fits,
        "plan": fitting.as_json(found),
        "nearest": None if near is None else fitting.as_json(near),
        "table": [fitting.as_json(one) for one in table],
        "variants": [one.as_dict() for one in variants],
        "recommended": recommendation.as_dict(),
        "inferred": fitting.inferred(known),
    }
    if as_json and found.fits:
        console.json(report)
    elif not as_json:
        write = console.data if found.fits else console.note
        width = console.columns if found.fits else console.note_columns
        for line in _page(choice, known, found, recommendation, table, variants, width):
            write(line)
    if not found.fits:
        refusal = fitting.refusal_of(found, near)
        raise PlanDoesNotFit(refusal.message, refusal.hint, report)


def _page(
    choice: Choice,
    known: Shapes,
    found: Plan,
    recommendation: Recommendation,
    table: tuple[Plan, ...],
    variants: tuple[fitting.VariantPlan, ...],
    width: int,
) -> list[str]:
    context = f"context {found.context:,}" if found.context else "context unknown"
    drafting = f"block {found.block_size}" if found.load.draft else "no drafter"
    head = f"{choice.name} in {found.format}, {context}, {drafting}: {'fits' if found.fits else 'does not fit'}"
    page = [*wrapped(head, width), *wrapped(f"on {plan_text.machine_line(found.machine)}", width)]
    page += [*wrapped(plan_text.engine_line(found), width)]
    page += [*plan_text.recommendation_lines(choice.name, recommendation, width), ""]
    page += indented(plan_text.ledger_lines(found, width - 2))
    page += ["", "what fits", *indented(plan_text.fit_lines(known, table, width - 2))]
    if variants:
        page += ["", "pre-quantised", *indented(plan_text.variant_lines(variants, width - 2))]
    remarks = plan_text.remarks(known, width - 2)
    return [*page, *([""] if remarks else []), *indented(remarks)]
