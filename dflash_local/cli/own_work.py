"""``dflash plan --from FOLDER``: what somebody's own turns are, and how long they would take here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dflash_local.app.resolve import choose
from dflash_local.cli.invocation import Invocation
from dflash_local.errors import UsageError
from dflash_local.events import Notice
from dflash_local.load_config import LoadConfig

if TYPE_CHECKING:
    from dflash_local.planner.machine import Machine
    from dflash_local.planner.recommend import Preference


def show_own_work(
    call: Invocation,
    folder: Path,
    model: str | None,
    drafter: str | None,
    where: Machine,
    load: LoadConfig,
    preference: Preference,
    as_json: bool,
) -> None:
    """Read the transcripts of a folder and plan for them; the text stays where it is.

    Raises:
        UsageError: there is no such folder, or no turn in it.
    """
    from dflash_local.app.own_pairs import own_pairs
    from dflash_local.app.own_work import read_work
    from dflash_local.app.work_tokens import work_tokens
    from dflash_local.transcripts.read import FORMATS, Report
    from dflash_local.ui import work_text

    user, console, report = call.user, call.console, Report()
    choice = None if model is None else choose(model, drafter, user)
    with work_tokens(model, user) as (encode, counted), console.progress() as progress:
        work = read_work(folder, encode, report, progress)
    left_out = [*report.problems, *([f"{report.untold:,} more files are left out"] if report.untold else [])]
    for line in left_out:
        console.notify(Notice(line, "warning"))
    if not work.turns:
        known = ", ".join(each.client for each in FORMATS)
        raise UsageError(f"--from {folder}: no turn of a model in {report.read:,} transcripts", f"known are {known}")
    pairs = own_pairs(work, choice, where, user, load, preference)
    found = {
        "work": {**work.as_dict(), "tokens": counted},
        "lacking": work_text.LACKING,
        "files": {"read": report.read, "unknown": report.unknown, "left_out": left_out},
        "machine": where.as_dict(),
        "pairs": [pair.as_dict() for pair in pairs],
    }
    width = console.columns
    lines = work_text.work_lines(work, counted, width)
    lines += ["", *work_text.pair_lines(pairs, where, load.context or work.context, width)]
    console.result(found, lines, as_json)
