"""How long somebody's own turns would take: with the best pairs for a machine, or with one that was named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dflash_local.app.fitting import row_choice, shapes
from dflash_local.app.models import model_store
from dflash_local.app.offers import best_first
from dflash_local.app.own_work import HIGH, Work
from dflash_local.app.recommending import Summary, summary
from dflash_local.app.resolve import Choice
from dflash_local.bench.tasks.figures import percentile
from dflash_local.errors import DFlashError, UsageError
from dflash_local.load_config import LoadConfig
from dflash_local.planner.turn_speed import TurnSeconds, TurnSpeed

if TYPE_CHECKING:
    from dflash_local.catalog.row import Row
    from dflash_local.planner.machine import Machine
    from dflash_local.planner.recommend import Preference
    from dflash_local.settings import Settings

MOST_PAIRS = 3


@dataclass(frozen=True, slots=True)
class OwnPair:
    """Says what a pair comes to over somebody's turns.

    Attributes:
        median, high: of the turns in this pair's seconds, each figure by itself; None where no speed is predicted.
    """

    summary: Summary
    median: TurnSeconds | None = None
    high: TurnSeconds | None = None

    def as_dict(self) -> dict[str, Any]:
        seconds = None
        if self.median is not None and self.high is not None:
            seconds = {"median": self.median._asdict(), "p95": self.high._asdict()}
        prediction = self.summary.best.prediction if self.summary.best else None
        basis = prediction and prediction.basis
        return {**self.summary.as_dict(), "predicted_turn_seconds": seconds, "prediction_basis": basis}


def own_pairs(
    work: Work, choice: Choice | None, where: Machine, user: Settings, load: LoadConfig, preference: Preference
) -> list[OwnPair]:
    """Plan pairs with the context that the turns take, and predict the turns.

    Args:
        choice: the one pair that is asked for; None: the best of the registry, see ``best_first``, one of each target.
        load: as asked for; its context stands instead of that of the turns.

    Raises:
        SettingsError: the registry cannot be read.
    """
    load, store = replace(load, context=load.context or max(1, work.context)), model_store(user)

    def sum_up(one: Choice) -> Summary:
        try:
            return summary(one, shapes(one, store), where, user, load, preference=preference, store=store)
        except UsageError:  # its models were made for less context
            return Summary(one.name, "no")

    def sum_up_row(row: Row) -> Summary:
        try:
            return sum_up(row_choice(row, user))
        except DFlashError:  # a tampered download, which other commands tell
            return Summary(row.name, "unknown")

    if choice is not None:
        found = [one for one in [sum_up(choice)] if one.best is not None]
    else:
        of_target: dict[str, Summary] = {}
        for row, one in best_first(user, sum_up_row):
            of_target.setdefault(str(row.target and row.target.id), one)
        found = list(of_target.values())[:MOST_PAIRS]
    return [_own_pair(one, work) for one in found]


def _own_pair(found: Summary, work: Work) -> OwnPair:
    prediction = found.best.prediction if found.best else None
    if prediction is None:
        return OwnPair(found)
    speed = TurnSpeed(prediction, work.cycles)
    seconds = [speed.seconds(turn) for turn in work.turns]
    return OwnPair(found, _at(seconds, 0.5), _at(seconds, HIGH))


def _at(seconds: Sequence[TurnSeconds], share: float) -> TurnSeconds:
    """Return what this share of the turns does not exceed, each figure by itself."""
    columns = ([value for value in column if value is not None] for column in zip(*seconds))
    return TurnSeconds(*(percentile(column, share) for column in columns))  # type: ignore[arg-type]  # plain is never None
