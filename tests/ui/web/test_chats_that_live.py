"""Chats of the page: a window loaded anew, a server started anew, a second window, the list of saved ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dflash_local.request import Request
from dflash_local.store import history
from tests.service.scripted import ScriptedSession
from tests.ui.web.conftest import Visitor
from tests.ui.web.stand import FakeServedPair, enter, site, visiting, wait_until
from tests.ui.web.test_chat_tab import BOT, USER, field, open_settings, press, said, send, status


def keeping(folder: Path) -> Callable[[FakeServedPair], None]:
    return lambda served: setattr(served, "chats", folder)


def test_a_reply_goes_on_over_a_reload_and_what_came_of_it_over_a_restart(visitor: Visitor, tmp_path: Path) -> None:
    """The gate stands between two steps, so that the page is loaded anew in the middle of a reply."""
    gate, page = threading.Event(), visitor.page
    reached = threading.Event()

    def step(index: int) -> None:
        if index == 3:
            gate.clear()
            reached.set()

    gate.set()
    session = ScriptedSession(steps=said(*(f"word{n} " for n in range(6))), gate=gate, on_step=step)
    with site(session, change=keeping(tmp_path)) as here:
        enter(page, here)
        send(page, "talk on")
        page.locator(BOT).get_by_text("word2").wait_for()
        assert reached.wait(30)
        page.reload()
        page.locator(BOT).get_by_text("word0 word1 word2").wait_for()
        gate.set()
        page.locator(BOT).get_by_text("word5").wait_for()
        status(page, "6 tokens")
        assert len(session.requests) == 1 and page.locator(USER).inner_text().strip() == "talk on"
        send(page, "and more")
        page.locator(BOT).nth(1).get_by_text("word2").wait_for()
    with site(change=keeping(tmp_path)) as here:  # the first one ended in the middle of the second reply
        page.goto(here.url)
        page.locator(BOT).nth(1).get_by_text("(stopped)").wait_for()
        assert "word0 word1 word2" in page.locator(BOT).nth(1).inner_text()
        press(page, "Continue")
        page.locator(BOT).nth(1).get_by_text("word2 Hello, world!").wait_for()
        assert len(history.entries(tmp_path)) == 1
        page.goto("about:blank")


def test_chats_are_found_opened_named_and_deleted_and_one_window_writes_each(
    visitor: Visitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_local.ui.web.chat.GONE_S", 0.2)
    on_loop, entries = list[object](), history.entries

    def listing(*given: Any) -> Any:
        with suppress(RuntimeError):
            on_loop.append(asyncio.get_running_loop())
        return entries(*given)

    monkeypatch.setattr(history, "entries", listing)
    with visiting(visitor, "Chat", change=keeping(tmp_path)) as (here, page):
        listed = page.locator("#df-chats li")
        for words in ("About apples", "About pears"):
            send(page, words)
            status(page, "2.5 a step")
            press(page, "New chat")
            page.locator(USER).wait_for(state="detached")
        wait_until(lambda: listed.locator(".df-title").all_inner_texts() == ["About pears", "About apples"])
        page.locator("#df-search textarea, #df-search input").fill("APPLES")
        wait_until(lambda: listed.locator(".df-title").all_inner_texts() == ["About apples"])
        listed.get_by_text("About apples").click()
        page.locator(USER).get_by_text("About apples").wait_for()
        page.wait_for_function("document.title.startsWith('About apples · ')")
        other = page.context.new_page()
        enter(other, here)
        assert other.locator(USER).count() == 0, "another window has a conversation of its own"
        other.locator("#df-chats li").get_by_text("About apples").click()
        status(other, "open in another window, which writes it")
        send(other, "me, too")
        status(other, "this chat is open in another window")
        assert field(other).input_value() == "me, too"
        page.locator("#df-search textarea, #df-search input").fill("")
        manage(page.locator("#df-chats"), page)
        other.close()
    assert on_loop == [], "the server's loop waits for no list"


def manage(chats, page) -> None:  # type: ignore[no-untyped-def]
    """Rename by the keyboard, delete at the second press; the file goes."""
    pears = chats.locator("li", has_text="About pears")
    pears.hover()
    pears.get_by_role("button", name="Rename").press("Enter")
    chats.get_by_label("Name of the chat").fill("Fruit <b>")
    page.keyboard.press("Enter")
    fruit = chats.locator("li", has_text="Fruit <b>")
    fruit.wait_for()
    fruit.hover()
    fruit.get_by_role("button", name="Delete").press("Enter")
    fruit.get_by_role("button", name="Delete").get_by_text("Sure?").press("Enter")
    fruit.wait_for(state="detached")
    assert chats.locator("li").count() == 1


def test_a_full_context_shows_what_is_not_sent_as_a_fold_or_stops(visitor: Visitor) -> None:
    class Full(ScriptedSession):
        """Has room for one message of the user's."""

        def count(self, request: Request) -> int:
            return 250 * sum(message.role == "user" for message in request.messages)

    with visiting(visitor, "Chat", Full()) as (_, page):
        for words in ("first", "second", "third"):
            send(page, words)
            page.locator(USER).get_by_text(words).wait_for()
            status(page, "2.5 a step")
        status(page, "the context of 512 tokens is full: 4 earlier messages are not sent any more")
        page.get_by_text("The 4 earlier messages are not sent to the model any more").wait_for()
        assert page.locator(USER).count() == 3
        open_settings(page)
        page.get_by_label("When the context is full").click()
        page.get_by_role("option", name="stop, and say so").click()
        send(page, "fourth")
        status(page, "the context of 512 tokens is full: the conversation has")
        assert field(page).input_value() == "fourth"
