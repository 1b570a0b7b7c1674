"""Choose what a reply's next cycle verifies: copies of the text, the drafter's drafts, or nothing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from dflash_local.drafters.kinds import OWN
from dflash_local.engine.copied_drafts import CopiedDrafts
from dflash_local.engine.cycle_costs import ContextGrowth
from dflash_local.engine.drafter_choice import Chosen, DrafterChoice
from dflash_local.engine.runner import Cycle, Runner
from dflash_local.engine.text_kind import KINDS
from dflash_local.engine.verify_length import VerifyLength
from dflash_local.text_index import TextIndex

COPIES = "copies"  # what their worth is kept by, beside the kinds of text
NEAR = 512  # tokens by which a context grows before costs are found anew


class Scheduler:
    """Launches the cycles of replies that are drafted, each the one from which most tokens a millisecond are expected.

    The text does not depend on what is chosen: a draft is accepted where it equals the target's own choice, wherever it
    comes from (``engine.verify_length``).

    Copies are looked up while the device works, in a text that lacks what its present cycle emits. Where they promise
    more than what the drafter's cycles of late brought, the scheduler waits until all of the text is known, and looks
    again. So text that does not repeat costs no time.

    What a drafter is worth differs by the kind of text (``engine.text_kind``): one that was trained on answers may not
    pay while the target thinks. So each kind has a choice of its own among the drafters.

    Attributes:
        choice: among the drafters in the present kind of text; None where there is none, where the length of its cycles
            is fixed, and where drafters are used no more in this reply.
    """

    def __init__(self, runner: Runner, block: int, index: TextIndex, fixed: bool = False) -> None:
        """Begin with nothing known.

        Args:
            block: rows of the drafter's longest cycle; one of copies may be longer. index: of the runner's sequence.
            fixed: the drafter's cycles have ``block`` rows, and those of copies all that there are, up to ``block``.
        """
        self._runner, drafts, growth = runner, runner.proposer is not None, runner.growth
        self._choices: dict[str, DrafterChoice] = {}  # by kind of text
        # Cycles on their way: what chose them, and the value that was promised where copies were found, too.
        self._launched = deque[tuple[DrafterChoice, Chosen, float | None] | None]()
        self._copied: CopiedDrafts | None = None
        if not fixed and drafts:
            for kind in KINDS:
                pass_ms, grown = (runner.wait_ms, _draft_ms(runner)), ContextGrowth(growth.step_ms, growth.drafted_ms)
                lengths = [VerifyLength(runner.costs, block, runner.experts, *pass_ms, grown)]
                if runner.own_costs:  # as many drafts are made as are verified
                    longest, grown = max(runner.own_costs), ContextGrowth(growth.step_ms, growth.own_ms)
                    lengths.append(VerifyLength(runner.own_costs, longest, runner.experts, math.inf, growth=grown))
                self._choices[kind] = DrafterChoice(lengths)
        if not fixed and runner.verify_costs:
            longest, grown = max(runner.verify_costs), ContextGrowth(growth.step_ms, growth.step_ms)
            self._copied = CopiedDrafts(index, runner.verify_costs, longest, runner.experts, grown)
        elif not drafts:
            self._copied = CopiedDrafts(index, {}, block)
        self.choice: DrafterChoice | None = None
        self._looks_back = 0  # tokens of context that the costs are of by now

    @staticmethod
    def adapts(runner: Runner, block: int) -> bool:
        """Return whether the costs are known that lengths are chosen by."""
        costs = runner.verify_costs if runner.proposer is None else runner.costs
        usable = [rows for rows in costs if rows <= block]
        return 1 in usable and len(usable) > 1

    @property
    def learnt(self) -> dict[str, list[float]]:
        """Return what ``recall`` of a later one takes: by kind of text and drafter, and of copies."""
        return {name: part.learnt for name, part in self._parts.items()}

    def recall(self, learnt: Mapping[str, list[float]]) -> None:
        """Begin with what was learnt before; with nothing where that is of another block, or cannot be."""
        for name, part in self._parts.items():
            numbers = learnt.get(name, [])
            if len(numbers) == len(part.learnt) and all(0.0 <= each < math.inf for each in numbers):
                part.recall(numbers)
        for choice in self._choices.values():
            choice.start()

    @property
    def _parts(self) -> dict[str, VerifyLength | CopiedDrafts]:
        found: dict[str, VerifyLength | CopiedDrafts] = {}
        for kind, choice in self._choices.items():
            found |= zip((kind, f"{kind}, {OWN}"), choice.controls)
        return found | ({} if self._copied is None else {COPIES: self._copied})

    def begin(self, kind: str) -> None:
        """Begin a reply, in this kind of text."""
        self._launched.clear()
        for choice in self._choices.values():
            choice.begin()
        if self._copied is not None:
            self._copied.begin()
        self.choice = self._choices.get(kind)

    def enter(self, kind: str) -> None:
        """Go on in this kind of text."""
        if self.choice is not None:
            self.choice = self._choices[kind]

    def stop_drafting(self) -> None:
        """Use drafters no more in this reply."""
        self.choice = None
        self._runner.set_block(1)

    def launch(self) -> None:
        """Launch the next cycle."""
        self._look_back(len(self._runner.ids) // NEAR * NEAR)
        (copied, found), choice = self._copies(), self.choice
        if copied or choice is None:
            self._launched.append(None)
            return self._runner.launch(copied=copied)
        chosen = choice.next()
        self._launched.append((choice, chosen, choice.value if found and choice.drafts else None))
        self._runner.set_block(chosen.rows, own=chosen.drafter > 0)
        self._runner.launch(chosen.cut)

    def add(self, cycle: Cycle) -> None:
        """Learn from a cycle that has become known, the oldest that was launched."""
        launched = self._launched.popleft()
        if launched is not None:
            choice, chosen, promised = launched
            if promised is not None and self._copied is not None:
                brought = choice.controls[chosen.drafter].worth(cycle.rows, cycle.accepted, cycle.confidences)
                self._copied.add_rival(brought - promised)
            choice.add(chosen, cycle)
        elif cycle.copied and self._copied is not None:
            self._copied.add(cycle.rows, cycle.experts)

    def _look_back(self, tokens: int) -> None:
        """Have costs follow the context."""
        if tokens == self._looks_back:
            return
        self._looks_back = tokens
        further = tokens - self._runner.growth.tokens
        for choice in self._choices.values():
            for control in choice.controls:
                control.look_back(further)
        if self._copied is not None:
            self._copied.look_back(further)

    def _copies(self) -> tuple[tuple[int, ...], bool]:
        """Return ids to verify in place of the drafter's, none where these promise more; and whether any were found."""
        copied, runner = self._copied, self._runner
        if copied is None:
            return (), False
        runner.settle(newest=1 if copied.costs else 0)
        found = copied.find(runner.ids)
        rows = copied.rows(found, self.choice)
        if rows > 1:
            runner.settle()
            if found.behind < len(runner.ids):
                found = copied.find(runner.ids)
                rows = copied.rows(found, self.choice)
        return found.ids[: rows - 1], bool(found.ids)


def _draft_ms(runner: Runner) -> float:
    """Return milliseconds of the proposer's pass; infinite where cycles without it were not measured.

    Of the shortest block: the more rows, the more a mixture's drafts differ from given ids in the experts they take.
    """
    fewest = min(rows for rows in runner.costs if rows > 1)
    return max(runner.costs[fewest] - runner.verify_costs.get(fewest, -math.inf), 0.0)
