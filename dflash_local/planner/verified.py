"""How often what a plan loads has been reported to run on its card."""

from __future__ import annotations

from dflash_local.catalog.verified import verified
from dflash_local.planner.cards import same_card
from dflash_local.planner.plan import Plan
from dflash_local.tables import counted


def reports_of(plan: Plan) -> int | None:
    """Count reports of the plan's format, engine and card; None where there is no card."""
    machine = plan.machine
    if plan.runs_on != "local" or machine.kind in ("cpu", "mps"):
        return None
    wanted = plan.format, plan.engine
    rows = (row for row in verified() if (row.format, row.engine) == wanted and same_card(row.card, machine.name))
    return sum(row.reports for row in rows)


def standing(plan: Plan) -> str:
    """Tell the same in words; nothing where there is no card."""
    count = reports_of(plan)
    if count is None:
        return ""
    return f"verified by {counted(count, 'report')}" if count else "never run on this card"
