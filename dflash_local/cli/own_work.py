"""``dflash plan --from FOLDER``: what somebody's own turns are, and how long they would take here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_local.app.fitting import known_shapes
from dflash_local.app.models import model_store
from dflash_local.app.resolve import choose, refuse_what_does_not_run
from dflash_local.cli.invocation import Invocation
from dflash_local.errors import UsageError
from dflash_local.events import Notice
from dflash_local.load_config import LoadConfig

if TYPE_CHECKING:
    from dflash_local.planner.machine import Machine
    from dflash_local.planner.recommend import Preference


class OwnWorkPlan(NamedTuple):
    """Holds the plan as JSON and as lines; ``refusal`` says that nothing fits, and is empty where something does."""

    report: dict[str, Any]
    lines: list[str]
    refusal: str


def plan_own_work(
    call: Invocation,
    folder: Path,
    model: str | None,
    drafter: str | None,
    find_machine: Callable[[], Machine],
    load: LoadConfig,
    preference: Preference,
) -> OwnWorkPlan:
    """Read the transcripts of a folder and plan for them; the text stays where it is.

    Args:
        model: the one pair to plan for; None: the best ones for the machine. find_machine: may measure it, so that a
            folder without a turn is told before.

    Raises:
        UsageError: there is no such folder, or no turn in it. SettingsError: nothing is known of the pair.
        DoesNotFitError: it runs on a server only.
    """
    from dflash_local.app.own_pairs import own_pairs
    from dflash_local.app.own_work import read_work
    from dflash_local.app.work_tokens import work_tokens
    from dflash_local.transcripts.read import FORMATS, ReadReport
    from dflash_local.ui import work_text

    user, console, report = call.user, call.console, ReadReport()
    choice = None if model is None else choose(model, drafter, user)
    if choice is not None:
        choice.announce(console.notify)
        refuse_what_does_not_run(choice)
        known_shapes(choice, model_store(user))
    with work_tokens(model, user) as (encode, counted), console.progress() as progress:
        work = read_work(folder, encode, report, progress)
    left_out = [*report.problems, *([f"{report.untold:,} more files are left out"] if report.untold else [])]
    for line in left_out:
        console.notify(Notice(line, "warning"))
    if not work.turns:
        known = ", ".join(each.client for each in FORMATS)
        raise UsageError(f"--from {folder}: no turn of a model in {report.read:,} transcripts", f"known are {known}")
    where = find_machine()
    pairs = own_pairs(work, choice, where, user, load, preference)
    found = {
        "work": {**work.as_dict(), "tokens": counted},
        "lacking": work_text.LACKING,
        "files": {"read": report.read, "unknown": report.unknown, "left_out": left_out},
        "machine": where.as_dict(),
        "pairs": [pair.as_dict() for pair in pairs],
    }
    context = load.context or work.context
    width = console.columns if pairs else console.note_columns
    lines = work_text.work_lines(work, counted, width)
    if not pairs:
        what = "no pair fits" if choice is None else f"{choice.name} does not fit"
        return OwnWorkPlan(found, lines, f"{what} here with the {context:,} tokens of context that these turns take")
    return OwnWorkPlan(found, [*lines, "", *work_text.pair_lines(pairs, where, context, width)], "")
