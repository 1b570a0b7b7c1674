"""Choose what a reply's next cycle verifies: copies of the text, the drafter's drafts, or nothing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from dflash_local.engine.copied_drafts import CopiedDrafts
from dflash_local.engine.runner import Cycle, Runner
from dflash_local.engine.text_index import TextIndex
from dflash_local.engine.text_kind import KINDS
from dflash_local.engine.verify_length import VerifyLength

COPIES = "copies"  # what their worth is kept by, beside the kinds of text


class Scheduler:
    """Launches the cycles of replies that are drafted, each the one from which most tokens a millisecond are expected.

    The text does not depend on what is chosen: a draft is accepted where it equals the target's own choice, wherever it
    comes from (``engine.verify_length``).

    Copies are looked up while the device works, in a text that lacks what its present cycle emits. Where they promise
    more than what the drafter's cycles of late brought, the scheduler waits until all of the text is known, and looks
    again. So text that does not repeat costs no time.

    What a drafter is worth differs by the kind of text (``engine.text_kind``): one that was trained on answers may not
    pay while the target thinks. So each kind has a controller of its own.

    Attributes:
        control: of the drafter's cycles in the present kind of text; None where there is no drafter, where their length
            is fixed, and where the drafter is used no more in this reply.
    """

    def __init__(self, runner: Runner, block: int, index: TextIndex, fixed: bool = False) -> None:
        """Begin with nothing known.

        Args:
            block: rows of a drafter's longest cycle; one of copies may be longer. index: of the runner's sequence.
            fixed: a drafter's cycles have ``block`` rows, and those of copies all that there are, up to ``block``.
        """
        self._runner, drafts = runner, runner.proposer is not None
        self._lengths: dict[str, VerifyLength] = {}  # by kind of text
        self._launched = deque[VerifyLength | None]()  # what chose the cycles on their way
        self._copied: CopiedDrafts | None = None
        if not fixed and drafts:
            measured = runner.costs, block, runner.experts, runner.wait_ms
            self._lengths = {kind: VerifyLength(*measured) for kind in KINDS}
        if not fixed and runner.verify_costs:
            self._copied = CopiedDrafts(index, runner.verify_costs, max(runner.verify_costs), runner.experts)
        elif not drafts:
            self._copied = CopiedDrafts(index, {}, block)
        self.control: VerifyLength | None = None

    @staticmethod
    def adapts(runner: Runner, block: int) -> bool:
        """Return whether the costs are known that lengths are chosen by."""
        costs = runner.verify_costs if runner.proposer is None else runner.costs
        usable = [rows for rows in costs if rows <= block]
        return 1 in usable and len(usable) > 1

    @property
    def learnt(self) -> dict[str, list[float]]:
        """Return what ``recall`` of a later one takes: by kind of text, and of copies."""
        return {name: part.learnt for name, part in self._parts.items()}

    def recall(self, learnt: Mapping[str, list[float]]) -> None:
        """Begin with what was learnt before; with nothing where that is of another block, or cannot be."""
        for name, part in self._parts.items():
            numbers = learnt.get(name, [])
            if len(numbers) == len(part.learnt) and all(0.0 <= each < math.inf for each in numbers):
                part.recall(numbers)

    @property
    def _parts(self) -> dict[str, VerifyLength | CopiedDrafts]:
        return self._lengths | ({} if self._copied is None else {COPIES: self._copied})

    def begin(self, kind: str) -> None:
        """Begin a reply, in this kind of text."""
        self._launched.clear()
        for part in self._parts.values():
            part.begin()
        self.control = self._lengths.get(kind)

    def enter(self, kind: str) -> None:
        """Go on in this kind of text."""
        if self.control is not None:
            self.control = self._lengths[kind]

    def stop_drafting(self) -> None:
        """Use the drafter no more in this reply."""
        self.control = None
        self._runner.set_block(1)

    def launch(self) -> None:
        """Launch the next cycle."""
        copied = self._copies()
        self._launched.append(None if copied else self.control)
        if copied:
            return self._runner.launch(copied=copied)
        cut = None
        if self.control is not None:
            self._runner.set_block(self.control.next_rows())
            cut = self.control.cut if self.control.waits else None
        self._runner.launch(cut)

    def add(self, cycle: Cycle) -> None:
        """Learn from a cycle that has become known, the oldest that was launched."""
        control = self._launched.popleft()
        if cycle.copied and self._copied is not None:
            self._copied.add(cycle.rows, cycle.experts)
        elif control is not None:
            control.add(cycle.rows, cycle.accepted, cycle.confidences, cycle.experts)

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
