"""What must not harm the chat screen: hostile text, pastes, sizes, floods, faults."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from textual.events import Paste
from textual.geometry import Size
from textual.pilot import Pilot

from dflash_local.events import Piece, Step
from dflash_local.store.records import Turn
from dflash_local.terminal import safe
from dflash_local.ui.pieces import SafePieces, text_of
from dflash_local.ui.safety import MAX_BLOCK_LINES, MAX_CHARS, MarkdownGuard
from dflash_local.ui.tui.composer import MAX_PASTE
from dflash_local.ui.tui.text_view import TextView
from dflash_local.ui.tui.transcript import MAX_REBUILT, MAX_SHOWN
from tests.service.scripted import ScriptedSession
from tests.ui.stage import Stage, play

HOSTILE = {
    "osc 52": "\x1b]52;c;ZXZpbA==\x07",
    "osc 0": "\x1b]0;title\x07",
    "osc 8": "\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\",
    "dcs": "\x1bPq#0\x1b\\",
    "csi": "\x1b[6n\x1b[2J",
    "ris": "\x1bc",
    "c1": "\x9b31m\x90x\x9c",
    "unterminated": "\x1b]52;c;",
    "bidi": "a\u202egpj.exe\u2066x",
    "bell": "\x07" * 50,
    "marks": "e" + "\u0301" * 10_000,
}


def saying(text: str, size: int = 0) -> ScriptedSession:
    """A session that says it, cut into bits of ``size`` characters."""
    bits = [text[at : at + size] for at in range(0, len(text), size)] if size else [text]
    return ScriptedSession(steps=[Step((Piece(bit),), (1,), 0, 0, 1, index / 1000) for index, bit in enumerate(bits)])


@pytest.mark.parametrize("by_origin", [False, True])
def test_no_sequence_of_the_model_reaches_the_terminal(by_origin: bool) -> None:
    """One conversation says them all: what is painted is judged after each."""
    controls = {chr(code) for code in (*range(0x0A), *range(0x0B, 0x20), *range(0x7F, 0xA0))}

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        if by_origin:
            await pilot.press("f3")
        for name, sequence in HOSTILE.items():
            stage.session.steps = saying(f"before {sequence} after {name}").steps
            await stage.send(f"say {sequence}", pilot)
            painted = stage.screen_text
            assert not set(painted) & controls, name
            assert not set(painted) & set("\u202e\u2066") and painted.count("\u0301") <= 3 * 8, name
            assert "before" in painted and f"after {name}" in painted
            said = stage.chat_session.conversation.turns[-1].content
            assert sequence in said, f"{name}: the model is given its own words again"

    play(act, ScriptedSession())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_sequence_cut_in_two_is_the_same(size: int) -> None:
    text = "a\x1b]52;c;eA==\x07b\x9b31mc\r\nd\re\u202ef\r"
    cutter = SafePieces()
    pieces = cutter.feed(*saying(text, size).steps)
    assert text_of([*pieces, *cutter.finish()]) == safe(text)


def test_a_megabyte_is_refused_with_its_count() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        began = time.monotonic()
        stage.chat.composer.post_message(Paste("x" * 1_000_000))
        await pilot.pause()
        await pilot.pause()
        assert any("1,000,000 characters were pasted" in note.message for note in stage.app._notifications)
        assert stage.chat.composer.text == "" and time.monotonic() - began < 30
        stage.chat.composer.post_message(Paste("x" * MAX_PASTE))
        await pilot.pause()
        assert len(stage.chat.composer.message) == MAX_PASTE

    play(act)


def test_resizing_while_it_streams_loses_no_text() -> None:
    chooser = random.Random(5)
    text = "".join(f"word{n} " + ("\n\n" if n % 9 == 0 else "") for n in range(120))
    session = saying(text, 7)
    session.on_step = lambda _index: time.sleep(0.002)

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        stage.chat.composer.put("x")
        await pilot.press("enter")
        for _ in range(20):
            await pilot.resize_terminal(chooser.randint(1, 220), chooser.randint(1, 60))
        await pilot.resize_terminal(1, 1)
        await pilot.resize_terminal(500, 200)
        await stage.idle(pilot)
        assert stage.chat.transcript.replies[0].text == text
        assert stage.app.size == Size(500, 200) and "word119" in stage.screen_text

    play(act, session)


def test_a_thousand_events_are_a_few_drawings() -> None:
    text = "word " * 2000

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        before = stage.chat.drawings
        await stage.send("x", pilot)
        view = stage.chat.transcript.replies[0]
        assert view.text == text
        assert view.draws <= stage.chat.drawings - before <= 400, "one drawing for many of the 2000 events"

    stage = play(act, saying(text, 5))
    assert len(stage.session.steps) == 2000


def test_a_long_conversation_shows_its_end() -> None:
    turns = [Turn("user" if n % 2 == 0 else "assistant", f"turn {n}") for n in range(5000)]

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        stage.chat_session.acts["/load x"] = lambda: stage.chat_session.conversation.turns.extend(turns)
        await stage.send("/load x", pilot)
        assert len(stage.chat.transcript.children) == MAX_REBUILT + 1 and "turn 4999" in stage.screen_text
        assert "earlier messages are not on screen" in str(stage.chat.transcript.children[0].render())

    play(act)


def test_what_is_added_pushes_the_oldest_off_the_screen() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        for number in range(MAX_SHOWN + 30):
            await stage.chat.show(f"note {number}")
        assert len(stage.chat.transcript.children) <= MAX_SHOWN + 1
        await pilot.pause()
        assert f"note {MAX_SHOWN + 29}" in stage.screen_text

    play(act)


@pytest.mark.parametrize(
    "bomb",
    [
        *("> " * 5000 + "deep", "|" + " a |" * 300_000, "[" * 50_000),
        *(pytest.param(each, marks=pytest.mark.slow) for each in (">" * 5000, "line\n" * 5000, "- " * 4000)),
    ],
    ids=["quotes", "table", "brackets", "tight quotes", "paragraph", "lists"],
)
def test_markdown_bombs_are_shown_as_they_are(bomb: str) -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await stage.send("x", pilot)
        body = stage.chat.query_one(TextView)
        assert body.plain and stage.chat.transcript.replies[0].text == bomb + "\nend"
        assert "end" in stage.screen_text

    play(act, saying(bomb + "\nend"))


def test_an_unclosed_fence_and_html_stay_readable() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await stage.send("x", pilot)
        text = stage.screen_text
        assert "<b>bold</b>" in text and "<script>alert(1)</script>" in text and "x = 1" in text
        assert not stage.chat.query_one(TextView).plain

    play(act, saying("<b>bold</b>\n\n<script>alert(1)</script>\n\n```python\nx = 1\n"))


def test_the_guard_counts_across_bits() -> None:
    for bit, times in (
        ("x" * 100, 45),
        ("x\n" * 10, MAX_BLOCK_LINES // 10 + 2),
        ("x\n\n" * 1000, MAX_CHARS // 3000 + 1),
    ):
        guard = MarkdownGuard()
        answers = [guard.accepts(bit) for _ in range(times)]
        assert answers[0] and not answers[-1] and answers == sorted(answers, reverse=True)
    assert all(MarkdownGuard().accepts(text) for text in ("> quote\n" * 10, "| a | b |\n" * 300, "a\n\n" * 5000))


def test_links_are_told_and_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        monkeypatch.setattr(stage.app, "open_url", lambda url, **_: opened.append(url))
        await stage.send("x", pilot)
        await pilot.click(TextView, offset=(2, 0))
        await pilot.pause()
        assert any("evil.example/?q=%5Bbold%5D" in note.message for note in stage.app._notifications)

    play(act, saying("[click](<http://evil.example/?q=[bold]>)"))
    assert opened == []


def test_an_unknown_fault_of_a_job_is_shown_and_the_session_goes_on() -> None:
    def burst() -> None:
        raise ZeroDivisionError("oh")

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        stage.chat_session.acts["/stats"] = burst
        await stage.send("/stats", pilot)
        assert "unexpected failure: ZeroDivisionError: oh" in stage.screen_text
        await stage.send("hi", pilot)
        assert "Hello, world!" in stage.screen_text

    play(act)


def test_no_colour_is_no_colour() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await stage.send("hi", pilot)
        colours = {
            segment.style.color.triplet
            for strip in stage.app.screen._compositor.render_strips()
            for segment in strip.apply_filter(stage.app._filters[0], stage.app.screen.background_colors[1])
            if segment.style is not None and segment.style.color is not None and segment.style.color.triplet
        }
        assert all(len(set(triplet)) == 1 for triplet in colours), "greys only"

    play(act)
