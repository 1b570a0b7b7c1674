"""The Chat tab in a browser: what is typed, what streams, what stops, and what a model's text cannot do."""

from __future__ import annotations

import base64
import threading
from typing import TYPE_CHECKING, Any

import pytest

from dflash_local.errors import ContextError, DeviceLostError, EngineError
from dflash_local.events import Piece, Step
from dflash_local.request import SamplingParams
from dflash_local.ui.web.visitors import Visitors
from tests.service.scripted import ScriptedSession
from tests.ui.web.conftest import Visitor
from tests.ui.web.stand import Site, saved, visiting, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

BOT, USER = "[data-testid=bot]", "[data-testid=user]"


def said(*texts: str, channel: str = "final") -> tuple[Step, ...]:
    """One step for each text."""
    return tuple(
        Step((Piece(text, channel),), (10 + index,), 0, 0, 1, 0.01 * (index + 1))  # type: ignore[arg-type]
        for index, text in enumerate(texts)
    )


def field(page: Page) -> Locator:
    return page.locator("#df-field textarea")


def send(page: Page, text: str) -> None:
    field(page).fill(text)
    field(page).press("Enter")


def status(page: Page, words: str) -> Locator:
    found = page.locator(".df-status:visible").get_by_text(words).first
    found.wait_for()
    return found


def reply(page: Page, words: str) -> str:
    """Return the text of the last reply when it has these words; the browser may draw it after the status."""
    page.locator(BOT).last.get_by_text(words).first.wait_for()
    return page.locator(BOT).last.inner_text()


def press(page: Page, name: str) -> None:
    page.locator("button:visible").get_by_text(name, exact=True).click()


def open_settings(page: Page) -> None:
    """Open them; in the frame after all fields are there, Gradio sets each to its first value once more."""
    press(page, "Settings")
    for label in ("System prompt", "Thinking", "plain", "When the context is full"):  # one of each kind of field
        page.get_by_label(label, exact=True).wait_for()
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_a_message_is_answered_shown_by_origin_made_again_edited_and_cleared(visitor: Visitor) -> None:
    session = ScriptedSession()
    with visiting(visitor, "Chat", session) as (_, page):
        field(page).fill("first")
        field(page).press("Shift+Enter")
        field(page).type("second")
        field(page).press("Enter")
        status(page, "6 tokens · 120 tok/s · 2.0x · 2.5 a step · first token 10 ms")
        reply(page, "Hello, world!")
        assert session.requests[0].messages[-1].content == "first\nsecond"
        assert field(page).input_value() == ""
        panel = page.locator("#df-figures").inner_text()
        for words in (
            "120 mean tok/s",
            "2.50 mean of 4",
            "3.00 per turn",
            "50%",
            "40%",
            "11 of 512 tokens",
            "seed 99",
        ):
            assert words in panel, words
        assert [bar.inner_text() for bar in page.locator(".df-share").all()[:3]] == ["1\n100%", "2\n50%", "3\n0%"]
        check_origins(page)
        check_again(page, session)


def check_origins(page: Page) -> None:
    """Where tokens came from has a mark that is no colour."""
    page.get_by_label("Tokens by origin").check()
    status(page, "underlined ‹in marks›")
    origins = page.locator(".df-origins")
    origins.wait_for()
    assert origins.locator("span").all_inner_texts() == [", wor", "!"]
    assert origins.locator("u").all_inner_texts()[:2] == ["‹Hello›", "‹ld›"]
    style = origins.locator("u").first.evaluate("element => getComputedStyle(element).textDecorationLine")
    assert style == "underline"
    page.get_by_label("Tokens by origin").uncheck()
    page.locator(BOT).get_by_text("Hello, world!").wait_for()


