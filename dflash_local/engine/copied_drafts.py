"""Drafts that are copied from the text: whether they are worth a cycle, and how many of them. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dflash_local.engine.cycle_costs import NO_GROWTH, ContextGrowth, CycleCosts, MeasuredExperts
from dflash_local.engine.drafter_choice import DrafterChoice
from dflash_local.engine.survival import Survival
from dflash_local.text_index import Copies, TextIndex

RIVAL_LEAN, RIVAL_MEMORY = 8.0, 128.0  # cycles that brought what was promised before there are any; that are remembered


class CopiedDrafts:
    """What copies of a session's text are worth, learnt from all that were found, verified or not: soon the text itself
    tells how far they were right.

    Text that repeats is easy for a drafter, too. So what its cycles bring more than they promise where copies are found
    and left is learnt, and copies have to be worth that much more.
    """

    def __init__(
        self,
        index: TextIndex,
        costs: Mapping[int, float],
        block: int,
        experts: MeasuredExperts | None = None,
        growth: ContextGrowth = NO_GROWTH,
    ) -> None:
        """Begin with nothing known.

        Args:
            index: of the sequence, whoever else uses it. costs: milliseconds of a cycle without a drafter's pass, by
                its verified rows; empty where they are unknown: then all copies are verified.
            block: rows of the longest cycle, as of ``costs``. experts: what the costs were measured with. growth: of
                the costs with the context.
        """
        self._index, self._drafts = index, block - 1
        self._costs = CycleCosts(costs, experts, growth)
        self._survival = Survival(block - 1)
        self._rival, self._rivals = 0.0, RIVAL_LEAN  # the mean, and the cycles that it counts for
        self._unknown: list[Copies] = []  # those of which the text has yet to tell

    @property
    def learnt(self) -> list[float]:
        """Return what ``recall`` of later ones takes."""
        return self._survival.learnt

    def recall(self, learnt: Sequence[float]) -> None:
        """Begin with what was learnt before, of blocks as long."""
        self._survival.recall(learnt)

    @property
    def costs(self) -> Mapping[int, float]:
        """Return milliseconds of a cycle by its verified rows, as far as is known by now; empty where they are not."""
        return self._costs.by_rows

    def look_back(self, further: int) -> None:
        """Let cycles stand behind so many more tokens than those that were measured."""
        self._costs.look_back(further)

    def begin(self) -> None:
        """Begin a reply: what another one's text was to tell is never known."""
        self._unknown.clear()

    def find(self, ids: Sequence[int]) -> Copies:
        """Return what may follow a text, and learn how far earlier copies were right."""
        unknown = self._unknown
        self._unknown = [each for each in unknown if not self._known(each, ids)]
        found = self._index.find(ids, self._drafts)
        if found.ids and (not unknown or unknown[-1].behind < found.behind):
            self._unknown.append(found)
        return found

    def rows(self, copies: Copies, choice: DrafterChoice | None) -> int:
        """Return how many rows to verify of a cycle with these copies; 1 where they do not pay. ``choice``: of the
        cycle that would run instead; None: it is the plain step.
        """
        if not self.costs or not copies.ids:
            return len(copies.ids) + 1
        rate, rival = (1.0 / self.costs[1], 0.0) if choice is None else (choice.rate, choice.value)
        if choice is not None and choice.drafts:
            rival += self._rival
        tokens = self._survival.tokens_by_rows([copies.confidence] * len(copies.ids))
        worth = {rows: tokens[rows - 1] - rate * self.costs[rows] for rows in self.costs if rows <= len(copies.ids) + 1}
        best = max(worth, key=lambda rows: (worth[rows], rows))
        return best if worth[best] > rival else 1

    def add(self, rows: int, experts: float | None) -> None:
        """Learn what a cycle of copies cost. ``experts``: of ``Cycle``."""
        self._costs.add(rows, experts)

    def add_rival(self, more: float) -> None:
        """Learn from a drafter's cycle where copies were found: the tokens that it was worth more than it promised."""
        self._rivals = min(self._rivals + 1.0, RIVAL_MEMORY)
        self._rival += (more - self._rival) / self._rivals

    def _known(self, copies: Copies, ids: Sequence[int]) -> bool:
        """Learn from copies; returns False while the text has not told how far they were right."""
        followed = ids[copies.behind : copies.behind + len(copies.ids)]
        right = next((at for at, (one, other) in enumerate(zip(followed, copies.ids)) if one != other), len(followed))
        if right == len(followed) < len(copies.ids):
            return False
        self._survival.learn(len(copies.ids) + 1, right, [copies.confidence] * len(copies.ids))
        return True
