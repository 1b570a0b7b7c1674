"""The card table: for usual sizes of GPU memory, which pairs run, with which weights and context, and how fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_local.app.fitting import shapes
from dflash_local.app.models import registry
from dflash_local.app.recommending import recommended
from dflash_local.app.resolve import of_row

if TYPE_CHECKING:
    from dflash_local.planner.machine import Machine
    from dflash_local.planner.recommend import Option, Preference
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
class CardRow:
    """A pair on a card. ``option``: None where nothing fits."""

    pair: str
    option: Option | None

    @property
    def command(self) -> str:
        """What begins a chat with it."""
        arguments = "" if self.option is None else self.option.arguments
        return f"dflash chat {self.pair} {arguments}".strip()

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        option = self.option
        return {"pair": self.pair, "command": self.command if option else None, "option": option and option.as_dict()}


@dataclass(frozen=True, slots=True)
class CardTable:
    """What runs on one card."""

    machine: Machine
    rows: tuple[CardRow, ...]


def card_tables(
    user: Settings, cards: Sequence[tuple[str, float]] = CARDS, preference: Preference = "balanced"
) -> tuple[CardTable, ...]:
    """A table for each card, of the registry's pairs that run in this process at all, in its order.

    Raises:
        SettingsError: the registry cannot be read.
    """
    from dflash_local.planner.machine import named

    rows = [row for row in registry(user).rows if not row.bundled and row.runs_here]
    known = [(row, shape) for row in rows if (shape := shapes(of_row(row), None)) is not None]

    def rows_on(machine: Machine) -> tuple[CardRow, ...]:
        plans = ((row.name, recommended(row, shape, machine, preference=preference, user=user)) for row, shape in known)
        return tuple(CardRow(pair, found.best) for pair, found in plans)

    machines = [named(name, gib) for name, gib in cards]
    return tuple(CardTable(machine, rows_on(machine)) for machine in machines)
