"""What is pasted into the chat's field: line ends of any kind, and many lines as one token that is sent whole."""

from __future__ import annotations

from typing import Any

import pytest
from textual.events import Paste
from textual.pilot import Pilot

from dflash_local.errors import ContextError
from dflash_local.ui.tui.composer import FOLD_CHARACTERS, FOLD_LINES, MAX_PASTE
from dflash_local.ui.tui.transcript import MAX_LINES
from tests.service.scripted import ScriptedSession
from tests.ui.stage import Stage, play

LONG = "\n".join(f"line {number}" for number in range(1, 201))
TOKEN = "[200 lines pasted]"


async def paste(stage: Stage, pilot: Pilot[Any], text: str) -> None:
    """As a terminal does: one event for all of it."""
    stage.chat.composer.post_message(Paste(text))
    await pilot.pause()


def sent(stage: Stage) -> list[str]:
    return [request.messages[-1].content for request in stage.session.requests]


@pytest.mark.parametrize("end", ["\r", "\r\n", "\n", "\u2028"])
def test_the_line_ends_of_a_paste_are_line_ends_to_the_model(end: str) -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await paste(stage, pilot, f"one{end}two{end}{end}three")
        assert stage.chat.composer.text == "one\ntwo\n\nthree" and not stage.chat.busy
        await pilot.press("enter")
        await pilot.pause()
        await stage.idle(pilot)

    assert sent(play(act)) == ["one\ntwo\n\nthree"]


def test_control_characters_of_a_paste_are_signs_and_its_tabs_stay() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await paste(stage, pilot, "a\tb\x1b[31m\x07\r\n\x00c\x9bd")
        assert stage.chat.composer.text == "a\tb␛[31m␇\n␀c\\x9bd"

    play(act)


def test_many_lines_fold_to_a_token_and_are_sent_whole() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await pilot.press(*"sum up: ")
        await paste(stage, pilot, LONG.replace("\n", "\r"))
        await pilot.press(*" ok?")
        assert stage.chat.composer.text == f"sum up: {TOKEN} ok?" and TOKEN in stage.screen_text
        await pilot.press("enter")
        await pilot.pause()
        await stage.idle(pilot)
        shown = stage.chat.transcript.children[1].render().plain
        assert f"line {MAX_LINES}" in shown and "line 200" not in shown
        assert f"[{200 - MAX_LINES} more lines were sent]" in shown

    assert sent(play(act)) == [f"sum up: {LONG} ok?"]


def test_a_few_lines_are_not_folded_and_a_long_line_is() -> None:
    few, wide = "x\n" * FOLD_LINES, "x" * (FOLD_CHARACTERS + 1)

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await paste(stage, pilot, few)
        assert stage.chat.composer.text == few
        await paste(stage, pilot, wide)
        assert stage.chat.composer.text == f"{few}[1,001 characters pasted]"

    play(act)


def test_a_token_is_one_unit_to_every_key_that_deletes_or_moves() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        composer = stage.chat.composer
        await pilot.press("a")
        await paste(stage, pilot, LONG)
        await pilot.press("b", "left", "backspace")
        assert composer.text == "ab"
        await pilot.press("ctrl+underscore")
        assert composer.text == f"a{TOKEN}b", "undone, and whole"
        await pilot.press("home", "right", "delete")
        assert composer.text == "ab"
        await pilot.press("ctrl+underscore", "end", "left", "left")
        assert composer.cursor_location == (0, 1), "one step over all of it"
        await pilot.press("right")
        assert composer.cursor_location == (0, 1 + len(TOKEN))
        await pilot.press("ctrl+w")
        assert "pasted" not in composer.text and composer.text.endswith("b")
        await pilot.press("ctrl+underscore", "end", "shift+left", "shift+left", "x")
        assert composer.text == "ax"
        await pilot.press("ctrl+underscore")
        composer.move_cursor((0, 5))  # as a click does
        await pilot.press("y")
        assert composer.text == f"a{TOKEN}yb"
        await pilot.press("ctrl+u")
        assert composer.text == ""
        await pilot.press("ctrl+underscore", "enter")
        await pilot.pause()
        await stage.idle(pilot)

    assert sent(play(act)) == [f"a{LONG}yb"]


def test_several_pastes_of_one_size_are_told_apart_and_one_again_is_itself() -> None:
    other = LONG.replace("line", "verse")

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        for text in (LONG, other, LONG):
            await paste(stage, pilot, text)
            await pilot.press("ctrl+j")
        assert stage.chat.composer.text == f"{TOKEN}\n[200 lines pasted, 2]\n{TOKEN}\n"
        await pilot.press("enter")
        await pilot.pause()
        await stage.idle(pilot)

    assert sent(play(act)) == [f"{LONG}\n{other}\n{LONG}"]


def test_edit_the_arrows_and_what_is_given_back_keep_the_text_behind_a_token() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        composer = stage.chat.composer
        await paste(stage, pilot, LONG)
        await pilot.press("!", "enter")
        await pilot.pause()
        await stage.idle(pilot)
        assert composer.text == f"{TOKEN}!", "refused: it is back"
        await pilot.press("enter")
        await pilot.pause()
        await stage.idle(pilot)
        await pilot.press("up")
        assert composer.text == f"{TOKEN}!"
        await pilot.press("ctrl+u", "f8")
        await pilot.pause()
        assert composer.text == f"{TOKEN}!" and composer.message == f"{LONG}!"
        await pilot.press("enter")
        await pilot.pause()
        await stage.idle(pilot)

    stage = play(act, ScriptedSession(faults=[ContextError("too long")]))
    assert sent(stage)[-2:] == [f"{LONG}!"] * 2
    assert [turn.content for turn in stage.chat_session.conversation.turns if turn.role == "user"] == [f"{LONG}!"]


def test_a_pasted_file_that_begins_with_a_slash_is_a_message() -> None:
    code = "/* says hello */\n" * 9

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await paste(stage, pilot, code)
        await pilot.press("enter")
        await pilot.pause()
        await stage.idle(pilot)

    stage = play(act)
    assert sent(stage) == [code.strip()] and stage.chat_session.executed == []


def test_what_is_pasted_counts_whole_against_the_limit() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        for begin in "ab":
            await paste(stage, pilot, begin * (MAX_PASTE // 2 + 1))
        assert stage.chat.composer.text == "[50,001 characters pasted]"
        assert any("50,001 characters were pasted" in note.message for note in stage.app._notifications)

    play(act)
