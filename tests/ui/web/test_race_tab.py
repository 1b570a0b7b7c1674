"""The Race tab in a browser: it runs, replays, stops and saves; with the bundled pair both texts are equal."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from dflash_local.events import Piece, Step
from tests.service.scripted import PartingSession, ScriptedFacts, ScriptedSession
from tests.ui.web.conftest import Visitor
from tests.ui.web.stand import Site, saved, visiting, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import FrameLocator, Page


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
        check_race(page)
        assert [one.mode for one in session.requests[1:]] == ["ar", "ar", "dflash", "dflash"], "each is warmed up first"
        here.service.unload()
        start(visitor)
        check_replay(page)
        page.emulate_media(reduced_motion="reduce")
        start(visitor)
        replay(page).locator("#dflash.won").wait_for()
        here.service.unload()
        start(visitor)
        replay(page).locator("#verdict").get_by_text(
            "identical: no; first difference at token 1, margin 0.03"
        ).wait_for()
        here.service.unload()
        start(visitor)
        line = page.get_by_text("a race needs a drafter, and none was loaded (name one with --drafter)")
        line.wait_for()
        assert line.get_attribute("role") == "alert" and page.locator(".df-replay").count() == 0


def check_stop(visitor: Visitor, here: Site, session: ScriptedSession) -> None:
    """Stop a race within its first reply."""
    start(visitor)
    wait_until(lambda: here.service.status.running == 1)
    visitor.page.locator("button:visible").get_by_text("Stop", exact=True).click()
    visitor.page.get_by_text("the race was stopped").wait_for()
    wait_until(lambda: here.service.status.running == 0)
    assert session.gate is not None and len(session.requests) == 1
    session.gate.set()


def replay(page: Page) -> FrameLocator:
    return page.frame_locator(".df-replay")


def check_replay(page: Page) -> None:
    """Show a race that lasts an hour to its end, and from the top again."""
    frame = replay(page)
    drafted = frame.locator("#dflash .said")
    drafted.get_by_text("<b>first").wait_for()
    assert frame.locator(".won").count() == 0 and "last" not in drafted.inner_text()
    quarter = frame.get_by_role("button", name="Quarter speed")
    quarter.click()
    assert quarter.get_attribute("aria-pressed") == "true"
    frame.get_by_role("button", name="To the end").click()
    assert drafted.inner_text() == "<b>first last"
    assert [lane.get_attribute("id") for lane in frame.locator(".won").all()] == ["dflash"]
    frame.get_by_role("button", name="Again").click()
    assert frame.locator(".won").count() == 0 and "last" not in drafted.inner_text()
    assert frame.locator("html").evaluate("root => getComputedStyle(root).colorScheme") == "light"
    page.evaluate("document.body.classList.add('dark')")
    frame.locator('html[style*="color-scheme: dark"]').wait_for()
    page.evaluate("document.body.classList.remove('dark')")
    high = page.locator(".df-replay").evaluate("frame => frame.offsetHeight - frame.contentDocument.body.scrollHeight")
    assert high == 0, "it scrolls with the page"


def check_race(page: Page) -> None:
    frame = replay(page)
    frame.get_by_text("2.5 tokens a step, same text").wait_for()
    lanes = [lane.inner_text() for lane in frame.locator(".lane").all()]
    assert all("Hello, world!" in lane and "6 tokens" in lane for lane in lanes)
    assert "60.0 tok/s" in lanes[0] and "120.0 tok/s" in lanes[1]
    assert frame.locator("#big").inner_text() == "2.0x"
    verdict = "identical: yes · this run: 1.83x wall clock, 2.00x decode speed"
    assert frame.locator("#verdict").inner_text() == verdict
    name, content = saved(page.get_by_role("link", name="Save as .json"))
    assert name == "race.json"
    assert content["identical"] is True and content["decode_ratio"] == 2.0 and content["prompt"] == "Say hello."
    assert "--context 512 --dtype float32 --device cpu --engine reference" in content["command"], "as it is loaded"
    assert content["versions"]["dflash-local"] and content["ar"]["token_ids"] == [10, 11, 12, 13, 14, 15]
