"""The Race tab in a browser: it runs, replays, stops and saves; with the bundled pair both texts are equal."""

from __future__ import annotations

import json
import threading

from tests.service.scripted import PartingSession, ScriptedFacts, ScriptedSession
from tests.ui.web.conftest import Visitor
from tests.ui.web.stand import Site, site, wait_until


def enter(visitor: Visitor, here: Site) -> None:
    visitor.page.goto(here.url)
    visitor.page.locator(".df-figures").wait_for()
    visitor.page.get_by_role("tab", name="Race").click()
    visitor.page.locator(".df-lanes").wait_for()


def start(visitor: Visitor) -> None:
    visitor.page.get_by_role("button", name="Race", exact=True).click()


def leave(visitor: Visitor) -> None:
    assert visitor.foreign == [] and visitor.complaints == []
    visitor.page.goto("about:blank")


def test_a_race_is_run_replayed_and_saved(visitor: Visitor) -> None:
    session = ScriptedSession()
    page = visitor.page
    with site(session) as here:
        enter(visitor, here)
        assert page.locator("textarea:visible").input_value() == "Say hello.", "a built-in prompt is there already"
        start(visitor)
        page.locator(".df-verdict").wait_for()
        assert page.locator(".df-verdict").inner_text() == "identical: yes"
        lanes = [lane.inner_text() for lane in page.locator(".df-lane").all()]
        assert all("Hello, world!" in lane and "6 tokens" in lane for lane in lanes)
        assert "60.0 tok/s" in lanes[0] and "120.0 tok/s" in lanes[1]
        result = page.locator(".df-result").inner_text()
        assert "this run: 1.83x wall clock, 2.00x decode speed" in result and "2.50" in result
        with page.expect_download() as saving:
            page.get_by_role("link", name="Save as JSON").click()
        assert saving.value.suggested_filename == "race.json"
        content = json.loads(saving.value.path().read_text(encoding="utf-8"))
        page.get_by_role("tab", name="Chat").click()
        leave(visitor)
    assert [request.mode for request in session.requests] == ["ar", "ar", "dflash", "dflash"], "each is warmed up first"
    assert content["identical"] is True and content["decode_ratio"] == 2.0 and content["prompt"] == "Say hello."
    assert content["versions"]["dflash-local"] and content["ar"]["token_ids"] == [10, 11, 12, 13, 14, 15]


def test_a_first_difference_and_a_missing_drafter_are_told(visitor: Visitor) -> None:
    with site(PartingSession(), ScriptedSession(facts=ScriptedFacts(drafter=None))) as here:
        enter(visitor, here)
        start(visitor)
        verdict = visitor.page.locator(".df-verdict")
        verdict.wait_for()
        assert verdict.inner_text().startswith("identical: no; first difference at token 1, margin 0.03")
        here.service.unload()
        start(visitor)
        line = visitor.page.get_by_text("a race needs a drafter, and none was loaded (name one with --drafter)")
        line.wait_for()
        assert line.get_attribute("role") == "alert" and verdict.count() == 0
        leave(visitor)


def test_a_race_stops_and_the_next_one_runs(visitor: Visitor) -> None:
    gate = threading.Event()
    session = ScriptedSession(gate=gate)
    page = visitor.page
    with site(session) as here:
        enter(visitor, here)
        start(visitor)
        wait_until(lambda: here.service.status.running == 1)
        page.locator("button:visible").get_by_text("Stop", exact=True).click()
        page.get_by_text("the race was stopped").wait_for()
        wait_until(lambda: here.service.status.running == 0)
        assert len(session.requests) == 1
        gate.set()
        start(visitor)
        page.locator(".df-verdict").wait_for()
        leave(visitor)