def check_again(page: Page, session: ScriptedSession) -> None:
    """The second request repeats the first, the third is of another message, the fourth of a new conversation."""
    press(page, "Regenerate")
    wait_until(lambda: len(session.requests) == 2)
    page.locator("#df-figures").get_by_text(f"seed {session.requests[1].sampling.seed}").wait_for()
    assert session.requests[1].messages == session.requests[0].messages
    page.get_by_role("button", name="Edit this message").press("Enter")
    status(page, "Send replaces it")
    wait_until(lambda: field(page).input_value() == "first\nsecond")
    press(page, "Cancel the edit")
    wait_until(lambda: field(page).input_value() == "")
    page.get_by_role("button", name="Edit this message").press("Enter")
    wait_until(lambda: field(page).input_value() == "first\nsecond")
    send(page, "two")
    page.locator(USER).get_by_text("two").wait_for()
    wait_until(lambda: len(session.requests) == 3)
    assert [message.content for message in session.requests[2].messages] == ["two"]
    status(page, "2.5 a step")
    press(page, "Clear")
    page.locator(USER).wait_for(state="detached")
    press(page, "Undo Clear")
    page.locator(USER).get_by_text("two").wait_for()
    press(page, "Clear")
    page.locator(USER).wait_for(state="detached")
    send(page, "three")
    wait_until(lambda: len(session.requests) == 4)
    assert [message.content for message in session.requests[3].messages] == ["three"]


def test_prompts_are_offered_and_settings_reach_the_request_or_are_refused_in_a_plain_line(visitor: Visitor) -> None:
    session = ScriptedSession()
    with visiting(visitor, "Chat", session) as (here, page):
        check_prompts(page, here)
        wait_until(lambda: len(session.requests) == 2)
        status(page, "2.5 a step")
        assert [each.messages[-1].content for each in session.requests] == ["Say hello.", "Say <b>goodbye</b>."]
        assert session.requests[0].sampling == SamplingParams() and session.requests[0].block_size is None
        assert session.requests[0].limits.max_new_tokens == 1024
        session.requests.clear()
        press(page, "Clear")
        page.locator(USER).wait_for(state="detached")
        wait_until(lambda: field(page).evaluate("element => element === document.activeElement"))  # all is shown
        open_settings(page)
        page.get_by_label("System prompt").fill("Be brief.")
        page.get_by_label("Temperature").first.fill("0.7")
        page.get_by_label("Top-p").fill("0.9")
        page.get_by_label("Most tokens").first.fill("33")
        page.get_by_label("Block size").fill("3")
        page.get_by_label("plain", exact=True).check()
        page.get_by_label("Seed").first.fill("no number")
        send(page, "hi")
        status(page, "seed must be a whole number, got 'no number'")
        assert field(page).input_value() == "hi" and session.requests == []
        page.get_by_label("Seed").first.fill("18446744073709551615")
        field(page).press("Enter")
        status(page, "60 tok/s · plain · first token 10 ms")
        request = session.requests[0]
        assert (request.mode, request.block_size, request.limits.max_new_tokens) == ("ar", 3, 33)
        assert (request.sampling.temperature, request.sampling.top_p) == (0.7, 0.9)
        assert request.sampling.seed == 2**64 - 1
        assert [message.role for message in request.messages] == ["system", "user"]
        page.get_by_label("with the drafter").check()
        field(page).fill("more")
        field(page).press("Enter")
        status(page, "· 2.0x ·")
        assert "plain: 60.0 tok/s, 2.00x" in page.locator("#df-figures").inner_text()


def check_prompts(page: Page, here: Site) -> None:
    """An empty conversation offers some, and a click sends one; what was typed stays."""
    field(page).fill("my own")
    page.get_by_role("button", name="Say hello.").click()
    status(page, "2.5 a step")
    assert page.locator(USER).inner_text().strip() == "Say hello." and field(page).input_value() == "my own"
    here.served.examples = ("Say <b>goodbye</b>.",)
    page.get_by_role("tab", name="Models").click()
    page.get_by_role("tab", name="Chat").click()
    press(page, "Clear")
    page.get_by_role("button", name="Say <b>goodbye</b>.").wait_for()
    field(page).fill("")
    page.get_by_role("button", name="Say <b>goodbye</b>.").click()
    page.locator(USER).get_by_text("Say <b>goodbye</b>.").wait_for()


