"""``dflash probe``: whether a drafter serves a target, with what to expect of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from dflash_local import settings
from dflash_local.app.loading import named_when_missing
from dflash_local.app.resolve import choose
from dflash_local.catalog.bundled import Pair
from dflash_local.cli import options as opt
from dflash_local.cli.check import STYLES
from dflash_local.cli.console import Console
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.load_options import add_command
from dflash_local.errors import PairCheckError, UsageError
from dflash_local.load_config import LoadConfig
from dflash_local.store.kept import take_unkept

if TYPE_CHECKING:
    from dflash_local.check.findings import Finding
    from dflash_local.check.record import Report

Published = Mapping[str, tuple[float, float]]  # the least and the most by kind of task


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, "probe", probe)


def probe(
    model: opt.Model,
    drafter: opt.Drafter = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
    *,
    load: LoadConfig,
) -> None:
    """Tell in a minute whether a drafter serves a target: acceptance, speed-up, a verdict; exit 6 when it does not."""
    call = Invocation.begin()
    console, pair = call.console, call.pair(model, drafter, load)
    if pair.drafter is None:
        raise UsageError(f"no drafter is known for {pair.name}", "name one with --drafter")
    report = _measured(call, pair, load)
    lost = take_unkept()
    if lost:
        console.warn(lost)
    (found,) = report.findings
    published = _published(model, drafter, call)
    if as_json:
        console.json(_as_dict(report, found, pair, published))
    else:
        _show(report, found, published, console)
    if found.state == "failed":
        raise PairCheckError(f"the drafter does not serve {pair.name}: {found.text}", found.remedy)


def _measured(call: Invocation, pair: Pair, load: LoadConfig) -> Report:
    """What is found now; the first use of a fine-tune knows it from then on."""
    settings.quiet_libraries()
    with named_when_missing():
        from dflash_local.check.run import probe_path, probed_now
    path = probe_path(pair, load, call.user.cache_dir)
    with call.session(pair, load) as session, call.console.progress() as line:
        return probed_now(session, pair, path, line)


def _published(model: str, drafter: str | None, call: Invocation) -> Published:
    from dflash_local.catalog.row import TASKS

    row = choose(model, drafter, call.user).drafter_row
    lengths = {kind: row.published_lengths(kind) for kind in TASKS} if row is not None else {}
    return {kind: (min(found), max(found)) for kind, found in lengths.items() if found}


def _as_dict(report: Report, found: Finding, pair: Pair, published: Published) -> dict[str, Any]:
    from dflash_local.check.probing import VERDICTS

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


def _show(report: Report, found: Finding, published: Published, console: Console) -> None:
    from dflash_local.check.probing import VERDICTS

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
