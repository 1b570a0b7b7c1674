"""A drafted reply's plain step on a machine that is slower or faster than it was at load."""

from __future__ import annotations

import time

import pytest

from dflash_local.engine.reply_figures import LEAST_PACED, ReplyFigures
from dflash_local.engine.runner import Cycle, PlainStep

AT_LOAD = PlainStep(0.1, "measured at load", {4: 0.2, 8: 0.4})


def _figures(monkeypatch: pytest.MonkeyPatch, spans: list[tuple[float, Cycle]], plain: PlainStep) -> ReplyFigures:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    figures = ReplyFigures("reference", "dflash", 8, 0, 8, plain)
    figures.prefilled()
    for seconds, cycle in spans:
        clock[0] += seconds
        figures.add(cycle)
    return figures


def test_it_is_at_the_pace_of_the_cycles_that_were_measured_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    of_4, of_8 = (Cycle((1, 2), rows - 1, 1, rows, 0.0, 0.0) for rows in (4, 8))
    others = [(9.0, Cycle((1, 2), 3, 1, 4, 0.0, 0.0, copied=True)), (9.0, Cycle((1,), 0, 0, 1, 0.0, 0.0))]
    slower = [(0.3, of_4), *others, (0.6, of_8), (0.3, of_4), (0.6, of_8)]  # half as long again
    found = _figures(monkeypatch, slower, AT_LOAD).plain
    assert found is not None and found.seconds == pytest.approx(0.15)
    assert found.source == "measured at load, at this reply's pace"
    assert _figures(monkeypatch, slower[: LEAST_PACED + 1], AT_LOAD).plain is AT_LOAD, "too few tell nothing"
    bare = PlainStep(0.1, "measured at load")
    assert _figures(monkeypatch, slower, bare).plain is bare, "nothing was measured beside it"
