"""What is learnt of a drafter belongs to a kind of text: thinking, an answer, a call of a tool, code."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_local.engine.cycle_costs import MeasuredGrowth
from dflash_local.engine.runner import Cycle
from dflash_local.engine.scheduler import Scheduler
from dflash_local.engine.text_kind import TextKind
from dflash_local.events import Piece
from dflash_local.text_index import TextIndex

COSTS = {1: 1.0, 2: 1.2, 4: 1.3, 8: 1.6}
REPLY = [
    ("thinking", "Which? ```x``` or\n```\n", "code"),
    ("final", "So:", "final"),
    ("final", "\n```py", "final"),
    ("final", "thon\nx = 1\n", "code"),
    ("final", "``", "code"),
    ("final", "`\nDone ``` it.\n", "final"),
    ("final", "  ```\n", "code"),
    ("tool", "{}", "tool"),
    ("final", "Bye", "final"),
]


def test_the_kind_follows_channels_and_fences() -> None:
    kind = TextKind("thinking")
    assert kind.name == "thinking"
    for channel, text, name in REPLY:
        kind.add(Piece(text, channel))  # type: ignore[arg-type]
        assert kind.name == name, text


class Launches:
    """A runner whose cycles become known two launches later; drafts are right in answers alone."""

    proposer, experts, wait_ms = True, None, 1e9
    verify_costs = own_costs = dict[int, float]()
    growth, ids = MeasuredGrowth(), ()

    def __init__(self) -> None:
        self.costs, self.rows, self.on_their_way = COSTS, 8, list[Cycle]()

    def set_block(self, rows: int, own: bool = False) -> None:
        self.rows = rows

    def launch(self, _cut: Any = None, copied: Any = ()) -> None:
        right = 7 if self.kind == "final" else 0
        self.on_their_way.append(Cycle((0,), self.rows - 1, min(right, self.rows - 1), self.rows, 0, 0))

    def write(self, scheduler: Scheduler, kind: str, cycles: int) -> list[int]:
        """Rows of so many cycles of a kind of text."""
        self.kind, rows = kind, []
        for _ in range(cycles):
            scheduler.enter(kind)
            scheduler.launch()
            rows.append(self.rows)
            if len(self.on_their_way) > 2:
                scheduler.add(self.on_their_way.pop(0))
        return rows


@pytest.mark.parametrize("first", ["thinking", "final"])
def test_thinking_that_is_not_worth_drafts_costs_an_answer_none(first: str) -> None:
    runner: Any = Launches()
    scheduler = Scheduler(runner, 8, TextIndex())
    scheduler.begin(first)
    runner.write(scheduler, "final", 60)
    assert runner.write(scheduler, "thinking", 200)[40:].count(1) > 120
    for _ in range(3):
        assert set(runner.write(scheduler, "final", 30)) == {8}, "at once, and it stays"
        assert runner.write(scheduler, "thinking", 30).count(1) >= 27, "at once"
    before = scheduler.learnt
    scheduler.begin("thinking")
    runner.on_their_way.clear()
    assert runner.write(scheduler, "thinking", 10) == [1] * 10 and scheduler.learnt == before
    scheduler.stop_drafting()
    assert set(runner.write(scheduler, "final", 5)) == {1}
