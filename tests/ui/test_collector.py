"""The collector's thresholds are held while the chat is on screen, and given back."""

from __future__ import annotations

import gc

from textual.pilot import Pilot

from dflash_local.errors import DFlashError
from dflash_local.ui.tui.collector import NEVER
from tests.ui.stage import Stage, play


def test_full_collections_wait_for_the_end_of_a_job() -> None:
    before = gc.get_threshold()
    seen: list[tuple[int, int, int]] = []

    async def act(stage: Stage, pilot: Pilot[DFlashError]) -> None:
        await stage.send("hi", pilot)
        seen.append(gc.get_threshold())
        assert gc.get_freeze_count() > 0, "what was there is looked at no more"

    play(act)
    assert seen == [(before[0], before[1], NEVER)]
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0
