"""The panel of figures and the line that stands for it: bars, what comes first where room is short, the memory."""

from __future__ import annotations

import threading

import pytest
from textual.widgets import Sparkline

from dflash_local.events import Queued, Started, Step
from dflash_local.planner.occupancy import Occupancy
from dflash_local.ui.figures import Figure, figures
from dflash_local.ui.readings import Readings
from dflash_local.ui.tui.meter import figure_lines, one_line
from tests.ui.stage import Stage, staged

GIB = 2**30


def shown(readings: Readings, title: str) -> list[str]:
    return next(figure_lines(figure) for figure in figures(readings) if figure.title.startswith(title))


@pytest.mark.parametrize("count, lines", [(0, 0), (3, 3), (8, 8), (9, 5), (15, 8), (16, 8), (31, 16)])
def test_many_bars_stand_beside_each_other(count: int, lines: int) -> None:
    found = figure_lines(Figure("", bars=tuple((f"{slot}", 1.0) for slot in range(1, count + 1))), 33)
    assert len(found) == lines and all(len(line) <= 33 for line in found)
    numbers = [word for line in found for word in line.split() if word.isdigit()]
    assert sorted(map(int, numbers)) == list(range(1, count + 1))


def test_a_bar_is_as_long_as_its_share() -> None:
    bars = (("1", 0.5), ("2", 0.0), ("3", 1.2))
    assert figure_lines(Figure("", bars=bars), 28) == [
        " 1 ██████████            50%",
        " 2" + " " * 22 + "  0%",
        " 3 " + "█" * 20 + " 120%",
    ]


def test_the_line_has_the_alarm_before_what_may_be_cut() -> None:
    readings = Readings(state="ready", mean=42.0, acceptance_mean=1.1, context=512, used=11, precision="float32: exact")
    readings.alarms.append("acceptance\nlow")
    readings.memory = Occupancy(1, 4, "the GPU")
    expected = "ready · 42.0 tok/s · acceptance 1.10 · ▲ acceptance␊low · ctx 11/512 · float32: exact · mem 25%"
    assert one_line(readings) == expected


def test_a_reply_that_is_set_aside_waits_and_goes_on() -> None:
    readings, states = Readings(), []
    readings.begin("dflash")
    for event in (Queued(0), Started(5, 0, 0.1), Queued(2), Step((), (1,), 0, 0, 1, 1.0)):
        readings.take(event)
        states.append(readings.state)
    assert states == ["waiting", "replying", "waiting, 2 before", "replying"]


def test_a_cycle_is_shown_by_its_rows_their_experts_and_where_drafts_come_from() -> None:
    readings = Readings(block_size=8)
    readings.begin("dflash")
    found = []
    for rows, experts in ((8, 41.4), (8, None), (4, None), (4, 19.0)):
        readings.take(Step((), (1, 2), rows - 1, 1, rows, 1.0, experts=experts))
        found.append(shown(readings, "Acceptance length")[1:])
    both, waiting = ["verifying 8 rows a cycle", "41 different experts a layer"], ["verifying 4 rows a cycle"]
    assert found == [both, both, waiting, [*waiting, "19 different experts a layer"]]
    readings.take(Step((), (1, 2), 7, 1, 8, 1.0, copied=1))
    assert readings.verifying == ("copying 8 rows a cycle",)
    readings.take(Step((), (1, 2), 4, 1, 5, 1.0, mtp=1))
    assert readings.verifying == ("verifying 5 rows of mtp",)
    readings.begin("dflash")
    assert readings.verifying == ()


def test_memory_is_of_used_and_total_or_unknown() -> None:
    for unknown in (Occupancy(), Occupancy(1, None, "x"), Occupancy(1, 0)):
        assert shown(Readings(memory=unknown), "Memory") == ["unknown"]
    assert shown(Readings(memory=Occupancy(13 * GIB, 12 * GIB)), "Memory")[-1] == "13.00 GiB of 12.00 GiB"


@staged(size=(120, 50))
async def test_the_panel_fills_with_the_reply_and_with_the_memory_whose_driver_may_hang(stage: Stage) -> None:
    assert stage.chat.query_one(Sparkline).data == [] and not stage.chat.query_one("#alarms").display
    await stage.send("hi")
    await stage.until(lambda: len(stage.chat.query_one(Sparkline).data or ()) > 1)
    stage.chat_session.held = Occupancy(3 * GIB, 12 * GIB, "the GPU")
    stage.chat.look_at_memory()
    await stage.shows("Memory of the GPU", "██████▌", " 25%", "3.00 GiB of 12.00 GiB", "mem 25%")
    await check_a_driver_that_hangs(stage)


async def check_a_driver_that_hangs(stage: Stage) -> None:
    """It holds nothing up, and is asked once."""
    gate, asked = threading.Event(), list[int]()

    def read() -> Occupancy:
        asked.append(1)
        return Occupancy() if gate.wait(30) else Occupancy(1, 1)

    await stage.until(lambda: stage.chat._memory is not None and not stage.chat._memory.running)
    stage.chat_session.read = read
    stage.chat.look_at_memory()
    stage.chat.look_at_memory()
    await stage.send("hi")
    assert stage.screen_text.count("Hello, world!") == 2 and asked == [1]
    gate.set()
