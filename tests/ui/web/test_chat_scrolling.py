"""The conversation on the page: its end is in view until the reader scrolls away, and there is a way back."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dflash_local.store.history import ChatFile
from dflash_local.store.records import Turn
from tests.service.scripted import ScriptedSession
from tests.ui.web.conftest import Visitor
from tests.ui.web.stand import visiting, wait_until
from tests.ui.web.test_chat_tab import said, send, status

if TYPE_CHECKING:
    from playwright.sync_api import Page

LINES = 120
BACK = "Jump to the latest"


class Paced:
    """A session that says line after line, as far as it is let."""

    def __init__(self) -> None:
        self._allowed = 0
        self._changed = threading.Condition()
        self.session = ScriptedSession(
            steps=said(*(f"line {n}\n\n" for n in range(1, LINES + 1))), on_step=self._await_turn
        )

    def allow(self, lines: int) -> None:
        with self._changed:
            self._allowed = lines
            self._changed.notify_all()

    def _await_turn(self, index: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: index < self._allowed, 30)


def place(page: Page) -> float:
    return float(page.locator(".df-talk [role=log]").evaluate("log => log.scrollTop"))


def to_the_end(page: Page) -> float:
    script = "log => log.scrollHeight - log.clientHeight - log.scrollTop"
    return float(page.locator(".df-talk [role=log]").evaluate(script))


def shown(page: Page, line: int) -> None:
    """Wait until a line has come, and for what Gradio does a moment after it."""
    page.locator(".df-talk").get_by_text(f"line {line}", exact=True).first.wait_for()
    page.wait_for_timeout(500)


@pytest.mark.slow
def test_an_empty_conversation_is_shown_from_its_beginning(visitor: Visitor) -> None:
    visitor.page.set_viewport_size({"width": 400, "height": 500})
    with visiting(visitor, "Chat", change=lambda served: setattr(served, "examples", ["Say hello."] * 30)) as (_, page):
        page.get_by_role("button", name="Say hello.").first.wait_for()
        page.wait_for_timeout(500)  # for whatever scrolls late
        assert to_the_end(page) > 50 and place(page) == 0


def test_who_reads_upward_stays_there_and_comes_back_by_a_button(visitor: Visitor) -> None:
    paced = Paced()
    with visiting(visitor, "Chat", paced.session) as (_, page):
        back = page.get_by_role("button", name=BACK)
        paced.allow(40)
        send(page, "count")
        shown(page, 40)
        wait_until(lambda: to_the_end(page) < 2 and not back.is_visible())  # the end is followed
        page.locator(".df-talk").hover()
        paced.allow(50)  # it goes on while the reader scrolls
        page.mouse.wheel(0, -400)
        shown(page, 50)
        paced.allow(60)  # a frame that was late may have held the end once more; now it is left
        back.wait_for()
        reading = place(page)
        paced.allow(80)
        shown(page, 80)
        assert place(page) == reading and to_the_end(page) > 400
        back.click()
        wait_until(lambda: to_the_end(page) < 2)
        back.wait_for(state="hidden")
        paced.allow(100)
        shown(page, 100)
        wait_until(lambda: to_the_end(page) < 2)  # and followed again
        page.mouse.wheel(0, -600)
        back.wait_for()
        paced.allow(LINES)
        status(page, "2.5 a step")
        page.mouse.wheel(0, 5000)
        back.wait_for(state="hidden")
        page.mouse.wheel(0, -600)
        back.wait_for()
        send(page, "again")
        page.locator("[data-testid=user]").nth(1).wait_for()
        wait_until(lambda: to_the_end(page) < 2)


def test_a_message_to_a_long_conversation_folds_its_beginning_and_is_shown(visitor: Visitor, tmp_path: Path) -> None:
    turns = [Turn("assistant" if n % 2 else "user", f"message {n}\n\nof many lines") for n in range(60)]
    ChatFile.create(tmp_path, "scripted", "", turns).close()
    with visiting(visitor, "Chat", change=lambda served: setattr(served, "chats", tmp_path)) as (_, page):
        page.locator("#df-chats").get_by_text("message 0").click()
        page.get_by_role("button", name="Show earlier messages (40)").click()
        page.locator(".df-talk").get_by_text("message 0").first.wait_for()
        page.locator(".df-talk").hover()
        page.mouse.wheel(0, -5000)
        page.get_by_role("button", name=BACK).wait_for()
        send(page, "one more")
        page.get_by_role("button", name="Show earlier messages (42)").wait_for()
        page.locator(".df-talk").get_by_text("one more").wait_for()
        wait_until(lambda: to_the_end(page) < 2)
        assert page.locator(".df-talk").get_by_text("message 0").count() == 0
