"""Say what a cycle costs: more in a longer context, and the more different experts its rows take. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import NamedTuple

MEMORY = 16.0  # cycles that the mean of a number of rows remembers


@dataclass(frozen=True, slots=True)
class MeasuredExperts:
    """Hold what was measured of a target's experts beside the costs of its cycles.

    Attributes:
        num_experts: routed experts of a layer. top_k: of these, a row's.
        distinct: different ones of a layer that the rows of each cost took, the mean of all layers; by rows.
        ms: what one more of them in every layer costs a cycle.
    """

    num_experts: float
    top_k: float
    distinct: Mapping[int, float]
    ms: float

    def uniform(self, rows: int) -> float:
        """Return different experts of a layer that rows take which choose by themselves: about the most there are."""
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** rows)


class ContextGrowth(NamedTuple):
    """What one more token of context costs, in milliseconds: the plain step, and a cycle with drafts."""

    step_ms: float
    drafted_ms: float


NO_GROWTH = ContextGrowth(0.0, 0.0)


class MeasuredGrowth(NamedTuple):
    """What one more token of context costs, in milliseconds, behind so many ``tokens`` that costs were measured behind.

    Attributes:
        step_ms: the plain step, and any cycle whose drafts are given. drafted_ms, own_ms: a cycle with the proposer's
            drafts, and with those of the target's own layer.
    """

    tokens: int = 0
    step_ms: float = 0.0
    drafted_ms: float = 0.0
    own_ms: float = 0.0


class CycleCosts:
    """Costs measured at load, corrected by the context and by the experts that a session's own cycles take.

    Attention reads what the context holds once for all rows, so its time grows with the context alike for any number
    of them. The drafter's pass looks back on it, too.

    A cycle reads each expert that any of its rows takes once: it costs what was measured, plus the time of the experts
    that its rows take more than they did then, or less. What an expert costs is measured with two routings of the same
    rows: across numbers of rows, other work grows along with the experts.

    M rows take k M^alpha experts, with alpha about 0.75 where it was measured of text. Where a number of rows was not
    seen, alpha is the mean of those that were, and uniform routing is the most.
    """

    def __init__(
        self,
        costs: Mapping[int, float],
        experts: MeasuredExperts | None = None,
        growth: ContextGrowth = NO_GROWTH,
    ) -> None:
        """Begin with what was measured.

        Args:
            costs: milliseconds of a whole cycle by its verified rows, each of ``experts.distinct``; 1 is the plain
                step. experts: None for a target without experts.
        """
        self._costs, self._measured, self._growth = dict(costs), experts, growth
        self._seen: dict[int, tuple[float, float]] = {}  # mean, and the cycles that it counts for
        self._further = 0
        self.by_rows = dict(costs)

    @property
    def draft_growth_ms(self) -> float:
        """Return what the drafter's pass takes longer by now."""
        return self._further * (self._growth.drafted_ms - self._growth.step_ms)

    def add(self, rows: int, experts: float | None) -> None:
        """Learn from a cycle: different experts of a layer, the mean of all layers; None where nobody counted."""
        if self._measured is not None and experts is not None and rows > 1:  # one row takes the same number always
            mean, count = self._seen.get(rows, (0.0, 0.0))
            count = min(count + 1.0, MEMORY)
            self._seen[rows] = mean + (experts - mean) / count, count
            self._correct()

    def look_back(self, further: int) -> None:
        """Let cycles stand behind so many more tokens than those that were measured; fewer are a negative number."""
        self._further = further
        self._correct()

    def _correct(self) -> None:
        """Find the present costs; but for the context none is below the cheapest measured."""
        least, found = min(self._costs.values(), default=0.0), dict[int, float]()
        for rows, cost in self._costs.items():
            if (measured := self._measured) is not None:
                cost = max(cost + measured.ms * (self._experts(measured, rows) - measured.distinct[rows]), least)
            found[rows] = cost + self._further * (self._growth.drafted_ms if rows > 1 else self._growth.step_ms)
        self.by_rows = found

    def _experts(self, measured: MeasuredExperts, rows: int) -> float:
        """Return different experts of a layer that so many rows are expected to take: of a number that was measured."""
        if rows in self._seen:
            return self._seen[rows][0]
        if rows == 1 or not self._seen:
            return measured.distinct[rows]
        top_k = measured.top_k
        alphas = [log(max(mean / top_k, 1.0)) / log(seen) for seen, (mean, _) in self._seen.items()]
        return min(top_k * rows ** (sum(alphas) / len(alphas)), measured.uniform(rows))
