"""Say what a cycle of a mixture of experts costs: more, the more different experts its rows take. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log

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


class ExpertCosts:
    """Costs measured at load, corrected by the experts that a session's own cycles take.

    A cycle reads each expert that any of its rows takes once: it costs what was measured, plus the time of the experts
    that its rows take more than they did then, or less. What an expert costs is measured with two routings of the same
    rows: across numbers of rows, other work grows along with the experts.

    M rows take k M^alpha experts, with alpha about 0.75 where it was measured of text. Where a number of rows was not
    seen, alpha is the mean of those that were, and uniform routing is the most.
    """

    def __init__(self, costs: Mapping[int, float], measured: MeasuredExperts) -> None:
        """Begin with ``costs``: milliseconds of a whole cycle by its verified rows, each of ``measured.distinct``."""
        self._costs, self._measured = dict(costs), measured
        self._seen: dict[int, tuple[float, float]] = {}  # mean, and the cycles that it counts for

    def add(self, rows: int, experts: float) -> None:
        """Learn from a cycle: different experts of a layer, the mean of all layers."""
        if rows > 1:  # one row takes the same number always
            mean, count = self._seen.get(rows, (0.0, 0.0))
            count = min(count + 1.0, MEMORY)
            self._seen[rows] = mean + (experts - mean) / count, count

    def experts(self, rows: int) -> float:
        """Return different experts of a layer that so many rows are expected to take: of a number that was measured."""
        if rows in self._seen:
            return self._seen[rows][0]
        if rows == 1 or not self._seen:
            return self._measured.distinct[rows]
        top_k = self._measured.top_k
        alphas = [log(max(mean / top_k, 1.0)) / log(seen) for seen, (mean, _) in self._seen.items()]
        return min(top_k * rows ** (sum(alphas) / len(alphas)), self._measured.uniform(rows))

    def current(self) -> dict[int, float]:
        """Return milliseconds of a cycle by its verified rows, as far as is known by now; none below the cheapest
        measured.
        """
        least, measured = min(self._costs.values()), self._measured
        return {
            rows: max(cost + measured.ms * (self.experts(rows) - measured.distinct[rows]), least)
            for rows, cost in self._costs.items()
        }
