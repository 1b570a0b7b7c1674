"""The commands and keys that act on the conversation as a whole: slash commands, help, edit, copy, the picker."""

from __future__ import annotations

from dflash_local.errors import SettingsError
from dflash_local.events import Piece, Step
from dflash_local.ui.offers import Offer
from tests.service.scripted import ScriptedSession
from tests.ui.stage import Stage, play


def roles(stage: Stage) -> list[str]:
    return [turn.role for turn in stage.desk.conversation.turns]


def test_commands_run_beside_the_screen_and_answer_in_it() -> None:
    async def act(stage: Stage, pilot) -> None:
        stage.desk.acts["/stats"] = lambda: stage.desk.say("all the [bold]figures[/bold]")
        await pilot.press(*"/st")
        await pilot.pause()
        assert "Tab: /stats" in stage.screen_text
        await pilot.press("tab", "enter")
        await pilot.pause()
        await stage.idle(pilot)
        assert "all the [bold]figures[/bold]" in stage.screen_text, "no markup is read into it"

    assert play(act).desk.executed == ["/stats"]


def test_a_message_may_begin_with_two_slashes() -> None:
    async def act(stage: Stage, pilot) -> None:
        await stage.send("//etc is a folder", pilot)

    assert play(act).session.requests[0].messages[-1].content == "/etc is a folder"


def test_help_names_keys_and_commands_and_goes_away() -> None:
    async def act(stage: Stage, pilot) -> None:
        await pilot.press("f1")
        await pilot.pause()
        assert all(word in stage.screen_text for word in ("Ctrl+R", "/set [NAME VALUE]", "/copy [N]"))
        await pilot.press("escape")
        await pilot.pause()
        assert "Ctrl+R  " not in stage.screen_text

    play(act, size=(120, 50))


def test_ctrl_underscore_undoes_since_ctrl_z_sleeps() -> None:
    async def act(stage: Stage, pilot) -> None:
        await pilot.press(*"ab")
        await pilot.press("ctrl+z")  # no terminal here to go back to
        assert stage.chat.composer.text == "ab"
        await pilot.press("ctrl+underscore")
        assert stage.chat.composer.text == ""

    play(act)


def test_edit_last_brings_the_message_back() -> None:
    async def act(stage: Stage, pilot) -> None:
        await stage.send("hi", pilot)
        await pilot.press("f8")
        await pilot.pause()
        assert stage.chat.composer.text == "hi" and not stage.chat.transcript.replies

    assert roles(play(act)) == []


def test_copy_takes_the_reply_or_a_code_block() -> None:
    reply = "Look:\n```python\nx = 1\n```\nand\n~~~\ny\n~~~\n"

    async def act(stage: Stage, pilot) -> None:
        await stage.send("hi", pilot)
        await pilot.press("f9")
        assert stage.app.clipboard == reply
        for number, code in (("1", "x = 1"), ("2", "y"), ("9", "y")):
            await stage.send(f"/copy {number}", pilot)
            assert stage.app.clipboard == code

    play(act, ScriptedSession(steps=[Step((Piece(reply),), (1,), 0, 0, 0, 0.0)]))


def test_the_picker_offers_what_is_here_first_and_loads_it() -> None:
    async def act(stage: Stage, pilot) -> None:
        stage.desk.registry = [
            Offer("big/one", "absent", "needs 99 GiB", "90.0 GiB"),
            Offer("fits/one", "partial", "fits in nf4", "9.0 GiB"),
            Offer("here", "local", "fits", "1.0 GiB"),
        ]
        await pilot.press("f7")
        await stage.until(lambda: "Fits this machine" in stage.screen_text, pilot)
        text = stage.screen_text
        assert text.index("here  ") < text.index("fits/one") < text.index("big/one") < text.index("needs 99 GiB")
        await pilot.press("enter")
        await pilot.pause()
        await stage.idle(pilot)

    assert play(act).desk.executed == ["/model here"]


def test_a_registry_that_cannot_be_read_is_told() -> None:
    async def act(stage: Stage, pilot) -> None:
        stage.desk.registry = SettingsError("registry.yaml line 3: no such key")
        await stage.send("/models", pilot)
        assert "registry.yaml line 3" in stage.screen_text

    play(act)
