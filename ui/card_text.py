"""The card table in words: for a terminal, and as a page of docs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dflash_local.planner.cards import find_bandwidth
from dflash_local.tables import Column, indented, table, tokens, wrapped

if TYPE_CHECKING:
    from dflash_local.app.cards import CardRow, CardTable

TITLES = ("PAIR", "WEIGHTS", "CONTEXT", "PLAIN", "DRAFTED")
NOTE = (
    "Speeds are predicted, never measured on these cards: fitted to one NVIDIA H200 with random weights, scaled by the "
    "memory bandwidth of the makers' data sheets, at 1,024 tokens of context. PLAIN is tokens/s without the drafter. "
    "DRAFTED is tokens/s with the lowest to the highest acceptance length of the drafter's card; where none is "
    "published, cycles/s: times the acceptance length it is tokens/s."
)


def lines(tables: Sequence[CardTable], width: int) -> list[str]:
    """One table after the other."""
    columns = [Column(title, right=title not in TITLES[:2], shrinks=title == "WEIGHTS") for title in TITLES]
    page: list[str] = []
    for each in tables:
        rows = [_row(row) for row in each.rows]
        page += [_head(each), *indented(table(columns, rows, width - 2)), ""]
    commands = [row for each in tables for row in each.rows if row.option is not None]
    how = f"one command runs a pair with its weights, such as: {commands[0].command}" if commands else ""
    return [*page, *wrapped(" ".join(filter(None, (NOTE, how))), width)]


def markdown(tables: Sequence[CardTable]) -> Iterator[str]:
    """As ``docs/cards.md``."""
    yield "# Which pair runs on which card"
    yield ""
    yield f"Made by `dflash cards --markdown`. {NOTE}"
    for each in tables:
        yield ""
        yield f"## {_head(each)}"
        yield ""
        yield "| pair | weights | context | plain | drafted | command |"
        yield "|---|---|---|---|---|---|"
        for row in each.rows:
            cells = [*_row(row), f"`{row.command}`" if row.option is not None else ""]
            yield f"| {' | '.join(cells)} |"


def _head(each: CardTable) -> str:
    machine, rate = each.machine, find_bandwidth(each.machine.name)
    return f"{machine.memory / 2**30:.0f} GiB: {machine.name}{f', {rate:,.0f} GB/s' if rate else ''}"


def _row(row: CardRow) -> tuple[str, ...]:
    option = row.option
    if option is None:
        return row.pair, "does not fit", "-", "-", "-"
    found = (row.pair, option.name, tokens(option.plan.context))
    if option.prediction is None:
        return (*found, "-", "-")
    first, lengths = option.prediction.times[0], option.prediction.acceptance
    plain = f"{first.plain_tokens_per_s:.0f}"
    if first.cycle_ms is None:
        return (*found, plain, "-")
    if lengths is None:
        return (*found, plain, f"{1e3 / first.cycle_ms:.0f} cycles")
    low, high = (first.drafted_tokens_per_s(length) or 0.0 for length in (lengths.low, lengths.high))
    return (*found, plain, f"{low:.0f} to {high:.0f}")
