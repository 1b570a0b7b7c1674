"""The panel of figures and the line that stands for it: bars, gauges, what comes first where room is short."""

from __future__ import annotations

from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Sparkline

from dflash_local.events import Step
from dflash_local.planner.occupancy import Occupancy
from dflash_local.ui.readings import Readings
from dflash_local.ui.tui.widgets.bars import position_lines
from dflash_local.ui.tui.widgets.meter import acceptance, one_line
from tests.ui.stage import Stage, play


@pytest.mark.parametrize("count, lines", [(0, 0), (3, 3), (8, 8), (9, 5), (15, 8), (16, 8), (31, 16)])
def test_many_positions_stand_beside_each_other(count: int, lines: int) -> None:
    shown = position_lines((1.0,) * count, 33)
    assert len(shown) == lines and all(len(line) <= 33 for line in shown)
    numbers = [word for line in shown for word in line.split() if word.isdigit()]
    assert sorted(map(int, numbers)) == list(range(1, count + 1))


def test_a_bar_is_as_long_as_its_share() -> None:
    assert position_lines((0.5, 0.0), 28) == [" 1 ██████████            50%", " 2" + " " * 22 + "  0%"]


def test_the_line_has_the_alarm_before_what_may_be_cut() -> None:
    readings = Readings(state="ready", mean=42.0, acceptance_mean=1.1, context=512, used=11, precision="float32: exact")
    readings.alarms.append("acceptance\nlow")
    readings.memory = Occupancy(1, 4, "the GPU")
    shown = "ready · 42.0 tok/s · acceptance 1.10 · ▲ acceptance␊low · ctx 11/512 · float32: exact · mem 25%"
    assert one_line(readings) == shown


def test_different_experts_stand_beside_the_rows_that_took_them() -> None:
    readings = Readings(block_size=8)
    readings.begin("dflash")
    shown = []
    for rows, experts in ((8, 41.4), (8, None), (4, None), (4, 19.0)):
        readings.take(Step((), (1, 2), rows - 1, 1, rows, 1.0, experts=experts))
        shown.append(acceptance(readings).split("\n")[1:])
    found, waiting = ["verifying 8 rows a cycle", "41 different experts a layer"], ["verifying 4 rows a cycle"]
    assert shown == [found, found, waiting, [*waiting, "19 different experts a layer"]]
    readings.begin("dflash")
    assert readings.verifying == ()


def test_before_the_first_reply_no_bar_is_drawn() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        assert stage.chat.query_one(Sparkline).data == [] and not stage.chat.query_one("#alarms").display
        await stage.send("hi", pilot)
        await stage.until(lambda: len(stage.chat.query_one(Sparkline).data) > 1, pilot)

    play(act)
