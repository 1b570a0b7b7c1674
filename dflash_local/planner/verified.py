"""How often what a plan loads has been reported to run on its card."""

from __future__ import annotations

from dflash_local.catalog.verified import verified
from dflash_local.planner.cards import same_card
from dflash_local.planner.plan import Plan

NAMELESS = "a GPU of"  # how ``machine.named`` calls a card of which only the memory is given


def reports_of(found: Plan) -> int | None:
    """Reports of the plan's format, engine and card; None where there is no card or its name is not known."""
    where = found.machine
    if found.runs_on != "local" or where.kind in ("cpu", "mps") or where.name.startswith(NAMELESS):
        return None
    wanted = found.format, found.engine
    rows = (row for row in verified() if (row.format, row.engine) == wanted and same_card(row.card, where.name))
    return sum(row.reports for row in rows)


def standing(found: Plan) -> str:
    """The same in words; empty where there is no card."""
    count = reports_of(found)
    if count is None:
        return ""
    return f"verified by {count} report{'' if count == 1 else 's'}" if count else "never run on this card"
