"""Describe how many rows the next cycle verifies: what most tokens per millisecond are expected of. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dflash_local.engine.cycle_costs import NO_GROWTH, ContextGrowth, CycleCosts, MeasuredExperts
from dflash_local.engine.survival import LEAN, MEMORY, Survival

RATE_MEMORY = 128.0  # cycles of the rate that a longer cycle has to be worth
PROMISE_MEMORY = 16.0  # cycles that a drafter is compared with what may take its place by
RECENT = 0.5  # what these count for in a lasting promise, the average being the rest
PROBE_MEMORY = 8.0  # drafts, where only probes look: what was seen long ago may have changed


class _Rate:
    """Tokens a millisecond of the last cycles."""

    def __init__(self, tokens: float, ms: float, memory: float) -> None:
        self._tokens, self.ms, self._fade = tokens, ms, 1.0 - 1.0 / memory

    def add(self, tokens: float, ms: float) -> None:
        self._tokens = self._tokens * self._fade + tokens
        self.ms = self.ms * self._fade + ms

    @property
    def value(self) -> float:
        return self._tokens / self.ms

    def slow_down(self, factor: float) -> None:
        """Let all that was seen have taken so many times as long."""
        self.ms *= factor


class VerifyLength:
    """The verify length of a drafter's cycles, one by one.

    A drafter says how sure it is of each draft; what that is worth is learnt (``engine.survival``). Of the lengths
    whose costs are known that one is verified which is worth most above what its time brings elsewhere: expected
    tokens - rate x cost, with the rate of the last cycles.

    Of drafts that are made none needs to be verified, where that is worth most; a probe verifies some.

    A draft is accepted where it equals the target's own choice, which is made from the target's logits and the
    position's noise alone. So the text is the same whatever is cut off, and by whatever signal.

    Where the length is chosen from this cycle's confidences, the engine has to wait for them. It does where that is
    worth more than the wait; else it verifies the length that was best of late. Confidences are learnt from in both
    cases.

    Costs follow the context and, of mixtures of experts, the experts that cycles are seen to take
    (``engine.cycle_costs``); the sampler's own work is ignored. What a cycle brought may become known several launches
    later.
    """

    def __init__(
        self,
        costs: Mapping[int, float],
        block: int,
        experts: MeasuredExperts | None = None,
        wait_ms: float = 0.0,
        draft_ms: float = math.inf,
        growth: ContextGrowth = NO_GROWTH,
    ) -> None:
        """Begin a controller that knows nothing of the pair yet.

        Args:
            costs: milliseconds of a whole cycle by its number of verified rows; 1 is the step without drafting.
            block: rows of the longest cycle allowed; longer ones of ``costs`` are left out.
            experts: what the costs were measured with; None for a target without experts.
            wait_ms: milliseconds that a cycle takes longer where its confidences are waited for.
            draft_ms: milliseconds of the drafter's pass; infinite where a cycle cannot go on without any of its drafts.
            growth: of the costs with the context.

        Raises:
            ValueError: nothing is left, or a cost is not above 0.
        """
        usable = {rows: costs[rows] for rows in sorted(costs) if 1 <= rows <= block}
        if 1 not in usable or len(usable) < 2 or not min(usable.values()) > 0:
            raise ValueError(f"no usable costs for a block of {block}: {dict(costs)}")
        self._costs = CycleCosts(usable, experts, growth)
        self._wait_ms, self._draft_ms = wait_ms, draft_ms
        self.longest = max(self.costs)
        self._survival = Survival(self.longest - 1)
        self._emitted = _Rate(1.0, self.costs[1], RATE_MEMORY)  # by all cycles
        self._expected = self._survival.tokens_by_rows(())  # of the cycles of late that drafted
        self._gain = 0.0  # tokens that a cycle's own confidences add, the mean
        self._memory = LEAN  # cycles that the two means remember
        self._average = _Rate(0.0, 0.0, RATE_MEMORY)  # of promises, whenever that was
        self._recent = RECENT
        self.judge_anew()

    @property
    def costs(self) -> Mapping[int, float]:
        """Return milliseconds of a whole cycle by its verified rows, as far as is known by now."""
        return self._costs.by_rows

    def look_back(self, further: int) -> None:
        """Let cycles stand behind so many more tokens than those that were measured. What they brought stays as it is
        in tokens, and takes as much longer as the usual one does.
        """
        rows = self.rival()
        before = self.costs[rows]
        self._costs.look_back(further)
        for rate in (self._emitted, self._promise, self._average):
            rate.slow_down(self.costs[rows] / before)

    def judge_anew(self) -> None:
        """Let ``promise`` be that of the cycles from now on."""
        self._promise = _Rate(0.0, 0.0, PROMISE_MEMORY)

    def leave(self, half_life: float) -> None:
        """Note a cycle of another drafter. After ``half_life`` of them, half of what set the last cycles apart from the
        average is gone.
        """
        self._recent *= 0.5 ** (1.0 / half_life)

    @property
    def learnt(self) -> list[float]:
        """Return what ``recall`` of a later controller takes."""
        return [max(self._gain, 0.0), *self._expected, *self._survival.learnt]  # rounding may leave a gain below 0

    def recall(self, learnt: Sequence[float]) -> None:
        """Begin with what was learnt before, of blocks as long."""
        self._gain, behind, self._memory = learnt[0], 1 + len(self._expected), MEMORY
        self._expected = list(learnt[1:behind])
        self._survival.recall(learnt[behind:])

    @property
    def waits(self) -> bool:
        """Return whether ``cut`` chooses the length."""
        return self._gain >= self._wait_ms * self.rate

    def next_rows(self) -> int:
        """Return the rows of the cycle that is launched now, before any are cut."""
        return self.longest if self.waits else self._best(self._expected)

    def cut(self, confidences: Sequence[float]) -> int:
        """Return how many rows of a block with these drafts are to be verified; 1: no draft is."""
        return self._best(self._survival.tokens_by_rows(confidences), least=1)

    def cut_probe(self, confidences: Sequence[float]) -> int:
        """Return the same for a cycle that is launched to find out what drafts are worth: some are verified."""
        return self._best(self._survival.tokens_by_rows(confidences))

    def add(
        self,
        rows: int,
        accepted: int,
        confidences: Sequence[float] = (),
        experts: float | None = None,
        probe: bool = False,
    ) -> None:
        """Learn from a cycle that verified ``rows`` and accepted that many drafts; 1 is the plain step.

        Args:
            confidences: of its drafts, also of those that were cut off. experts: of ``Cycle``. probe: it was launched
                to find out whether the drafter pays.
        """
        self._costs.add(rows, experts)
        self._emitted.add(accepted + 1, self._whole_cost(rows, confidences))
        if rows == 1 and not confidences:
            return
        tokens = self._survival.tokens_by_rows(confidences)
        best, usual = self._best(tokens, least=1), self._best(self._expected)
        gain = tokens[best - 1] - tokens[usual - 1] - self.rate * (self._cost(best) - self._cost(usual))
        self._memory = min(self._memory + 1.0, MEMORY)
        self._gain += (gain - self._gain) / self._memory
        self._expected = [mean + (new - mean) / self._memory for mean, new in zip(self._expected, tokens)]
        self._judge(tokens, best if self.waits else usual, rows, accepted + 1, probe)
        self._survival.learn(rows, accepted, confidences, PROBE_MEMORY if probe else MEMORY)

    def worth(self, rows: int, accepted: int, confidences: Sequence[float]) -> float:
        """Return the tokens that a cycle emitted above what its time brings at ``rate``; see ``add``."""
        return accepted + 1 - self.rate * self._whole_cost(rows, confidences)

    def expected(self, rows: int) -> float:
        """Count tokens that a cycle of so many rows is expected to emit."""
        return self._expected[rows - 1]

    def rival(self) -> int:
        """Return the best length that drafts, paying or not."""
        lengths = [rows for rows in self.costs if rows > 1]
        return max(lengths, key=lambda rows: (self._expected[rows - 1] / self.costs[rows], rows))

    @property
    def rate(self) -> float:
        """Return tokens a millisecond: of the last cycles, or of the plain step where that brings more."""
        return max(self._emitted.value, 1.0 / self.costs[1])

    @property
    def value(self) -> float:
        """Return tokens that the next cycle is expected to emit above what its time brings at ``rate``."""
        rows = self._best(self._expected)
        return self._expected[rows - 1] - self.rate * self.costs[rows]

    @property
    def promise(self) -> float:
        """Return tokens a millisecond that the last cycles promised; before there are any, those that are expected."""
        if self._promise.ms:
            return self._promise.value
        rows = self.rival()
        return self._expected[rows - 1] / self.costs[rows]

    @property
    def lasting_promise(self) -> float:
        """Return tokens a millisecond for as long as another drafter would be used instead: between what the last
        cycles promised and the average. A drafter is left where its text is hard, which soon is over: the longer it is
        not used, the nearer this is to the average.
        """
        average = self._average.value if self._average.ms else self.promise
        return average + (self.promise - average) * self._recent

    def _best(self, tokens: Sequence[float], least: int = 2) -> int:
        """Return the length of drafted cycles, of ``least`` rows or more, that is worth most at the present rate; the
        longer of two.
        """
        price, lengths = self.rate, (rows for rows in self.costs if rows >= least)
        return max(lengths, key=lambda rows: (tokens[rows - 1] - price * self._cost(rows), rows))

    def _cost(self, rows: int) -> float:
        """Return milliseconds of a cycle that made drafts; of one row, where none was verified. Where the context ends
        and where a grammar leaves no other ids, cycles are shorter than launched: those cost what the next longer does.
        """
        known = rows if rows in self.costs else min(each for each in self.costs if each > rows)
        return self.costs[known] + (self._draft_ms + self._costs.draft_growth_ms if rows == 1 else 0.0)

    def _whole_cost(self, rows: int, confidences: Sequence[float]) -> float:
        """Return milliseconds of a cycle with its drafts; without any it is the plain step."""
        return self._cost(rows) if rows > 1 or confidences else self.costs[1]

    def _judge(self, tokens: Sequence[float], usual: int, rows: int, emitted: int, probe: bool) -> None:
        """Add what a cycle promised at the length that it has outside of probes, or what a probe brought if that is
        more.
        """
        tokens_ms = tokens[usual - 1], self._cost(usual)
        if probe and emitted - self.rate * self._cost(rows) > tokens[usual - 1] - self.rate * self._cost(usual):
            tokens_ms = emitted, self._cost(rows)
        self._recent = RECENT
        self._promise.add(*tokens_ms)
        self._average.add(*tokens_ms)
