"""``dflash warm``: what a pair's first load does once on a card, done ahead: kernels compiled, tried, chosen."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_local import settings
from dflash_local.app.loading import named_when_missing
from dflash_local.cli import options as opt
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.load_options import add_command
from dflash_local.load_config import LoadConfig

if TYPE_CHECKING:
    from dflash_local.kernels.kernel_record import KernelRecord
    from dflash_local.loaded import SessionFacts


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, "warm", warm)


def warm(
    model: opt.Model,
    drafter: opt.Drafter = None,
    mode: opt.Mode = opt.ModeChoice.dflash,
    again: Annotated[bool, typer.Option("--again", help="Forget what was found out before.")] = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
    *,
    load: LoadConfig,
) -> None:
    """Load a pair once: its kernels on this card are compiled, tried and chosen, and every later load finds them."""
    call, load = Invocation.begin(), opt.drafting(load, mode)
    console, pair = call.console, call.pair(model, drafter, load)
    settings.quiet_libraries()
    with named_when_missing():
        from dflash_local.kernels import kernel_record
    if again:
        kernel_record.forget_all()
    begin = time.monotonic()
    with call.session(pair, load) as session:
        seconds, facts = time.monotonic() - begin, session.facts
    found = _report(pair.name, facts, kernel_record.used_records(), seconds)
    if as_json:
        console.json(found)
        return
    for line in _lines(found):
        console.data(line)


def _report(model: str, facts: SessionFacts, records: list[KernelRecord], seconds: float) -> dict[str, Any]:
    from dflash_local.bench import provenance

    return {
        "model": model,
        "loaded_as": facts.loaded_as,
        "seconds": round(seconds, 2),
        "cards": [
            {
                **record.facts,
                "tried": record.tried,
                "impossible": record.impossible or None,
                "verdicts": dict(Counter(record.verdicts.values())),
                "failed": {name: verdict for name, verdict in record.verdicts.items() if verdict != "right"},
                "products": {name: record.choices.get(name) for name in sorted(record.used)},
            }
            for record in records
        ],
        "notices": list(facts.notices),
        "versions": provenance.versions(),
    }


def _lines(found: dict[str, Any]) -> list[str]:
    lines = [f"{found['model']} ({found['loaded_as']}) is ready in {found['seconds']:.1f} s"]
    for card in found["cards"]:
        known = ", ".join(f"{count} {verdict}" for verdict, count in card["verdicts"].items()) or "none"
        lines.append(f"  {card['card']}: {card['tried']} kernels tried now; known in all: {known}")
        for product, config in card["products"].items():
            lines.append(f"  {product}: {config or 'another product'}")
    if not found["cards"]:
        lines.append("  it has no products that kernels are tried and chosen for on this device")
    return lines
