"""The card table: for usual sizes of GPU memory, which pairs run, with which weights and context, and how fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_local.app.models import registry
from dflash_local.app.recommending import Summary, row_summary

if TYPE_CHECKING:
    from dflash_local.planner.machine import Machine
    from dflash_local.planner.recommend import Preference
    from dflash_local.settings import Settings

# Of each usual size a card whose bandwidth is known, and the GiB that its driver reports.
CARDS = (
    ("RTX 4060", 8.0),
    ("RTX 4070 Ti", 12.0),
    ("RTX 4080", 16.0),
    ("RTX 4090", 24.0),
    ("RTX 5090", 31.8),
    ("RTX A6000", 48.0),
    ("H100 80GB HBM3", 79.6),
)


@dataclass(frozen=True, slots=True)
class CardTable:
    """Lists what pairs come to on one card."""

    machine: Machine
    rows: tuple[Summary, ...]


def card_tables(
    user: Settings, cards: Sequence[tuple[str, float]] = CARDS, preference: Preference = "balanced"
) -> tuple[CardTable, ...]:
    """Make a table for each card, of the pairs that run in this process at all but those of the first run, in order.

    Raises:
        SettingsError: the registry cannot be read.
    """
    from dflash_local.planner.machine import named

    rows = [row for row in registry(user).rows if not (row.bundled or row.bundled_drafter) and row.runs_here]
    machines = [named(name, gib) for name, gib in cards]
    return tuple(CardTable(each, tuple(row_summary(row, each, user, preference) for row in rows)) for each in machines)
