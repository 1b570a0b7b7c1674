"""The collector's thresholds are held while the chat is on screen, and given back."""

from __future__ import annotations

import gc
import weakref

from textual.pilot import Pilot

from dflash_local.errors import DFlashError
from dflash_local.ui.tui.collector import NEVER, WHOLE_EVERY, Collector
from tests.ui.stage import Stage, play


def test_full_collections_wait_for_the_end_of_a_job() -> None:
    before = gc.get_threshold()
    seen: list[tuple[int, int, int]] = []

    async def act(stage: Stage, pilot: Pilot[DFlashError]) -> None:
        gc.unfreeze()
        await stage.send("hi", pilot)
        seen.append(gc.get_threshold())
        await stage.until(lambda: gc.get_freeze_count() > 0, pilot)

    play(act)
    assert seen == [(before[0], before[1], NEVER)]
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


def test_what_left_the_screen_is_collected_in_the_end() -> None:
    class Shown:
        def __init__(self) -> None:
            self.parent = self

    collector = Collector()
    collector.hold()
    try:
        shown = Shown()
        gone = weakref.ref(shown)
        collector.settle()
        del shown
        collector.settle()
        assert gone() is not None, "looked at no more"
        for _ in range(WHOLE_EVERY - 2):
            collector.settle()
        assert gone() is None
    finally:
        collector.let_go()
