"""The card table in words: for a terminal, and as a page of docs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dflash_local.load_config import FUSED
from dflash_local.planner.cards import find_bandwidth
from dflash_local.planner.reported import medians
from dflash_local.planner.speed import TYPICAL
from dflash_local.tables import Column, indented, rate, table, tokens, wrapped
from dflash_local.ui.plan_text import speed_range

if TYPE_CHECKING:
    from dflash_local.app.cards import CardRow, CardTable
    from dflash_local.catalog.reports import CardReport

TITLES = ("PAIR", "WEIGHTS", "GIB", "CONTEXT", "LONGEST", "PLAIN", "DRAFTED")
NOTE = (
    "Speeds are predicted at 1,024 tokens of context: fitted to one NVIDIA H200 with random weights, scaled to the "
    "H100 by a probe, to others by data sheets. GiB is the download, drafter included; ~ is computed from the shape. "
    "CONTEXT is what a load takes by itself, LONGEST what the same weights leave with --kv-cache int8, which changes "
    "replies, and all that changes none (--drafter-precision 8bit-drafter --offload all). "
    "PLAIN is tokens/s without the drafter, DRAFTED at the lowest and the highest acceptance length: this machine's "
    "own, else the published ones, measured with 16-bit targets, else (*) those typical of other pairs. MEASURED: "
    "medians of what people reported of these weights (dflash doctor --row), in brackets without a certificate, as of "
    "random ones. On two such cards: --device balanced."
)


class MeasuredAs(NamedTuple):
    """What is measured of a pair in one way: figures of others are not counted with it."""

    pair: str
    format: str
    engine: str
    exact: bool


def lines(tables: Sequence[CardTable], others: Sequence[CardReport], width: int) -> list[str]:
    page: list[str] = []
    for each in tables:
        titles = _titles(each)
        columns = [Column(title, right=title not in TITLES[:2], shrinks=title == "WEIGHTS") for title in titles]
        rows = [_row(row, each) for row in each.rows if row.summary.command]
        rest = [line for text in (_too_large(each), _also_measured(each)) for line in wrapped(text, width - 2) if text]
        page += [_head(each), *indented([*table(columns, rows, width - 2), *rest]), ""]
    commands = [row.summary.command for each in tables for row in each.rows if row.summary.command]
    how = f"One command runs a pair with its weights, such as: {commands[0]}" if commands else ""
    page += [line for text in _on_others(others) for line in wrapped(text, width)]
    return [*page, *wrapped(" ".join(filter(None, (NOTE, how))), width)]


def markdown(tables: Sequence[CardTable], others: Sequence[CardReport]) -> Iterator[str]:
    """Write ``docs/cards.md``. others: reports of cards that have no table."""
    yield "# Which pair runs on which card"
    yield ""
    yield f"Made by `dflash models --cards --markdown`. {NOTE}"
    for each in tables:
        yield ""
        yield f"## {_head(each)}"
        yield ""
        titles = ["GiB" if title == "GIB" else title.lower() for title in _titles(each)]
        yield f"| {' | '.join([*titles, 'options of `dflash chat`'])} |"
        yield "|---" * (len(titles) + 1) + "|"
        for row in each.rows:
            found = row.summary
            if found.command:
                options = found.command.removeprefix(f"dflash chat {found.pair}").strip()
                yield f"| {' | '.join([*_row(row, each), f'`{options}`' if options else ''])} |"
        for rest in filter(None, (_too_large(each), _also_measured(each))):
            yield ""
            yield rest
    for text in _on_others(others):
        yield ""
        yield text


def _titles(each: CardTable) -> Sequence[str]:
    return (*TITLES, "MEASURED") if each.reports else TITLES


def _too_large(each: CardTable) -> str:
    """Name the pairs that do not fit, and those that two such cards hold; empty where all fit."""
    rest = [row.summary.pair for row in each.rows if not row.summary.command and row.over_two is None]
    on_two = [f"{row.summary.pair} ({row.over_two.name})" for row in each.rows if row.over_two is not None]
    parts = (f"On two: {', '.join(on_two)}.", f"Does not fit: {', '.join(rest)}.")
    return " ".join(part for part, named in zip(parts, (on_two, rest)) if named)


def _also_measured(each: CardTable) -> str:
    """Say what was measured of other pairs, formats and promises than those of the table; empty where nothing was."""
    shown = {_shown(row) for row in each.rows}
    rest = [report for report in each.reports if _form(report) not in shown]
    return f"Also measured: {_listed(rest)}." if rest else ""


def _on_others(others: Sequence[CardReport]) -> Iterator[str]:
    """Say what was measured on each of the cards that have no table."""
    for card in dict.fromkeys(report.card for report in others):
        yield f"Measured on {card}: {_listed([report for report in others if report.card == card])}."


def _listed(found: Sequence[CardReport]) -> str:
    """Write the speeds of each pair by format and promise."""
    pairs: dict[str, dict[MeasuredAs, list[CardReport]]] = {}
    for report in found:
        pairs.setdefault(report.pair, {}).setdefault(_form(report), []).append(report)
    texts = []
    for pair, forms in pairs.items():
        texts.append(f"{pair} {', '.join(f'{_words(form)} {_speeds(each)}' for form, each in forms.items())}")
    return "; ".join(texts)


def _form(report: CardReport) -> MeasuredAs:
    return MeasuredAs(report.pair, report.format, report.engine, report.exact)


def _words(form: MeasuredAs) -> str:
    return form.format + f" {form.engine}" * (form.engine != FUSED) + " --exact" * form.exact


def _shown(row: CardRow) -> MeasuredAs | None:
    """Return what a row tells the speed of; None where nothing fits."""
    best = row.summary.best
    return None if best is None else MeasuredAs(row.summary.pair, best.plan.format, best.plan.engine, False)


def _speeds(found: Sequence[CardReport]) -> str:
    """Write ``226 and 580 drafted``; in brackets without a certificate."""
    plain, drafted = medians(found)
    text = rate(plain) if drafted is None else f"{rate(plain)} and {rate(drafted)} drafted"
    return text if any(report.certificate and report.certificate.strength for report in found) else f"({text})"


def _head(each: CardTable) -> str:
    machine, speed = each.machine, find_bandwidth(each.machine.name)
    return f"{machine.memory / 2**30:.0f} GiB: {machine.name}{f', {speed:,.0f} GB/s' if speed else ''}"


def _row(row: CardRow, of: CardTable) -> tuple[str, ...]:
    found, best = row.summary, row.summary.best
    assert best is not None  # of a pair that has a command
    size = "-" if found.download_gib is None else f"{'~' if found.computed else ''}{found.download_gib:.1f}"
    plain = "-" if found.plain_tokens_per_s is None else f"{found.plain_tokens_per_s:.0f}"
    lengths = None if best.prediction is None else best.prediction.acceptance
    mark = "*" if lengths is not None and lengths.source.startswith(TYPICAL) else ""
    drafted = f"{speed_range(found.drafted_tokens_per_s)}{mark}"
    context, longest = (tokens(each) for each in (best.plan.context, row.longest_context))
    cells = found.pair, best.name, size, context, longest, plain, drafted
    same = [report for report in of.reports if _form(report) == _shown(row)]
    return (*cells, _speeds(same) if same else "-") if of.reports else cells
