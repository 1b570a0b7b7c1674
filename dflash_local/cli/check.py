"""``dflash check``: what this card makes of a loaded pair, or of its drafter or its kernels alone."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_local.app import measurements
from dflash_local.app.resolve import choose
from dflash_local.catalog.bundled import Pair
from dflash_local.check.findings import ENGINE_BROKEN, EXIT_CODES, VERDICTS, Finding, exit_code
from dflash_local.cli import options as opt
from dflash_local.cli.console import Console
from dflash_local.cli.invocation import Invocation
from dflash_local.errors import EngineCheckError, PairCheckError, UsageError
from dflash_local.load_config import LoadConfig

if TYPE_CHECKING:
    from dflash_local.check.record import Report

STYLES = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "dim"}


class CheckedPart(str, Enum):
    """What is checked alone."""

    drafter = "drafter"
    kernels = "kernels"


ONLY = (
    "drafter: whether it serves the target, in a minute. kernels: load once, so that they are compiled, tried and "
    "chosen for every later load."
)

EXAMPLES = ("dflash check Qwen/Qwen3.5-9B", "dflash check Qwen/Qwen3.5-9B --only drafter")


def check(
    model: opt.Model,
    drafter: opt.Drafter = None,
    mode: opt.Mode = opt.ModeChoice.dflash,
    only: Annotated[CheckedPart | None, typer.Option("--only", help=ONLY)] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Check anew what was found good before; with kernels, try all anew.")
    ] = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
    *,
    load: LoadConfig,
) -> None:
    """Check a pair on this card. Exit 6 when the files or the pair are at fault, 7 when the engine or the card is."""
    call, load = Invocation.begin(), opt.drafting(load, mode)
    if only is CheckedPart.drafter and not load.draft:
        raise UsageError("--mode ar loads no drafter", "leave it away to check one")
    console, pair = call.console, call.pair(model, drafter, load)
    if only is CheckedPart.kernels:
        content, lines = call.measure(pair.name, partial(measurements.try_kernels, pair, load, again))
        console.result(content, lines, as_json)
    elif only is CheckedPart.drafter:
        _check_drafter(call, pair, load, _published(model, drafter, call), as_json)
    else:
        report = call.measure(pair.name, partial(measurements.check_pair, pair, load, again))
        if as_json:
            console.json(report.as_dict())
        else:
            _show_checks(report, console)
        _raise_for(report.findings, pair)


def _show_checks(report: Report, console: Console) -> None:
    for finding in report.findings:
        for line, style in zip(finding.lines, (STYLES[finding.state], "dim"), strict=False):
            console.data(line, style)
    when = f"found {report.checked}; --again checks anew" if report.remembered else f"in {report.seconds:.1f} s"
    console.data(f"{report.model} ({report.loaded_as}), {when}", "dim")


def _raise_for(findings: tuple[Finding, ...], pair: Pair) -> None:
    code = exit_code(findings)
    if not code:
        return
    failed = [each for each in findings if each.state == "failed" and EXIT_CODES[each.subject] == code]
    message = f"{pair.name}: {', '.join(each.subject for each in failed)} failed: {failed[0].text}"
    raise (EngineCheckError if code == ENGINE_BROKEN else PairCheckError)(message, failed[0].remedy)


Published = Mapping[str, tuple[float, float]]  # the least and the most by kind of task


def _check_drafter(call: Invocation, pair: Pair, load: LoadConfig, published: Published, as_json: bool) -> None:
    """Tell whether the drafter serves the target: acceptance, speed-up, a verdict; PairCheckError where it does not."""
    if pair.drafter is None:
        raise UsageError(f"no drafter is known for {pair.name}", "name one with --drafter")
    report = call.measure(pair.name, partial(measurements.probe_drafter, pair, load))
    (found,) = report.findings
    if as_json:
        call.console.json(_drafter_report(report, found, pair, published))
    else:
        _show_drafter(report, found, published, call.console)
    if found.state == "failed":
        raise PairCheckError(f"the drafter does not serve {pair.name}: {found.text}", found.remedy)


def _published(model: str, drafter: str | None, call: Invocation) -> Published:
    row = choose(model, drafter, call.user).drafter_row
    from dflash_local.catalog.row import TASKS

    lengths = {kind: row.published_lengths(kind) for kind in TASKS} if row is not None else {}
    return {kind: (min(found), max(found)) for kind, found in lengths.items() if found}


def _drafter_report(report: Report, found: Finding, pair: Pair, published: Published) -> dict[str, Any]:
    return {
        **{name: value for name, value in report.as_dict().items() if name not in ("findings", "remembered", "state")},
        "drafter": str(pair.drafter),
        "tuned_from": pair.tuned_from,
        "verdict": VERDICTS[found.state],
        "text": found.text,
        "remedy": found.remedy,
        **report.as_dict()["findings"][0]["figures"],
        "published": {kind: list(both) for kind, both in published.items()},
    }


def _show_drafter(report: Report, found: Finding, published: Published, console: Console) -> None:
    console.data(f"{VERDICTS[found.state]}: {found.text}", STYLES[found.state])
    for kind, by_mode in found.figures.get("kinds", {}).items():
        means = ", ".join(f"{length:.2f} ({mode})" for mode, length in by_mode.items()) or "no draft"
        low_high = published.get(kind)
        beside = f"; published {low_high[0]:g} to {low_high[1]:g}" if low_high is not None else ""
        console.data(f"  {kind:<10} {means}{beside}")
    console.data(_expected(found))
    if found.remedy:
        console.data(found.remedy)
    console.data(f"{report.model} ({report.loaded_as}), in {report.seconds:.1f} s", "dim")


def _expected(found: Finding) -> str:
    """What a reply gains."""
    figures = found.figures
    speed_up = figures.get("speed_up")
    if speed_up is None:
        return "no speed-up is predicted: the engine measured no costs of step and cycle here"
    return (
        f"expected: {speed_up:.2f} times the plain speed with the whole block "
        f"(a cycle {figures['cycle_ms']:.1f} ms, a plain step {figures['step_ms']:.1f})"
    )
