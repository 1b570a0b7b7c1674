"""A plan from somebody's own turns in words: what they are, and how long they would take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash_local.app.own_work import HIGH
from dflash_local.tables import Column, field, indented, listing, table, tokens, wrapped
from dflash_local.ui.plan_text import machine_line, seconds

if TYPE_CHECKING:
    from dflash_local.app.own_pairs import OwnPair
    from dflash_local.app.own_work import Work
    from dflash_local.planner.machine import Machine
    from dflash_local.planner.turn_speed import TurnSeconds

LACKING = (
    "System prompts and tool definitions of agents are not in these transcripts, but for the prompts in newer ones of "
    "Codex: what is sent is longer by these."
)


def work_lines(work: Work, counted: str, width: int) -> list[str]:
    """Tell what the turns are, and who counted their tokens."""
    middle, high = work.at(0.5), work.at(HIGH)
    count = work.conversations.total()
    of = listing([f"{client} ({count:,})" for client, count in work.conversations.most_common() if count])
    per_token = f"{work.chars / max(1, work.tokens):.1f} characters each"

    def spread(low: int, top: int) -> str:
        return f"{tokens(low)} tokens in the median, {tokens(top)} at the 95th percentile"

    head = f"{tokens(len(work.turns))} turns in {tokens(count)} conversation{'s' if count != 1 else ''}: {of}"
    return [
        *wrapped(head, width),
        *field("  prompt", spread(middle.prompt, high.prompt), width),
        *field("  reply", spread(middle.reply, high.reply), width),
        *field("  reused", f"{work.reused_share:.0%} of the prompts stood in the turn before", width),
        *field(
            "  copies", f"{work.drafted_share:.0%} of the replies would have been drafted by --drafter lookup", width
        ),
        *wrapped(f"tokens: {counted}; {per_token}", width),
        *wrapped(LACKING, width),
    ]


def pair_lines(pairs: Sequence[OwnPair], where: Machine, context: int, width: int) -> list[str]:
    """Tell how long a turn takes with each pair, and what begins a chat with it."""
    titles = ("FIRST TOKEN", "PLAIN", "DRAFTED", "95TH")
    columns = (Column("PAIR", shrinks=True), *(Column(title, right=True) for title in titles))
    rows = [(pair.summary.pair, *_cells(pair.median, pair.high)) for pair in pairs]
    return [
        *wrapped(f"seconds a turn on {machine_line(where)}, with a context of {tokens(context)}", width),
        *indented(table(columns, rows, width - 2)),
        *(line for note in _notes(pairs) for line in indented(wrapped(note, width - 2))),
        "",
        *(line for pair in pairs for line in wrapped(pair.summary.command, width)),
    ]


def _notes(pairs: Sequence[OwnPair]) -> list[str]:
    """Say what the figures are and rest on."""
    bases = [best.prediction.basis for pair in pairs if (best := pair.summary.best) and best.prediction]
    if not bases:
        return ["no speed is predicted for this machine; --gpu NAME plans for a card that is known by name"]
    notes = [
        f"predicted, {bases[0]}",
        "in the median; 95TH: drafted, at the 95th percentile. Drafts at expected acceptance lengths, and copies "
        "where they are worth more",
    ]
    if any(pair.median is not None and pair.median.first_token is None for pair in pairs):
        notes.append("the time of the prompts is not predicted here and not in these figures")
    return notes


def _cells(median: TurnSeconds | None, high: TurnSeconds | None) -> tuple[str, ...]:
    if median is None or high is None:
        return ("-",) * 4
    first = "-" if median.first_token is None else seconds(median.first_token)
    return first, seconds(median.plain), _span(median), _span(high)


def _span(found: TurnSeconds) -> str:
    if found.fastest is None or found.slowest is None:
        return "-"
    low, high = seconds(found.fastest), seconds(found.slowest)
    return low if low == high else f"{low} to {high}"
