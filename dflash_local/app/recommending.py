"""Which weights of a pair suit a machine: its row, its files here, this card's own times; and the verdict in a word."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_local.app.fitting import Shapes, machine, shapes, variant_targets
from dflash_local.app.models import ModelStore
from dflash_local.app.notices import Notify
from dflash_local.app.resolve import Choice, Suit, of_row
from dflash_local.events import Notice
from dflash_local.load_config import LoadConfig
from dflash_local.tables import GIB, UNKNOWN

if TYPE_CHECKING:
    from dflash_local.catalog.row import Row
    from dflash_local.planner.machine import Machine
    from dflash_local.planner.plan import Plan
    from dflash_local.planner.recommend import Preference, Recommendation, Weights
    from dflash_local.settings import Settings


def weights_of(row: Row | None, known: Shapes, store: ModelStore | None = None) -> list[Weights]:
    """The target's own weights, then the row's pre-quantised ones whose recipe is known.

    Args:
        known: shapes of the row's own target.
    """
    from dflash_local.planner.recommend import Weights

    targets = variant_targets(row, store)
    return [Weights(known.target), *(Weights(target, variant) for variant, target in targets if target is not None)]


def recommended(
    row: Row | None,
    known: Shapes,
    where: Machine,
    config: LoadConfig | None = None,
    *,
    preference: Preference = "balanced",
    user: Settings | None = None,
    store: ModelStore | None = None,
    drafter_row: Row | None = None,
) -> Recommendation:
    """Every way to have a pair's weights on a machine, the best first.

    Args:
        row: whose pre-quantised targets count, too; None for none. known: shapes of the row's own target and of the
            drafter. config: what is asked for. drafter_row: whose acceptance is published, where that is not ``row``.
        user: whose records of this card's times and of replies correct the predictions.
    """
    from dflash_local.planner.acceptance_record import AcceptanceRecord
    from dflash_local.planner.recommend import recommend
    from dflash_local.planner.speed_record import SpeedRecord
    from dflash_local.store.paths import speeds_folder

    folder = None if user is None else speeds_folder(user)
    measured, accepted = SpeedRecord(folder, where.name).read(), AcceptanceRecord(folder).read()
    drafter_row = drafter_row or row
    published = () if drafter_row is None else drafter_row.published
    drafter = known.drafter if config is None or config.draft else None
    return recommend(weights_of(row, known, store), drafter, where, config, preference, published, measured, accepted)


def suited(load: LoadConfig, user: Settings, notify: Notify) -> Suit:
    """How ``resolve`` takes a pre-quantised target of a row where its own does not fit this machine.

    Nothing changes for what lies here, for another drafter, or where the weights' format was asked for.
    """

    def suit(choice: Choice, store: ModelStore) -> Choice:
        row = choice.target_row
        if row is None or not choice.own_drafter or load.quantize is not None:
            return choice
        here = None if row.target is None else store.find(row.target)
        known = None if here is not None and here.complete else shapes(choice, store)
        if known is None or not load.fit_check:
            return choice
        found = recommended(row, known, machine(user, device=load.device), load, user=user, store=store)
        best = found.best
        if best is None or best.weights.fidelity == 0 or best.weights.variant is None:
            return choice
        variant = best.weights.variant
        why = found.rest[0].plan.reason if found.rest else f"{row.name} leaves too little context"
        notify(Notice(f"{variant.repo} ({best.fidelity}) is taken: {why}"))
        return choice.with_variant(variant)

    return suit


def row_verdict(row: Row, where: Machine) -> tuple[str, Plan | None]:
    """As ``verdict``, of a pair of the registry before anything of it is here: what every list of pairs shows.

    A pre-quantised target that is published of it counts as the pair.
    """
    if row.bundled:
        return "fits", None
    choice = of_row(row)
    return verdict(choice, shapes(choice, None), where, published=row)


def verdict(
    choice: Choice, known: Shapes | None, where: Machine, published: Row | None = None
) -> tuple[str, Plan | None]:
    """A word or two on whether a pair runs on a machine, and the plan that does; it need not be a row's.

    Args:
        published: the row whose pre-quantised targets count as the pair, too.
    """
    from dflash_local.planner.plan import nearest, plan

    if choice.why_not_here:
        return "server", None
    if known is None:
        return UNKNOWN, None
    found = plan(known.target, known.drafter, where)
    if found.fits:
        return "fits", found
    best = None if published is None else recommended(published, known, where).best
    if best is not None:
        return f"fits in {best.plan.format.partition(' ')[0]}", best.plan
    near = nearest(known.target, known.drafter, where)
    if near is not None:
        return (f"fits in {near.format}" if near.load.draft or known.drafter is None else "target alone"), near
    least = least_needed(known, where)
    return (UNKNOWN, None) if least is None else (f"needs {-(-least // GIB):,} GiB", None)


def least_needed(known: Shapes, where: Machine) -> int | None:
    """Bytes of the smallest way to run a pair at all, at the shortest context; None when unknown."""
    from dflash_local.planner.formats import refusal
    from dflash_local.planner.plan import fits_table, plan

    found = [
        one for one in fits_table(known.target, known.drafter, where) if not refusal(known.target, one.load.quantize)
    ]
    if found and where.kind == "cpu":
        found.append(plan(known.target, known.drafter, where, LoadConfig(dtype="bfloat16")))
    totals = [one.ledger.total for one in found if one.ledger.total is not None]
    return min(totals) if totals else None
