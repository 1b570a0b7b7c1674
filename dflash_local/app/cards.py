"""The card table: for usual sizes of GPU memory, which pairs run, with which weights and context, and how fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_local.app.models import registry
from dflash_local.app.recommending import Summary, row_over_two, row_summary
from dflash_local.planner.cards import TYPICAL, same_card

if TYPE_CHECKING:
    from dflash_local.catalog.reports import CardReport
    from dflash_local.catalog.row import Row
    from dflash_local.planner.machine import Machine
    from dflash_local.planner.recommend import Option, Preference
    from dflash_local.settings import Settings


@dataclass(frozen=True, slots=True)
class CardRow:
    """Says what a pair comes to on a card.

    Attributes:
        longest_context: the most that its best weights leave; None where none fit. over_two: what two such cards hold
            where none fit one.
    """

    summary: Summary
    longest_context: int | None
    over_two: Option | None


@dataclass(frozen=True, slots=True)
class CardTable:
    """Lists what pairs come to on one card, and what was measured on it, other pairs included."""

    machine: Machine
    rows: tuple[CardRow, ...]
    reports: tuple[CardReport, ...]


def card_tables(
    user: Settings,
    reports: Sequence[CardReport],
    cards: Sequence[tuple[str, float]] = TYPICAL,
    preference: Preference = "balanced",
) -> tuple[CardTable, ...]:
    """Make a table for each card, of the pairs that run in this process at all but those of the first run, in order.

    Raises:
        SettingsError: the registry cannot be read.
    """
    from dflash_local.planner.machine import named
    from dflash_local.planner.room import longest_context

    def card_row(row: Row, machine: Machine) -> CardRow:
        summary = row_summary(row, machine, user, preference)
        if summary.best is None:
            return CardRow(summary, None, row_over_two(row, machine, user, preference))
        return CardRow(summary, longest_context(summary.best), None)

    def card_table(machine: Machine) -> CardTable:
        measured = (each for each in reports if same_card(each.card, machine.name))
        return CardTable(machine, tuple(card_row(row, machine) for row in rows), tuple(measured))

    rows = [row for row in registry(user).rows if not (row.bundled or row.bundled_drafter) and row.runs_here]
    return tuple(card_table(named(name, gib)) for name, gib in cards)
