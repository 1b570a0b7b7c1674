"""The Chat tab under hostile text, two windows, a closed one, and Stop."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from tests.service.scripted import ScriptedSession
from tests.ui.web.conftest import Visitor
from tests.ui.web.stand import enter, visiting, wait_until
from tests.ui.web.test_chat_tab import BOT, USER, press, reply, said, send, status

if TYPE_CHECKING:
    from playwright.sync_api import Dialog


def test_stop_ends_the_reply_within_a_cycle_and_keeps_the_text(visitor: Visitor) -> None:
    counted: list[int] = []
    gate = threading.Event()

    def step(index: int) -> None:
        counted.append(index)
        if index == 3:
            gate.clear()

    gate.set()
    session = ScriptedSession(steps=said(*(f"word{n} " for n in range(50))), gate=gate, on_step=step)
    with visiting(visitor, "Chat", session) as (here, page):
        send(page, "talk on")
        page.locator(BOT).get_by_text("word2").wait_for()
        wait_until(lambda: len(counted) == 4)
        press(page, "Stop")
        status(page, "stopped · ")
        text = reply(page, "(stopped)")
        assert "word0 word1 word2" in text and "word3" not in text
        assert len(counted) == 4, "no further cycle began"
        wait_until(lambda: here.service.status.running == 0)
        gate.set()
        send(page, "and then")
        wait_until(lambda: len(session.requests) == 2)
        assert session.requests[1].messages[1].content == "word0 word1 word2 ", "what came is part of the conversation"


HOSTILE = (
    "<script>alert('one')</script>",
    "<img src=x onerror=alert('two')>",
    "<img src=//evil.example/p.png>",
    "![p](http://evil.example/q.png)",
    "![p][ref]",
    "[ref]: http://evil.example/r.png",
    "[press](javascript:alert('three'))",
    "[press](java&#115;cript:alert('four'))",
    "<a href='javascript:alert(5)'>go</a>",
    "<style>body{display:none}</style>",
    "<svg onload=alert('six')><text>svg</text></svg>",
    "<iframe src='http://evil.example'></iframe>",
    "<form action='http://evil.example'><input></form>",
    "<details open ontoggle=alert('seven')><summary>s</summary></details>",
    "<link rel=stylesheet href=http://evil.example/s.css>",
    "a `<img src=//evil.example/1.png>` b",
    "1. do\n   ```html\n   <img src=//evil.example/2.png>\n   ```\n2. then",
    '[a]: /u "\n```\n"\n<img src=//evil.example/3.png>\n```\n',
    "> ```\n> <img src=//evil.example/4.png>\n\n~~~mermaid\ngraph TD; A[<img src=//evil.example/5.png>]\n~~~",
    "`` <b> ` <img src=//evil.example/6.png> ``",
    "\\<img src=//evil.example/7.png> \\\\<img src=//evil.example/8.png>",
    "\u202egnp.exe \x1b]52;c;aGk=\x07 \x1b[31mred",
    "${alert('eight')} {{constructor.constructor('alert(9)')()}}",
)
FORBIDDEN = "script, style, img, iframe, form, input, link, object, embed, details, svg text, a[href^='javascript' i]"


def test_text_of_a_model_or_a_user_is_shown_and_never_obeyed(visitor: Visitor) -> None:
    text = "\n\n".join(HOSTILE)
    bits = [text[at : at + 7] for at in range(0, len(text), 7)]
    steps = (*said(*bits, channel="thinking"), *said(*bits))

    def appeared(dialog: Dialog) -> None:
        visitor.complaints.append(dialog.message)
        dialog.dismiss()

    with visiting(visitor, "Chat", ScriptedSession(steps=steps)) as (_, page):
        page.on("dialog", appeared)
        send(page, text)
        status(page, "2.5 a step")
        page.get_by_text("Thinking (").click()
        page.locator(BOT).last.get_by_text("{{constructor").wait_for()
        for place in (*page.locator(BOT).all(), page.locator(USER)):
            assert place.locator(FORBIDDEN).count() == 0, place.locator(FORBIDDEN).first.evaluate("e => e.outerHTML")
            shown = place.inner_text()
            for words in (
                "<script>alert('one')</script>",
                "![p](http://evil.example/q.png)",
                "<img src=//evil.example/3",
            ):
                assert words in shown, words
            assert "\u202e" not in shown and "\x1b" not in shown and "\\u202egnp.exe" in shown
            wild = place.evaluate("e => [...e.querySelectorAll('*')].flatMap(x => [...x.attributes]).map(a => a.name)")
            assert not [name for name in wild if name.startswith("on")]
        page.get_by_label("Tokens by origin").check()
        origins = page.locator(".df-origins")
        origins.wait_for()
        assert origins.locator(FORBIDDEN).count() == 0
        assert "<svg onload=alert('six')>" in origins.inner_text().replace("‹", "").replace("›", "")


def test_two_windows_wait_in_line_and_a_closed_one_frees_the_machine(
    visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_local.ui.web.visitors.GRACE_S", 0.1)
    gate = threading.Event()

    class Echo(ScriptedSession):
        def generate(self, request, *rest):  # type: ignore[no-untyped-def]
            self.steps = said(*(f"{request.messages[-1].content}{n} " for n in range(5)))
            yield from super().generate(request, *rest)

    session = Echo(gate=gate)
    with visiting(visitor, "Chat", session) as (here, page):
        other = page.context.new_page()
        enter(other, here)
        send(page, "alpha")
        wait_until(lambda: here.service.status.running == 1)
        send(other, "beta")
        status(other, "waiting, 1 before")
        gate.set()
        status(page, "2.5 a step")
        status(other, "2.5 a step")
        assert "beta" not in reply(page, "alpha4") and "alpha" not in reply(other, "beta4")
        gate.clear()
        send(other, "gamma")
        wait_until(lambda: len(session.requests) == 3)
        asked = [message.content for message in session.requests[2].messages if message.role == "user"]
        assert asked == ["beta", "gamma"]
        send(page, "for me")
        status(page, "waiting, 1 before")
        other.close()
        wait_until(lambda: len(session.requests) == 4, 30)
        gate.set()
        page.locator(BOT).get_by_text("for me4").wait_for()
