"""``dflash check``: a line of verdict each on target, drafter, format, template and card of a loaded pair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dflash_local import settings
from dflash_local.app.load_planning import planned_peak
from dflash_local.app.loading import load_steps_of, named_when_missing
from dflash_local.catalog.bundled import Pair
from dflash_local.cli import options as opt
from dflash_local.cli.console import Console
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.load_options import add_command
from dflash_local.errors import EngineCheckError, PairCheckError
from dflash_local.load_config import LoadConfig
from dflash_local.store.kept import take_unkept

if TYPE_CHECKING:
    from dflash_local.check.findings import Finding
    from dflash_local.check.record import Report

STYLES = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "dim"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, "check", check)


def check(
    model: opt.Model,
    drafter: opt.Drafter = None,
    mode: opt.Mode = opt.ModeChoice.dflash,
    again: Annotated[bool, typer.Option("--again", help="Check anew what was found good before.")] = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
    *,
    load: LoadConfig,
) -> None:
    """Check a pair on this card; exit 6 when the files or the pair are at fault, 7 when the engine or the card is."""
    call, load = Invocation.begin(), opt.drafting(load, mode)
    console, pair = call.console, call.pair(model, drafter, load)
    report = _report(call, pair, load, again)
    lost = take_unkept()
    if lost:
        console.warn(lost)
    if as_json:
        console.json(report.as_dict())
    else:
        _show(report, console)
    _raise_for(report.findings, pair)


def _report(call: Invocation, pair: Pair, load: LoadConfig, again: bool) -> Report:
    """What was found before where nothing speaks against it, else what is found now."""
    settings.quiet_libraries()
    with named_when_missing():
        from dflash_local.check import record
        from dflash_local.check.run import checked_now
    user = call.user
    path = record.path_of(user.cache_dir, record.facts_of(pair, load))
    if again:
        load_steps_of(load, user).forget()  # a load that ended the program may be tried as it was asked for
    before = None if again else record.remembered(path)
    if before is not None and before.good:
        return before
    with call.session(pair, load) as session:
        planned = planned_peak(pair, session.facts.load, user)
        with call.console.progress() as line:
            return checked_now(session, pair, path, planned, line)


def _show(report: Report, console: Console) -> None:
    for finding in report.findings:
        for line, style in zip(finding.lines, (STYLES[finding.state], "dim"), strict=False):
            console.data(line, style)
    when = f"found {report.checked}; --again checks anew" if report.remembered else f"in {report.seconds:.1f} s"
    console.data(f"{report.model} ({report.loaded_as}), {when}", "dim")


def _raise_for(findings: tuple[Finding, ...], pair: Pair) -> None:
    """End with the exit code of what failed.

    Raises:
        EngineCheckError: the engine or the card. PairCheckError: the files or the pair.
    """
    from dflash_local.check.findings import ENGINE_BROKEN, EXIT_CODES, exit_code

    code = exit_code(findings)
    if not code:
        return
    failed = [each for each in findings if each.state == "failed" and EXIT_CODES[each.subject] == code]
    message = f"{pair.name}: {', '.join(each.subject for each in failed)} failed: {failed[0].text}"
    raise (EngineCheckError if code == ENGINE_BROKEN else PairCheckError)(message, failed[0].remedy)
