"""What must not harm the chat screen: hostile text, pastes, sizes, floods, faults."""

from __future__ import annotations

import random
import time

import pytest
from textual.geometry import Size

from dflash_local.service.pieces import SafePieces, text_of
from dflash_local.store.records import Turn
from dflash_local.terminal import safe
from dflash_local.ui.safety import MAX_BLOCK_LINES, MAX_CHARS, MarkdownGuard
from dflash_local.ui.tui.text_view import TextView
from dflash_local.ui.tui.transcript import MAX_REBUILT, MAX_SHOWN
from tests.ui.stage import Stage, saying, staged

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


@pytest.mark.parametrize("by_origin", [False, True])
@staged()
async def test_no_sequence_of_the_model_reaches_the_terminal(stage: Stage, by_origin: bool) -> None:
    """One conversation says them all: what is painted is judged after each."""
    controls = {chr(code) for code in (*range(0x0A), *range(0x0B, 0x20), *range(0x7F, 0xA0))}
    if by_origin:
        await stage.press("f3")
    for name, sequence in HOSTILE.items():
        stage.session.steps = saying(f"before {sequence} after {name}").steps
        await stage.send(f"say {sequence}")
        painted = stage.screen_text
        assert not set(painted) & controls, name
        assert not set(painted) & set("\u202e\u2066") and painted.count("\u0301") <= 3 * 8, name
        assert "before" in painted and f"after {name}" in painted
        assert sequence in stage.turns[-1].content, f"{name}: the model is given its own words again"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_sequence_cut_in_two_is_the_same(size: int) -> None:
    text = "a\x1b]52;c;eA==\x07b\x9b31mc\r\nd\re\u202ef\r"
    cutter = SafePieces()
    pieces = cutter.feed(*saying(text, size).steps)
    assert text_of([*pieces, *cutter.finish()]) == safe(text)


WORDS = "".join(f"word{n} " + ("\n\n" if n % 9 == 0 else "") for n in range(120))


@staged(lambda: saying(WORDS, 7))
async def test_resizing_while_it_streams_loses_no_text(stage: Stage) -> None:
    chooser = random.Random(5)
    stage.session.on_step = lambda _index: time.sleep(0.002)
    await stage.enter("x")
    for _ in range(20):
        await stage.pilot.resize_terminal(chooser.randint(1, 220), chooser.randint(1, 60))
    await stage.pilot.resize_terminal(1, 1)
    await stage.pilot.resize_terminal(500, 200)
    await stage.idle()
    assert stage.chat.transcript.replies[0].text == WORDS
    assert stage.app.size == Size(500, 200)
    await stage.shows("word119")


@staged(lambda: saying("word " * 2000, 5))
async def test_a_thousand_events_are_a_few_drawings(stage: Stage) -> None:
    before = stage.chat.drawings
    await stage.send("x")
    view = stage.chat.transcript.replies[0]
    assert view.text == "word " * 2000 and len(stage.session.steps) == 2000
    assert view.draws <= stage.chat.drawings - before <= 400, "one drawing for many of the 2000 events"


@staged()
async def test_a_long_conversation_shows_its_end_and_what_is_added_pushes_the_oldest_off(stage: Stage) -> None:
    turns = [Turn("user" if n % 2 == 0 else "assistant", f"turn {n}") for n in range(5000)]
    stage.chat_session.acts["/load x"] = lambda: stage.turns.extend(turns)
    await stage.send("/load x")
    shown = stage.chat.transcript.children
    assert len(shown) == MAX_REBUILT + 1 and "turn 4999" in stage.screen_text
    assert "earlier messages are not on screen" in str(shown[0].render())
    for number in range(MAX_SHOWN + 30):
        await stage.chat.show(f"note {number}")
    assert len(shown) <= MAX_SHOWN + 1
    await stage.pilot.pause()
    assert f"note {MAX_SHOWN + 29}" in stage.screen_text


BOMBS = {
    "quotes": "> " * 5000 + "deep",
    "table": "|" + " a |" * 300_000,
    "brackets": "[" * 50_000,
    "tight quotes": ">" * 5000,
    "paragraph": "line\n" * 5000,
    "lists": "- " * 4000,
}


@staged()
async def test_markdown_bombs_are_shown_as_they_are_and_what_is_left_open_is_laid_out(stage: Stage) -> None:
    for name, bomb in BOMBS.items():
        stage.session.steps = saying(f"{bomb}\nend of {name}").steps
        await stage.send("x")
        assert stage.chat.query(TextView).last().plain, name
        assert stage.chat.transcript.replies[-1].text == f"{bomb}\nend of {name}"
        assert f"end of {name}" in stage.screen_text
    stage.session.steps = saying("<b>bold</b>\n\n<script>alert(1)</script>\n\n```python\nx = 1\n").steps
    await stage.send("x")
    assert all(words in stage.screen_text for words in ("<b>bold</b>", "<script>alert(1)</script>", "x = 1"))
    assert not stage.chat.query(TextView).last().plain


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


@staged(lambda: saying("[click](<http://evil.example/?q=[bold]>)"))
async def test_links_are_told_and_not_followed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(stage.app, "open_url", lambda url, **_: opened.append(url))
    await stage.send("x")
    await stage.pilot.click(TextView, offset=(2, 0))
    await stage.pilot.pause()
    assert "evil.example/?q=%5Bbold%5D" in stage.notified and opened == []


@staged()
async def test_an_unknown_fault_of_a_job_is_shown_and_the_session_goes_on_without_colour(stage: Stage) -> None:
    stage.chat_session.acts["/stats"] = lambda: print(1 // 0)
    await stage.send("/stats")
    assert "unexpected failure: ZeroDivisionError: " in stage.screen_text
    await stage.send("hi")
    assert "Hello, world!" in stage.screen_text
    colours = {
        segment.style.color.triplet
        for strip in stage.app.screen._compositor.render_strips()
        for segment in strip.apply_filter(stage.app._filters[0], stage.app.screen.background_colors[1])
        if segment.style is not None and segment.style.color is not None and segment.style.color.triplet
    }
    assert colours and all(len(set(triplet)) == 1 for triplet in colours), "greys only"
