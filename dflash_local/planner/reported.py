"""What people have reported of a plan's card: whether its format has run there, and how fast the pair was."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from dflash_local.catalog.reports import RANDOM, CardReport, reports
from dflash_local.planner.cards import same_card
from dflash_local.planner.plan import Plan
from dflash_local.tables import counted, rate


def reports_of(plan: Plan) -> int | None:
    """Count reports of the plan's format, engine and card; None where there is no card."""
    found = _on_card(plan)
    return None if found is None else len(found)


def standing(plan: Plan) -> str:
    """Tell the same in words; nothing where there is no card."""
    count = reports_of(plan)
    if count is None:
        return ""
    return f"verified by {counted(count, 'report')}" if count else "never run on this card"


def measured_by_others(pair: str, plan: Plan) -> str:
    """Say what the reports of the pair in the plan's format on its card come to; empty where there is none."""
    found = [each for each in _on_card(plan) or () if (each.pair, each.exact) == (pair, plan.load.exact)]
    if not found:
        return ""
    plain, drafted = medians(found)
    text = f"{counted(len(found), 'row')}, {rate(plain)} tok/s plain"
    text += "" if drafted is None else f", {rate(drafted)} drafted"
    return f"{text} (random weights)" if all(each.weights == RANDOM for each in found) else text


def medians(found: Sequence[CardReport]) -> tuple[float, float | None]:
    """Return plain and drafted tokens a second; None where no report drafted."""
    drafted = [each.drafted for each in found if each.drafted is not None]
    return median(each.plain for each in found), median(drafted) if drafted else None


def _on_card(plan: Plan) -> tuple[CardReport, ...] | None:
    machine = plan.machine
    if plan.runs_on != "local" or machine.kind in ("cpu", "mps"):
        return None
    wanted = plan.format, plan.engine
    return tuple(
        each for each in reports() if (each.format, each.engine) == wanted and same_card(each.card, machine.name)
    )
