"""What is pasted into the chat's field: line ends of any kind, and many lines as one token that is sent whole."""

from __future__ import annotations

import time

import pytest

from dflash_local.errors import ContextError
from dflash_local.ui.tui.composer import FOLD_CHARACTERS, FOLD_LINES, MAX_PASTE
from dflash_local.ui.tui.transcript import MAX_LINES, UserMessage
from tests.service.scripted import ScriptedSession
from tests.ui.stage import Stage, staged

LONG = "\n".join(f"line {number}" for number in range(1, 201))
TOKEN = "[200 lines pasted]"


@pytest.mark.parametrize("end", ["\r", "\r\n", "\n", "\u2028"])
@staged()
async def test_the_line_ends_of_a_paste_are_line_ends_to_the_model(stage: Stage, end: str) -> None:
    await stage.post(f"one{end}two{end}{end}three")
    assert stage.composer.text == "one\ntwo\n\nthree" and not stage.chat.busy
    await stage.press("enter")
    await stage.idle()
    assert stage.sent == ["one\ntwo\n\nthree"]


@staged()
async def test_control_characters_are_signs_tabs_stay_and_a_first_slash_is_no_command(stage: Stage) -> None:
    await stage.post("a\tb\x1b[31m\x07\r\n\x00c\x9bd")
    assert stage.composer.text == "a\tb␛[31m␇\n␀c\\x9bd"
    await stage.press("ctrl+u", "ctrl+u", "ctrl+u")
    code = "/* says hello */\n" * 9
    await stage.post(code)
    await stage.press("enter")
    await stage.idle()
    assert stage.sent == [code.strip()] and stage.chat_session.executed == []


@staged()
async def test_many_lines_fold_to_a_token_and_are_sent_whole(stage: Stage) -> None:
    await stage.press(*"sum up: ")
    await stage.post(LONG.replace("\n", "\r"))
    await stage.press(*" ok?")
    assert stage.composer.text == f"sum up: {TOKEN} ok?" and TOKEN in stage.screen_text
    await stage.press("enter")
    await stage.idle()
    shown = str(stage.chat.query_one(UserMessage).render())
    assert f"line {MAX_LINES}" in shown and "line 200" not in shown
    assert f"[{200 - MAX_LINES} more lines were sent]" in shown
    assert stage.sent == [f"sum up: {LONG} ok?"]


@staged()
async def test_a_few_lines_are_not_folded_and_a_long_line_is(stage: Stage) -> None:
    few, wide = "x\n" * FOLD_LINES, "x" * (FOLD_CHARACTERS + 1)
    await stage.post(few)
    assert stage.composer.text == few
    await stage.post(wide)
    assert stage.composer.text == f"{few}[1,001 characters pasted]"


@staged()
async def test_a_token_is_one_unit_to_every_key_that_deletes_or_moves(stage: Stage) -> None:
    composer = stage.composer
    await stage.press("a")
    await stage.post(LONG)
    await stage.press("b", "left", "backspace")
    assert composer.text == "ab"
    await stage.press("ctrl+underscore")
    assert composer.text == f"a{TOKEN}b", "undone, and whole"
    await stage.press("home", "right", "delete")
    assert composer.text == "ab"
    await stage.press("ctrl+underscore", "end", "left", "left")
    assert composer.cursor_location == (0, 1), "one step over all of it"
    await stage.press("right")
    assert composer.cursor_location == (0, 1 + len(TOKEN))
    await stage.press("ctrl+w")
    assert "pasted" not in composer.text and composer.text.endswith("b")
    await stage.press("ctrl+underscore", "end", "shift+left", "shift+left", "x")
    assert composer.text == "ax"
    await stage.press("ctrl+underscore")
    composer.move_cursor((0, 5))  # as a click does
    await stage.press("y")
    assert composer.text == f"a{TOKEN}yb"
    await stage.press("ctrl+u")
    assert composer.text == ""
    await stage.press("ctrl+underscore", "enter")
    await stage.idle()
    assert stage.sent == [f"a{LONG}yb"]


@staged()
async def test_several_pastes_of_one_size_are_told_apart_and_one_again_is_itself(stage: Stage) -> None:
    other = LONG.replace("line", "verse")
    for text in (LONG, other, LONG):
        await stage.post(text)
        await stage.press("ctrl+j")
    assert stage.composer.text == f"{TOKEN}\n[200 lines pasted, 2]\n{TOKEN}\n"
    await stage.press("enter")
    await stage.idle()
    assert stage.sent == [f"{LONG}\n{other}\n{LONG}"]


@staged(lambda: ScriptedSession(faults=[ContextError("too long")]))
async def test_edit_the_arrows_and_what_is_given_back_keep_the_text_behind_a_token(stage: Stage) -> None:
    composer = stage.composer
    await stage.post(LONG)
    await stage.press("!", "enter")
    await stage.idle()
    assert composer.text == f"{TOKEN}!", "refused: it is back"
    await stage.press("enter")
    await stage.idle()
    await stage.press("up")
    assert composer.text == f"{TOKEN}!"
    await stage.press("ctrl+u", "f8")
    assert composer.text == f"{TOKEN}!" and composer.message == f"{LONG}!"
    await stage.press("enter")
    await stage.idle()
    assert stage.sent[-2:] == [f"{LONG}!"] * 2
    assert [turn.content for turn in stage.turns if turn.role == "user"] == [f"{LONG}!"]


@staged()
async def test_what_is_pasted_counts_whole_against_the_limit_and_a_megabyte_is_refused(stage: Stage) -> None:
    began = time.monotonic()
    await stage.post("x" * 1_000_000)
    assert "1,000,000 characters were pasted" in stage.notified
    assert stage.composer.text == "" and time.monotonic() - began < 30
    for begin in "ab":
        await stage.post(begin * (MAX_PASTE // 2 + 1))
    assert stage.composer.text == "[50,001 characters pasted]" and "50,001 characters were pasted" in stage.notified
    await stage.press("ctrl+u")
    await stage.post("x" * MAX_PASTE)
    assert len(stage.composer.message) == MAX_PASTE
