"""The Race tab in a browser: it runs, replays, stops and saves; with the bundled pair both texts are equal."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from dflash_local.events import Piece, Step
from tests.service.scripted import PartingSession, ScriptedFacts, ScriptedSession
from tests.ui.web.conftest import Visitor
from tests.ui.web.stand import Site, saved, visiting, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page


FAR = [  # an hour between two steps
    Step((Piece("<b>first "),), (1,), 0, 0, 0, 0.0),
    Step((Piece("las", origin="accepted"), Piece("t")), (2, 3), 3, 1, 4, 3600.0),
]


def start(visitor: Visitor) -> None:
    visitor.page.get_by_role("button", name="Race", exact=True).click()


def test_a_race_is_stopped_run_replayed_and_saved_and_tells_a_difference_or_no_drafter(visitor: Visitor) -> None:
    session = ScriptedSession(gate=threading.Event())
    sessions = session, ScriptedSession(steps=FAR), PartingSession(), ScriptedSession(facts=ScriptedFacts(drafter=None))
    with visiting(visitor, "Race", *sessions) as (here, page):
        assert page.locator("textarea:visible").input_value() == "Say hello.", "a built-in prompt is there already"
        check_stop(visitor, here, session)
        start(visitor)
        verdict = page.locator(".df-verdict")
        verdict.wait_for()
        check_race(page)
        assert [one.mode for one in session.requests[1:]] == ["ar", "ar", "dflash", "dflash"], "each is warmed up first"
        here.service.unload()
        start(visitor)
        check_replay(page)
        page.emulate_media(reduced_motion="reduce")
        start(visitor)
        page.locator(".df-measured").first.wait_for()
        page.locator(".df-ended").wait_for()
        here.service.unload()
        start(visitor)
        page.get_by_text("identical: no; first difference at token 1, margin 0.03").wait_for()
        here.service.unload()
        start(visitor)
        line = page.get_by_text("a race needs a drafter, and none was loaded (name one with --drafter)")
        line.wait_for()
        assert line.get_attribute("role") == "alert" and verdict.count() == 0


def check_stop(visitor: Visitor, here: Site, session: ScriptedSession) -> None:
    """Stop a race within its first reply."""
    start(visitor)
    wait_until(lambda: here.service.status.running == 1)
    visitor.page.locator("button:visible").get_by_text("Stop", exact=True).click()
    visitor.page.get_by_text("the race was stopped").wait_for()
    wait_until(lambda: here.service.status.running == 0)
    assert session.gate is not None and len(session.requests) == 1
    session.gate.set()


def check_replay(page: Page) -> None:
    """Show a race that lasts an hour to its end, and from the top again."""
    drafted, ended = page.locator(".df-drafted"), page.locator(".df-ended")
    drafted.get_by_text("<b>first").wait_for()
    assert ended.count() == 0 and "last" not in drafted.inner_text()
    quarter = page.get_by_role("button", name="Quarter speed")
    quarter.click()
    assert quarter.get_attribute("aria-pressed") == "true"
    page.get_by_role("button", name="To the end").click()
    ended.wait_for()
    assert "<b>first last" in drafted.inner_text() and drafted.locator("u").all_inner_texts() == ["<b>first ", "t"]
    assert page.locator(".df-won").count() == page.locator(".df-won.df-drafted").count() == 1
    page.get_by_role("button", name="Replay").click()
    page.locator(".df-race:not(.df-ended)").wait_for()
    assert "last" not in drafted.inner_text()


def check_race(page: Page) -> None:
    assert page.locator(".df-verdict").inner_text() == "identical: yes"
    lanes = [lane.inner_text() for lane in page.locator(".df-lane").all()]
    assert all("Hello, world!" in lane and "6 tokens" in lane for lane in lanes)
    assert "60.0 tok/s" in lanes[0] and "120.0 tok/s" in lanes[1]
    result = page.locator(".df-result").inner_text()
    assert result.startswith("2.0x") and "this run: 1.83x wall clock, 2.00x decode speed" in result and "2.50" in result
    name, content = saved(page.get_by_role("link", name="Save as .json"))
    assert name == "race.json"
    assert content["identical"] is True and content["decode_ratio"] == 2.0 and content["prompt"] == "Say hello."
    assert content["versions"]["dflash-local"] and content["ar"]["token_ids"] == [10, 11, 12, 13, 14, 15]
