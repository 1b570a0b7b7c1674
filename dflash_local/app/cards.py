"""The card table: for usual sizes of GPU memory, which pairs run, with which weights and context, and how fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_local.app.models import registry
from dflash_local.app.recommending import Summary, row_summary
from dflash_local.planner.cards import TYPICAL

if TYPE_CHECKING:
    from dflash_local.catalog.row import Row
    from dflash_local.planner.machine import Machine
    from dflash_local.planner.recommend import Preference
    from dflash_local.settings import Settings


@dataclass(frozen=True, slots=True)
class CardRow:
    """Says what a pair comes to on a card, and the most context that its best weights leave; None where none do."""

    summary: Summary
    longest_context: int | None


@dataclass(frozen=True, slots=True)
class CardTable:
    """Lists what pairs come to on one card."""

    machine: Machine
    rows: tuple[CardRow, ...]


def card_tables(
    user: Settings, cards: Sequence[tuple[str, float]] = TYPICAL, preference: Preference = "balanced"
) -> tuple[CardTable, ...]:
    """Make a table for each card, of the pairs that run in this process at all but those of the first run, in order.

    Raises:
        SettingsError: the registry cannot be read.
    """
    from dflash_local.planner.machine import named
    from dflash_local.planner.room import longest_context

    def card_row(row: Row, machine: Machine) -> CardRow:
        summary = row_summary(row, machine, user, preference)
        return CardRow(summary, None if summary.best is None else longest_context(summary.best))

    rows = [row for row in registry(user).rows if not (row.bundled or row.bundled_drafter) and row.runs_here]
    machines = [named(name, gib) for name, gib in cards]
    return tuple(CardTable(each, tuple(card_row(row, each) for row in rows)) for each in machines)
