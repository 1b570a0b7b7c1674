"""The memory gauge: how full the device is, unknown where nobody tells, and never waited for."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from textual.pilot import Pilot

from dflash_local.planner.occupancy import Occupancy
from dflash_local.ui.readings import Readings
from dflash_local.ui.tui import memory_watch
from dflash_local.ui.tui.memory_watch import MemoryWatch
from dflash_local.ui.tui.widgets.meter import memory
from tests.ui.stage import Stage, play

GIB = 2**30


def test_the_meter_shows_the_memory_of_what_holds_the_pair() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await stage.until(lambda: "unknown" in stage.screen_text, pilot)
        stage.chat_session.held = Occupancy(3 * GIB, 12 * GIB, "the GPU")
        stage.chat.memory.look()
        shown = ("Memory of the GPU", "████████▎░░░", "3.00 GiB of 12.00 GiB (25%)")
        await stage.until(lambda: all(words in stage.screen_text for words in shown), pilot)
        assert "mem 25%" in stage.screen_text, "also in the line that a narrow screen has"

    play(act, size=(120, 50))


def test_a_bar_is_of_used_and_total_or_there_is_none() -> None:
    assert memory(Readings()) == "unknown"
    assert memory(Readings(memory=Occupancy(1, None, "x"))) == "unknown" == memory(Readings(memory=Occupancy(1, 0)))
    full = memory(Readings(memory=Occupancy(13 * GIB, 12 * GIB, "x")))
    assert full.splitlines() == ["█" * 33, "13.00 GiB of 12.00 GiB (108%)"]


def test_a_driver_that_hangs_holds_nothing_up() -> None:
    gate = threading.Event()

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        stage.chat_session.read = lambda: Occupancy() if gate.wait(30) else Occupancy(1, 1)
        stage.chat.memory.look()
        await stage.send("hi", pilot)
        assert "Hello, world!" in stage.screen_text

    play(act)
    gate.set()


def test_what_has_not_changed_is_not_told_again_and_a_look_comes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_watch, "PERIOD_S", 3600.0)
    found, told, looked = [Occupancy(1, 2, "x")], list[Occupancy](), threading.Semaphore(0)

    def read() -> Occupancy:
        looked.release()
        return found[0]

    heard = threading.Event()

    def tell(occupancy: Occupancy) -> None:
        told.append(occupancy)
        heard.set()

    watch = MemoryWatch(read, tell)
    watch.start()
    assert heard.wait(60) and looked.acquire(timeout=60)
    watch.look()
    assert looked.acquire(timeout=60), "without waiting for the next turn"
    heard.clear()
    found[0] = Occupancy(2, 2, "x")
    watch.look()
    assert heard.wait(60) and told == [Occupancy(1, 2, "x"), Occupancy(2, 2, "x")]
    watch.stop()
