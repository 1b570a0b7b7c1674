"""The screens over the bundled pair: the text is the model's, and both lanes of a race are equal."""

from __future__ import annotations

from typing import Any

import pytest
from textual.pilot import Pilot

from dflash_local.catalog.bundled import find
from dflash_local.service.backend import Backend
from dflash_local.service.chat_options import ChatOptions
from tests.ui.stage import Stage, play


@pytest.mark.slow  # the same with keys in a real terminal: test_terminal_session.py
@pytest.mark.needs_torch
def test_a_chat_and_a_race_with_the_demo_pair() -> None:
    def start(*_: object) -> Backend:
        from dflash_local.engine.load_pair import load
        from dflash_local.load_config import LoadConfig

        return load(find("demo"), LoadConfig(device="cpu"), None)

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await stage.send("Count from 1 to 30.", pilot)
        assert "28, 29, 30" in stage.screen_text and "float32: exact" in stage.screen_text
        await pilot.press("f5")
        await stage.until(lambda: getattr(stage.app.screen, "done", False), pilot, seconds=60)
        screen: Any = stage.app.screen
        race = screen.race
        assert race.first_difference is None and race.dflash.text.endswith("29, 30")
        assert race.dflash.finished.stats.mean_acceptance_length > 2
        await pilot.press("escape")
        await stage.until(lambda: "identical: yes" in stage.screen_text, pilot)

    stage = play(act, options=ChatOptions({"temperature": 0.0}), start=start)
    assert stage.chat_session.conversation.turns[-1].content.startswith("1, 2, 3")
