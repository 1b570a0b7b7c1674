"""Describe how many rows the next cycle verifies: what most tokens per millisecond are expected of. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_local.engine.expert_costs import ExpertCosts, MeasuredExperts

GAIN = 1.02  # what another length must promise, relative to the present one, to be taken
FIRST_SHARE, FIRST_WEIGHT = 0.8, 4.0  # the guess for the first slot, and the cycles that it counts for
MEMORY = 64.0  # cycles that a slot remembers
PROBE_MEMORY = 8.0  # the same where only probes look: what was seen long ago may have changed
FIRST_WAIT, LONGEST_WAIT = 32, 512  # cycles from one streak of probes to the next; doubled when nothing came of it
TRIES, STREAK = 3, 16  # probes of a streak, at least and at most
NEAR = 1.1  # lengths that cost so little more than the next longer one are probed instead of it
RISE = 1.25  # so much more from the present length, and a longer one is probed soon


class VerifyLength:
    """The verify length of a session, cycle by cycle.

    Each slot has a share: of the cycles that verified it and accepted all slots before it, those that accepted it
    too; where there were few it leans on the slot before. Slots not verified learn nothing and forget nothing, slots
    behind the first rejection only forget. The product of the first k shares is the survival s_k, and a cycle of M
    rows is expected to emit 1 + s_1 + ... + s_(M-1) tokens.

    The costs are those of one context length: a longer context makes all lengths dearer, which is ignored, as is
    the sampler's own work. Of mixtures of experts they follow the experts that cycles are seen to take
    (``engine.expert_costs``). What a cycle brought may become known several launches later.

    While less than the block is verified, longer drafts show nothing of themselves. So now and then a single cycle,
    a probe, verifies the next longer length. At least 3 follow one another, each when the last one is known, and at
    most 16 while one longer length would have paid over all of them; then the wait doubles, from 32 up to 512 cycles.
    The wait is short again when a longer length has held, or the present one brings much more than it did.
    What that costs: a probe takes t(longer) / t(present) - 1 of a present cycle more, less the tokens that it brings.
    Where they bring nothing these are 12 cycles of the first thousand, then 3 in 520 (0.6 %); once the wait is at
    its longest never more than 16 in 512 (3 %).
    """

    def __init__(self, costs: Mapping[int, float], block: int, experts: MeasuredExperts | None = None) -> None:
        """Begin a controller that knows nothing of the pair yet.

        Args:
            costs: milliseconds of a whole cycle by its number of verified rows; 1 is the step without drafting.
            block: rows of the longest cycle allowed; longer ones of ``costs`` are left out.
            experts: what the costs were measured with; None for a target without experts.

        Raises:
            ValueError: nothing is left, or a cost is not above 0.
        """
        self.costs = {rows: costs[rows] for rows in sorted(costs) if 1 <= rows <= block}
        if not self.costs or not min(self.costs.values()) > 0:
            raise ValueError(f"no usable costs for a block of {block}: {dict(costs)}")
        self._expert_costs = None if experts is None else ExpertCosts(self.costs, experts)
        self.longest = max(self.costs)
        slots = self.longest - 1
        self._reached, self._hit = [0.0] * slots, [0.0] * slots  # cycles, the older the less
        self._share = [FIRST_SHARE] * slots
        if slots:
            self._reached[0], self._hit[0] = FIRST_WEIGHT, FIRST_WEIGHT * FIRST_SHARE
        self.length = self._best()
        self._stale = False  # something was learnt since ``length`` was chosen
        self._wait = self._patience = FIRST_WAIT  # cycles until the next probe; what it is set to
        self._held: int | None = None  # cycles since the length last grew, until it is cut
        self._probing = 0  # rows of the probe that is on its way
        self._streak: list[int] = []  # tokens that the probes of this streak brought
        self._level = self.expected(self.length)  # at the last change or probe

    def begin(self) -> None:
        """Begin a reply: what was on its way of another is lost, and its text may be easier."""
        self._probing, self._streak = 0, []
        self._wait = min(self._wait, FIRST_WAIT)

    def next_rows(self) -> int:
        """Return the rows of the cycle that is launched now; ask once per launch."""
        if self._stale:
            self._choose()
        self._held = None if self._held is None else self._held + 1
        self._wait -= 1
        if self.length == self.longest or self._wait > 0 or self._probing:
            return self.length
        longer = [rows for rows in self.costs if rows > self.length]
        self._probing = max(rows for rows in longer if self.costs[rows] <= NEAR * self.costs[longer[0]])
        return self._probing

    def add(self, rows: int, accepted: int, experts: float | None = None) -> None:
        """Learn from a cycle that verified ``rows`` and accepted that many drafts. ``experts``: of ``Cycle``."""
        if experts is not None and self._expert_costs is not None:
            self._expert_costs.add(rows, experts)
            self.costs, self._stale = self._expert_costs.current(), True
        drafts = min(rows, self.longest) - 1
        if rows != self._probing:
            self._learn(0, drafts, accepted, MEMORY)
            return
        self._learn(0, self.length - 1, accepted, MEMORY)
        self._learn(self.length - 1, drafts, accepted, PROBE_MEMORY)
        self._judge(accepted + 1)

    def expected(self, rows: int) -> float:
        """Count tokens that a cycle of so many rows is expected to emit."""
        tokens = alive = 1.0
        for share in self._share[: rows - 1]:
            alive *= share
            tokens += alive
        return tokens

    def rival(self) -> int:
        """Return the best length that drafts, paying or not; 1 where only the plain step is known."""
        return max(self.costs, key=lambda rows: (rows > 1, self._rate(rows), rows))

    def _rate(self, rows: int) -> float:
        return self.expected(rows) / self.costs[rows]

    def _best(self) -> int:
        return max(self.costs, key=lambda rows: (self._rate(rows), rows))

    def _learn(self, first: int, end: int, accepted: int, memory: float) -> None:
        """Learn that slots from ``first`` to before ``end`` were verified, and all before ``accepted`` right."""
        if first >= end:
            return
        fade = min(1.0, (memory - 1.0) / self._reached[first]) if self._reached[first] else 1.0
        for slot in range(first, end):
            self._reached[slot] = self._reached[slot] * fade + (slot <= accepted)
            self._hit[slot] = self._hit[slot] * fade + (slot < accepted)
        self._share[0] = self._hit[0] / self._reached[0]
        for slot in range(1, len(self._share)):
            self._share[slot] = (self._hit[slot] + self._share[slot - 1]) / (self._reached[slot] + 1.0)
        self._stale = True

    def _choose(self) -> None:
        self._stale = False
        best = self._best()
        if best != self.length and self._rate(best) >= GAIN * self._rate(self.length):
            if best > self.length:
                self._held = 0
            elif self._held is not None:  # a length that did not hold was another probe in vain
                self._patience = FIRST_WAIT if self._held > self._patience else self._longer()
                self._held = None
            self.length, self._wait, self._probing, self._streak = best, self._patience, 0, []
            self._level = self.expected(best)
        elif self.expected(self.length) > RISE * self._level:
            self._patience, self._level = FIRST_WAIT, self.expected(self.length)
            self._wait = min(self._wait, FIRST_WAIT)

    def _judge(self, emitted: int) -> None:
        """Judge a probe: go on at once while some longer length pays over the streak, else wait longer."""
        self._probing = 0
        self._level = self.expected(self.length)
        self._streak.append(emitted)
        goal = self._rate(self.length) * len(self._streak)
        paid = any(
            sum(min(tokens, rows) for tokens in self._streak) >= goal * cost
            for rows, cost in self.costs.items()
            if rows > self.length
        )
        if len(self._streak) < TRIES or (paid and len(self._streak) < STREAK):
            self._wait = 1
        else:
            self._wait = self._patience = self._longer()
            self._streak = []

    def _longer(self) -> int:
        return min(2 * self._patience, LONGEST_WAIT)