def test_an_error_is_one_line_and_the_message_comes_back_unless_a_part_of_the_reply_came(visitor: Visitor) -> None:
    early = [ContextError("at once: 900 tokens do not fit", "shorten it"), EngineError("the device is gone", "wait")]
    late = ScriptedSession(faults=[None, DeviceLostError("it is gone", "wait")])
    with visiting(visitor, "Chat", ScriptedSession(faults=[*early]), late) as (_, page):
        for words in ("900 tokens do not fit (shorten it)", "the device is gone (wait)"):
            send(page, "too much")
            assert status(page, words).get_attribute("role") == "alert"
            wait_until(lambda: field(page).input_value() == "too much")
            assert page.locator(USER).count() == 0
            assert "Traceback" not in page.content()
        field(page).press("Enter")  # the pair is loaded again where it broke
        status(page, "2.5 a step")
        send(page, "hi")
        status(page, "it is gone; the pair was loaded again (send it again)")
        assert "Hello, world!" in reply(page, "(stopped)")
        assert page.locator(USER).last.inner_text().strip() == "hi" and field(page).input_value() == ""
        send(page, "again")
        status(page, "2.5 a step")


def test_thinking_is_folded_and_a_conversation_is_exported_with_its_figures(visitor: Visitor) -> None:
    steps = (*said("I wonder ", "<b>why</b>", channel="thinking"), *said("# Title\n\n```py\nprint('<b>')\n```\n"))
    with visiting(visitor, "Chat", ScriptedSession(steps=steps)) as (_, page):
        assert page.locator("button:visible").get_by_text("Export", exact=True).is_disabled()
        send(page, "code, please")
        status(page, "2.5 a step")
        title = page.get_by_text("Thinking (2 tokens, 0.0 s)")
        title.wait_for()
        page.get_by_text("I wonder").wait_for(state="hidden")
        title.click()
        page.get_by_text("I wonder <b>why</b>").wait_for()
        page.locator(f"{BOT} button.copy_code_button").wait_for()
        press(page, "Export")
        name, content = saved(page.get_by_role("link", name="JSON with figures"))
        link = page.get_by_role("link", name="Markdown").get_attribute("href") or ""
        markdown = base64.b64decode(link.partition("base64,")[2]).decode("utf-8")
    assert name == "conversation.json" and [row["role"] for row in content["messages"]] == ["user", "assistant"]
    reply = content["messages"][1]
    assert reply["content"] == "# Title\n\n```py\nprint('<b>')\n```\n" and reply["thinking"] == "I wonder <b>why</b>"
    assert reply["figures"]["mean_acceptance_length"] == 2.5
    assert "## You\n\ncode, please" in markdown and "print('<b>')" in markdown


def test_what_is_typed_while_a_message_is_on_its_way_or_answered_stays(
    visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, arrived = threading.Event(), threading.Event()
    session = ScriptedSession(gate=gate, faults=[None, EngineError("the device is gone")])
    take = Visitors.take

    def slow(*given: Any) -> None:
        arrived.wait(30)
        take(*given)

    with visiting(visitor, "Chat", session, ScriptedSession()) as (_, page):
        monkeypatch.setattr(Visitors, "take", slow)
        send(page, "one")
        field(page).press("Enter")
        field(page).press_sequentially(" and two")
        arrived.set()
        page.locator(USER).get_by_text("one").wait_for()
        wait_until(lambda: field(page).input_value() == " and two")
        field(page).press("Enter")
        page.get_by_text("a reply is on its way").wait_for()
        gate.set()
        status(page, "2.5 a step")
        page.get_by_text("a reply is on its way").wait_for(state="detached")
        assert field(page).input_value() == " and two" and len(session.requests) == 1
        gate.clear()
        field(page).press("Enter")
        wait_until(lambda: len(session.requests) == 2)
        field(page).press_sequentially("three")
        page.locator(USER).nth(1).wait_for()  # until then its buttons are drawn anew under the key
        wait_until(lambda: field(page).input_value() == "three")
        page.get_by_role("button", name="Edit this message").first.press("Enter")
        wait_until(lambda: field(page).input_value() == "one")
        press(page, "Cancel the edit")
        wait_until(lambda: field(page).input_value() == "three")
        session.steps = ()
        gate.set()
        status(page, "the device is gone")
        wait_until(lambda: field(page).input_value() == " and two\nthree")
        assert page.locator(USER).all_inner_texts() == ["one"]
        visitor.reload()
        wait_until(lambda: field(page).input_value() == " and two\nthree")
