"""The page of a saved race in a browser: it asks nobody for anything, plays, and holds hostile text."""

from __future__ import annotations

import json
from pathlib import Path

from dflash_local.report.race_file import SAVED
from tests.report.test_race_file import ABOUT, HOSTILE, hostile, race_of
from tests.service.scripted import ScriptedSession
from tests.ui.web.conftest import Visitor


def test_a_saved_race_plays_by_itself_and_by_key_and_asks_nobody(visitor: Visitor, tmp_path: Path) -> None:
    file, page = tmp_path / "race.html", visitor.page
    file.write_bytes(SAVED[".html"](race_of(ScriptedSession()), ABOUT))
    page.goto(file.as_uri())
    page.get_by_text("2.5 tokens a step, same text").wait_for()  # it begins of itself
    assert page.locator("#big").inner_text() == "2.0x" and page.title() == "dflash race: 2.0x · scripted"
    assert [lane.get_attribute("id") for lane in page.locator(".lane.won").all()] == ["dflash"]
    assert [said.inner_text() for said in page.locator(".said").all()] == ["Hello, world!\n"] * 2
    assert [own.inner_text() for own in page.locator("#dflash .own").all()] == ["Hello", "ld", "\n"]
    time = page.get_by_role("slider", name="Time of the race")
    time.focus()
    page.keyboard.press("Home")
    for _ in range(200):
        page.keyboard.press("ArrowRight")  # thousandths of 0.11 s: the second step has come
    assert page.locator("#dflash .last").all_inner_texts() == [", wor", "ld"]
    assert page.locator("#dflash [data-came].last").get_attribute("data-came") == "+3"
    assert page.locator("#big").inner_text() == "0.02 s" and page.locator(".lane.won").count() == 0
    page.evaluate("lanes[0].steps.forEach(step => { step.t_s *= 2; })")
    page.keyboard.press("ArrowRight")
    behind = [said.get_attribute("data-behind") for said in page.locator(".said").all()]
    assert behind == ["3 tokens behind", ""]
    page.get_by_role("button", name="Quarter speed").press("Enter")
    page.get_by_role("button", name="Play").press("Enter")
    page.locator(".lane.won").wait_for()
    page.get_by_role("button", name="Again").press("Enter")
    page.get_by_role("button", name="To the end").press("Enter")
    assert page.locator("#big").inner_text() == "2.0x"
    assert visitor.foreign == [file.as_uri()] and not visitor.complaints


def test_hostile_text_stays_text_and_reduced_motion_goes_to_the_end(visitor: Visitor, tmp_path: Path) -> None:
    file, page = tmp_path / "race.html", visitor.page
    raw = SAVED[".html"](hostile(), ABOUT)
    file.write_bytes(raw)
    page.emulate_media(reduced_motion="reduce", color_scheme="light")
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(file.as_uri())
    assert page.locator("#big").inner_text() == "2.0x", "at once"
    assert page.title().startswith("dflash race") and page.locator("script").count() == 2
    shown = page.locator("#dflash .said").text_content()
    assert shown is not None and shown.count("</script><script>document.title = 'taken'</script>␛[2J\\x9b31m") == 40
    assert "\u202e" not in shown and page.evaluate("document.documentElement.scrollWidth") == 390
    stored = json.loads(raw.split(b'id="race">')[1].split(b"</script>")[0])
    assert stored["text"].count(HOSTILE) == 40 and visitor.foreign == [file.as_uri()] and not visitor.complaints
