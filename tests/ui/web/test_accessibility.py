"""Every tab under axe-core, in both themes: no finding of any weight."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.service.scripted import ScriptedSession
from tests.ui.web.conftest import Visitor
from tests.ui.web.stand import READY, visiting
from tests.ui.web.test_chat_tab import open_settings, said, send, status

if TYPE_CHECKING:
    from playwright.sync_api import Page

FINDINGS = "axe.run().then((found) => found.violations.map((one) => `${one.id}: ${one.nodes[0].html}`))"


def check(page: Page, script: str) -> None:
    for frame in page.frames:
        frame.add_style_tag(content="* { transition: none !important; }")  # colours in between are nobody's choice
        frame.evaluate(f"{script}; undefined")
    for theme in ("dark", "light"):
        page.evaluate("theme => document.body.classList.toggle('dark', theme === 'dark')", theme)
        assert page.evaluate(FINDINGS) == [], theme


def test_no_tab_has_a_finding_in_either_theme(visitor: Visitor) -> None:
    axe = pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    script = Path(axe.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
    session = ScriptedSession(steps=(*said("I wonder", channel="thinking"), *said("hello ", "world")))
    with visiting(visitor, "Chat", session) as (_, page):
        check(page, script)
        send(page, "hello")
        status(page, "2.5 a step")
        page.get_by_text("Thinking (").wait_for()
        open_settings(page)
        check(page, script)
        for tab in ("Models", "Bench", "About", "Race"):
            page.get_by_role("tab", name=tab).click()
            for part in READY[tab]:
                page.locator(part).first.wait_for()
            check(page, script)
        page.get_by_role("button", name="Race", exact=True).click()
        page.frame_locator(".df-replay").locator(".won").wait_for()
        check(page, script)
