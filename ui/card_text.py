"""The card table in words: for a terminal, and as a page of docs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dflash_local.planner.cards import find_bandwidth
from dflash_local.planner.speed import TYPICAL
from dflash_local.tables import Column, indented, table, tokens, wrapped
from dflash_local.ui.plan_text import speed_range

if TYPE_CHECKING:
    from dflash_local.app.cards import CardRow, CardTable

TITLES = ("PAIR", "WEIGHTS", "GIB", "CONTEXT", "LONGEST", "PLAIN", "DRAFTED")
NOTE = (
    "Speeds are predicted at 1,024 tokens of context: fitted to one NVIDIA H200 with random weights, scaled to the "
    "H100 by a probe, to others by data sheets. GiB is the download, drafter included; ~ is computed from the shape. "
    "CONTEXT is what a load takes by itself, LONGEST what the same weights leave with --kv-cache int8, which changes "
    "replies, and all that changes none (--drafter-precision 8bit-drafter --offload all). "
    "PLAIN is tokens/s without the drafter, DRAFTED at the lowest and the highest acceptance length: this machine's "
    "own, else the published ones, measured with 16-bit targets, else (*) those typical of other pairs."
)


def lines(tables: Sequence[CardTable], width: int) -> list[str]:
    columns = [Column(title, right=title not in TITLES[:2], shrinks=title == "WEIGHTS") for title in TITLES]
    page: list[str] = []
    for each in tables:
        rows = [_row(row) for row in each.rows if row.summary.command]
        rest = wrapped(_too_large(each), width - 2)
        page += [_head(each), *indented([*table(columns, rows, width - 2), *filter(None, rest)]), ""]
    commands = [row.summary.command for each in tables for row in each.rows if row.summary.command]
    how = f"One command runs a pair with its weights, such as: {commands[0]}" if commands else ""
    return [*page, *wrapped(" ".join(filter(None, (NOTE, how))), width)]


def markdown(tables: Sequence[CardTable]) -> Iterator[str]:
    """Write ``docs/cards.md``."""
    yield "# Which pair runs on which card"
    yield ""
    yield f"Made by `dflash models --cards --markdown`. {NOTE}"
    for each in tables:
        yield ""
        yield f"## {_head(each)}"
        yield ""
        yield "| pair | weights | GiB | context | longest | plain | drafted | options of `dflash chat` |"
        yield "|---|---|---|---|---|---|---|---|"
        for row in each.rows:
            found = row.summary
            if found.command:
                options = found.command.removeprefix(f"dflash chat {found.pair}").strip()
                yield f"| {' | '.join([*_row(row), f'`{options}`' if options else ''])} |"
        if rest := _too_large(each):
            yield ""
            yield rest


def _too_large(each: CardTable) -> str:
    """Name the pairs that do not fit; empty where all do."""
    rest = [row.summary.pair for row in each.rows if not row.summary.command]
    return f"Does not fit: {', '.join(rest)}." if rest else ""


def _head(each: CardTable) -> str:
    machine, rate = each.machine, find_bandwidth(each.machine.name)
    return f"{machine.memory / 2**30:.0f} GiB: {machine.name}{f', {rate:,.0f} GB/s' if rate else ''}"


def _row(row: CardRow) -> tuple[str, ...]:
    found, best = row.summary, row.summary.best
    assert best is not None  # of a pair that has a command
    size = "-" if found.download_gib is None else f"{'~' if found.computed else ''}{found.download_gib:.1f}"
    plain = "-" if found.plain_tokens_per_s is None else f"{found.plain_tokens_per_s:.0f}"
    lengths = None if best.prediction is None else best.prediction.acceptance
    mark = "*" if lengths is not None and lengths.source.startswith(TYPICAL) else ""
    drafted = f"{speed_range(found.drafted_tokens_per_s)}{mark}"
    context, longest = (tokens(each) for each in (best.plan.context, row.longest_context))
    return found.pair, best.name, size, context, longest, plain, drafted
