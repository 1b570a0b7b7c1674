"""Choose what a reply's next cycle verifies: copies of the text, the drafter's drafts, or nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dflash_local.engine.copied_drafts import CopiedDrafts
from dflash_local.engine.runner import Cycle, Runner
from dflash_local.engine.text_index import TextIndex
from dflash_local.engine.verify_length import VerifyLength


class Scheduler:
    """Launches the cycles of replies that are drafted, each the one from which most tokens a millisecond are expected.

    The text does not depend on what is chosen: a draft is accepted where it equals the target's own choice, wherever it
    comes from (``engine.verify_length``).

    Copies are looked up while the device works, in a text that lacks what its present cycle emits. Where they promise
    more than what the drafter's cycles of late brought, the scheduler waits until all of the text is known, and looks
    again. So text that does not repeat costs no time.

    Attributes:
        control: of the drafter's cycles; None where there is no drafter, where their length is fixed, and where the
            drafter is used no more in this reply.
    """

    def __init__(self, runner: Runner, block: int, index: TextIndex, fixed: bool = False) -> None:
        """Begin with nothing known.

        Args:
            block: rows of a drafter's longest cycle; one of copies may be longer. index: of the runner's sequence.
            fixed: a drafter's cycles have ``block`` rows, and those of copies all that there are, up to ``block``.
        """
        self._runner, drafts = runner, runner.proposer is not None
        self._lengths: VerifyLength | None = None
        self._copied: CopiedDrafts | None = None
        if not fixed and drafts:
            self._lengths = VerifyLength(runner.costs, block, runner.experts, runner.wait_ms)
        if not fixed and runner.verify_costs:
            self._copied = CopiedDrafts(index, runner.verify_costs, max(runner.verify_costs), runner.experts)
        elif not drafts:
            self._copied = CopiedDrafts(index, {}, block)
        self.control = self._lengths

    @staticmethod
    def adapts(runner: Runner, block: int) -> bool:
        """Return whether the costs are known that lengths are chosen by."""
        costs = runner.verify_costs if runner.proposer is None else runner.costs
        usable = [rows for rows in costs if rows <= block]
        return 1 in usable and len(usable) > 1

    @property
    def learnt(self) -> list[float]:
        """Return what ``recall`` of a later one takes."""
        return [each for part in (self._lengths, self._copied) if part is not None for each in part.learnt]

    def recall(self, learnt: Sequence[float]) -> None:
        """Begin with what was learnt before; with nothing where that is of another block, or cannot be."""
        if len(learnt) == len(self.learnt) and all(0.0 <= each < math.inf for each in learnt):
            numbers = iter(learnt)
            for part in (self._lengths, self._copied):
                if part is not None:
                    part.recall([next(numbers) for _ in part.learnt])

    def begin(self) -> None:
        """Begin a reply."""
        self.control = self._lengths
        if self.control is not None:
            self.control.begin()
        if self._copied is not None:
            self._copied.begin()

    def stop_drafting(self) -> None:
        """Use the drafter no more in this reply."""
        self.control = None
        self._runner.set_block(1)

    def launch(self) -> None:
        """Launch the next cycle."""
        if copied := self._copies():
            return self._runner.launch(copied=copied)
        cut = None
        if self.control is not None:
            self._runner.set_block(self.control.next_rows())
            cut = self.control.cut if self.control.waits else None
        self._runner.launch(cut)

    def add(self, cycle: Cycle) -> None:
        """Learn from a cycle that has become known."""
        if cycle.copied and self._copied is not None:
            self._copied.add(cycle.rows, cycle.experts)
        elif not cycle.copied and self.control is not None:
            self.control.add(cycle.rows, cycle.accepted, cycle.confidences, cycle.experts)

    def _copies(self) -> tuple[int, ...]:
        """Return ids to verify in place of the drafter's; none where these promise more."""
        copied, runner = self._copied, self._runner
        if copied is None:
            return ()
        runner.settle(newest=1 if copied.costs else 0)
        found = copied.find(runner.ids)
        rows = copied.rows(found, self.control)
        if rows > 1:
            runner.settle()
            if found.behind < len(runner.ids):
                found = copied.find(runner.ids)
                rows = copied.rows(found, self.control)
        return found.ids[: rows - 1]
