"""``dflash plan``: what a pair takes, and whether it fits a machine."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import typer

from dflash_local.app import fitting
from dflash_local.app.models import model_store, server_commands
from dflash_local.app.notices import Notify
from dflash_local.app.planned_engine import planned_engine
from dflash_local.app.recommending import PairPlans, pair_plans
from dflash_local.app.resolve import Choice, choose, drafter_option
from dflash_local.app.several_gpus import SeveralGpus, several_gpus
from dflash_local.cli import options as opt
from dflash_local.cli.console import Console
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.own_work import OwnWorkPlan, plan_own_work
from dflash_local.errors import CODES, DoesNotFitError, UsageError
from dflash_local.load_config import BALANCED, LoadConfig
from dflash_local.tables import wrapped
from dflash_local.ui import pair_text, plan_text

if TYPE_CHECKING:
    from dflash_local.planner.machine import Machine


class PlanDoesNotFit(DoesNotFitError):
    """Says that it does not fit; under ``--json`` the error carries the plan and the nearest one that does."""

    def __init__(self, message: str, hint: str, report: dict[str, Any]) -> None:
        super().__init__(message, hint)
        self.report = report

    @property
    def kind(self) -> str:
        return DoesNotFitError.__name__

    def as_dict(self) -> dict[str, object]:
        return {**super().as_dict(), **self.report}


EXAMPLES = ("dflash plan Qwen/Qwen3.5-9B --gpu-memory 24", "dflash plan --from ~/.claude --gpu 'RTX 4090'")


def plan(
    model: opt.ModelOrNone = None,
    drafter: opt.Drafter = None,
    from_folder: opt.FromFolder = None,
    gpu_memory: opt.GpuMemory = None,
    gpu: opt.SeveralGpu = None,
    gpus: opt.Gpus = 1,
    prefer: opt.Prefer = opt.PreferenceChoice.balanced,
    mode: opt.Mode = opt.ModeChoice.dflash,
    details: opt.Details = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
    *,
    load: LoadConfig,
) -> None:
    """Say whether a pair fits this machine or another, and how fast. Exit 5 when it does not fit.

    With --from, what your own turns are and how long they would take, with the best pairs or with MODEL.
    """
    call = Invocation.begin()
    user, console = call.user, call.console
    first, others = (gpu[0], gpu[1:]) if gpu else (None, [])
    named = gpu or gpu_memory is not None  # while a device is one of this machine
    if named and (load.device != BALANCED or gpus + len(others) == 1):
        load = replace(load, device="auto")

    def machine_for(notify: Notify | None) -> Machine:
        return fitting.machine(user, first, gpu_memory, load.device, count=gpus, notify=notify, others=others)

    if from_folder is not None:

        def find_machine() -> Machine:
            return machine_for(console.notify)

        own = plan_own_work(call, from_folder, model, drafter, find_machine, opt.drafting(load, mode), prefer.value)
        _show_own_work(console, own, as_json)
        return
    if model is None:
        raise UsageError("Missing argument 'MODEL'", "see dflash plan --help")
    choice = choose(model, drafter, user)
    choice.announce(console.notify)
    store = model_store(user)
    known = fitting.shapes(choice, store)
    toy = choice.row is not None and choice.row.bundled  # whose speed no memory decides
    predicted = known is not None and not toy and not choice.why_not_here
    notify = console.notify if predicted else None
    where = machine_for(notify)
    if choice.why_not_here:
        _show_server(console, choice, pair_plans(choice, known, where, user), as_json, details)
        return
    if known is None:
        page = _page(choice, pair_plans(choice, None, where, user), details, console.note_columns)
        for line in [] if as_json else page:
            console.note(line)
        raise fitting.unknown_shape(choice)
    draft = mode is opt.ModeChoice.dflash and known.drafter is not None
    config = replace(load, draft=draft)
    found = pair_plans(choice, known, where, user, config, preference=prefer.value, store=store)
    _show_plan(console, choice, found, several_gpus(choice, known, where, user, config, store), as_json, details)


def _show_own_work(console: Console, found: OwnWorkPlan, as_json: bool) -> None:
    if not found.refusal:
        console.result(found.report, found.lines, as_json)
        return
    for line in [] if as_json else found.lines:
        console.note(line)
    raise PlanDoesNotFit(found.refusal, "--context N plans for shorter turns", found.report)


def _show_server(console: Console, choice: Choice, plans: PairPlans, as_json: bool, details: bool) -> None:
    """Show a command as the answer: what a server needs, and how it is started."""
    row = choice.row
    commands = server_commands(row) if row and choice.own_drafter else {}
    if as_json:
        tensor_parallel = row.server.tensor_parallel if row and row.server else None
        console.json(
            {
                "model": choice.name,
                "runs_on": "server",
                "fits": None,
                "reason": choice.why_not_here,
                "summary": plans.summary.as_dict(),
                "plan": None if plans.plan is None else fitting.as_json(plans.plan),
                "server_commands": commands,
                "tensor_parallel": tensor_parallel,
            }
        )
        return
    known_command = pair_text.server(row, console.columns) if row and commands else []
    console.lines([*_page(choice, plans, details, console.columns), ""])
    console.lines(known_command or ["  the command for a server is unknown"])


def _page(choice: Choice, plans: PairPlans, details: bool, width: int) -> list[str]:
    """Write the verdict, how to begin, and the details where they are asked for."""
    from dflash_local.ui.verdict_text import verdict_lines

    page = verdict_lines(choice.described, plans, width, choice.why_not_here)
    name, best = f"{choice.name}{drafter_option(choice)}", plans.summary.best
    if best is not None:
        variant = () if best.weights.variant is None else ("--variant", best.weights.variant.name)
        words = ("dflash chat", name, *variant, *best.config.arguments())
        if best.plan.crowded and plans.summary.slow:  # else the verdict has it
            page += ["", *wrapped(f"{name} {best.plan.crowded}", width)]
        page += ["", *wrapped(f"start it with: {' '.join(words)}", width)]
        chosen = planned_engine(choice, best.plan)
        if chosen.llama_cpp or not details:  # which name the engine, too
            page += wrapped(chosen.line, width)
    more = plan_text.detail_lines(name, plans, width, details)
    return [*page, *([""] if details else []), *more]


def _show_plan(
    console: Console, choice: Choice, plans: PairPlans, several: SeveralGpus | None, as_json: bool, details: bool
) -> None:
    found, known, recommendation = plans.plan, plans.known, plans.summary.recommendation
    more = plans.more_context if as_json else None
    assert found is not None and known is not None and recommendation is not None  # it runs here, its shape is known
    report = {
        "model": choice.name,
        "runs_on": "local",
        "summary": plans.summary.as_dict(),
        "to_fetch_gib": plans.to_fetch[0],
        "fits": found.fits,
        "plan": fitting.as_json(found),
        "nearest": None if plans.nearest is None else fitting.as_json(plans.nearest),
        "table": [fitting.as_json(one) for one in plans.table],
        "variants": [one.as_dict() for one in plans.variants],
        "recommended": recommendation.as_dict(),
        "more_context": None if more is None else asdict(more),
        "engine": planned_engine(choice, found)._asdict(),
        "several_gpus": None if several is None else several.as_dict(),
        "inferred": fitting.inferred(known),
    }
    if as_json and not found.fits:
        refusal = fitting.refusal_of(found, plans.nearest)
        raise PlanDoesNotFit(refusal.message, refusal.hint, report)
    if as_json:
        console.json(report)
        return
    write, width = (console.data, console.columns) if found.fits else (console.note, console.note_columns)
    for line in [
        *_page(choice, plans, details, width),
        *([] if several is None else ["", *wrapped(several.line, width)]),
    ]:
        write(line)
    if not found.fits:  # which the verdict has said
        raise typer.Exit(CODES[DoesNotFitError].exit_code)
