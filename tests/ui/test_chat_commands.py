"""The commands and keys that act on the conversation as a whole: slash commands, help, edit, copy, the picker."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from textual.pilot import Pilot

from dflash_local.app.model_entries import ModelEntry
from dflash_local.errors import SettingsError
from dflash_local.events import Piece, Step
from dflash_local.store.records import Turn
from dflash_local.ui.tui.transcript import UserMessage
from tests.service.scripted import ScriptedSession
from tests.ui.stage import Stage, play


def roles(stage: Stage) -> list[str]:
    return [turn.role for turn in stage.chat_session.conversation.turns]


def test_commands_run_beside_the_screen_and_answer_in_it() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        stage.chat_session.acts["/stats"] = lambda: stage.chat_session.say("all the [bold]figures[/bold]")
        await pilot.press(*"/st")
        await pilot.pause()
        assert "Tab: /stats" in stage.screen_text
        await pilot.press("tab", "enter")
        await pilot.pause()
        await stage.idle(pilot)
        assert "all the [bold]figures[/bold]" in stage.screen_text, "no markup is read into it"

    assert play(act).chat_session.executed == ["/stats"]


@contextmanager
def slow_command(stage: Stage, error: SettingsError | None = None) -> Iterator[None]:
    """Within, ``/stats`` says something at once; it ends, or fails, at the end."""
    go = threading.Event()

    def wait() -> None:
        stage.chat_session.say("counting")
        assert go.wait(60)
        if error is not None:
            raise error

    stage.chat_session.acts["/stats"] = wait
    try:
        yield
    finally:
        go.set()


async def type_ahead(stage: Stage, pilot: Pilot[Any], *lines: str) -> None:
    """Send lines without waiting for what comes of them."""
    for line in lines:
        stage.chat.composer.put(line)
        await pilot.press("enter")
        await pilot.pause()


@pytest.mark.parametrize(("ahead", "executed"), [("hi", ["/stats"]), ("/set seed 1", ["/stats", "/set seed 1"])])
def test_what_is_sent_while_a_command_runs_waits_for_its_end(ahead: str, executed: list[str]) -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        with slow_command(stage):
            await type_ahead(stage, pilot, "/stats", ahead)
            await stage.until(lambda: "counting" in stage.screen_text, pilot)
            assert stage.chat.composer.text == "" and "waits for what runs" in stage.screen_text
            assert stage.session.requests == [] and stage.chat_session.executed == ["/stats"]
            await type_ahead(stage, pilot, "one too many")
            assert stage.chat.composer.text == "one too many", "one line waits, not two"
        await stage.until(lambda: len(stage.chat_session.executed) + len(stage.session.requests) == 2, pilot)
        await stage.idle(pilot)
        assert "waits for what runs" not in stage.screen_text and stage.chat.composer.text == "one too many"
        assert ("Hello, world!" in stage.screen_text) == (ahead == "hi")

    assert play(act).chat_session.executed == executed


def test_what_waits_goes_back_on_escape_and_when_the_command_fails() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        with slow_command(stage):
            await type_ahead(stage, pilot, "/stats", "hi")
            assert stage.chat.composer.text == ""
            await pilot.press("escape")
            await pilot.pause()
            assert stage.chat.composer.text == "hi" and "waits for what runs" not in stage.screen_text
        await stage.idle(pilot)
        with slow_command(stage, SettingsError("no figures")):
            await type_ahead(stage, pilot, "/stats", "hi")
        await stage.until(lambda: stage.chat.composer.text == "hi" and "no figures" in stage.screen_text, pilot)
        assert "waits for what runs" not in stage.screen_text

    assert play(act).session.requests == []


def test_what_waits_is_sent_when_the_command_changed_what_was_said() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        go = threading.Event()
        turns = [Turn("user", "before"), Turn("assistant", "earlier")]

        def load() -> None:
            assert go.wait(60)
            stage.chat_session.conversation.turns.extend(turns)

        stage.chat_session.acts["/load x"] = load
        await type_ahead(stage, pilot, "/load x", "hi")
        go.set()
        await stage.until(lambda: bool(stage.session.requests), pilot)
        await stage.idle(pilot)
        assert [str(child.render()) for child in stage.chat.query(UserMessage)] == ["before", "hi"]

    stage = play(act)
    assert [message.content for message in stage.session.requests[0].messages] == ["before", "earlier", "hi"]


def test_a_reply_that_has_ended_cannot_be_stopped_while_it_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        written = threading.Event()
        recorder = stage.chat_session.conversation.recorder
        write = recorder.turn

        def slowly(pair: str, system: str, turns: Sequence[Turn]) -> None:
            assert turns[-1].role == "user" or written.wait(60)
            write(pair, system, turns)

        monkeypatch.setattr(recorder, "turn", slowly)
        await type_ahead(stage, pilot, "hi")
        try:
            await stage.until(lambda: stage.chat.busy and stage.chat.readings.stats is not None, pilot)
            await pilot.press("ctrl+c")
            await pilot.pause()
            assert [note.message for note in stage.app._notifications] == ["Ctrl+C again leaves"]
        finally:
            written.set()
        await stage.idle(pilot)
        assert stage.chat.readings.state == "ready"

    play(act)


OFFERED = ("Say hello.", "Say [bold]goodbye[/bold].")


def test_an_empty_conversation_offers_prompts_to_tab_and_to_a_click() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        assert all(prompt in stage.screen_text for prompt in OFFERED)
        await pilot.press("tab")
        assert stage.chat.composer.text == OFFERED[0]
        await pilot.press("tab", "tab", "tab")
        assert stage.chat.composer.text == OFFERED[1]
        await pilot.press("!", "tab")
        assert stage.chat.composer.text == f"{OFFERED[1]}!", "what the user typed is the user's"
        stage.chat.composer.focus()
        await pilot.click(".example")
        assert stage.chat.composer.text == OFFERED[0] and stage.chat.composer.has_focus
        await pilot.press("enter")
        await pilot.pause()
        await stage.idle(pilot)
        assert "Try one of these" not in stage.screen_text
        await pilot.press("tab")
        assert stage.chat.composer.text == ""
        stage.chat.composer.focus()
        stage.chat_session.acts["/clear"] = stage.chat_session.conversation.start_over
        stage.chat_session.examples = OFFERED[1:]
        await stage.send("/clear", pilot)
        assert OFFERED[1] in stage.screen_text and OFFERED[0] not in stage.screen_text

    assert [request.messages[-1].content for request in play(act, examples=OFFERED).session.requests] == [OFFERED[0]]


def test_a_message_may_begin_with_two_slashes() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await stage.send("//etc is a folder", pilot)

    assert play(act).session.requests[0].messages[-1].content == "/etc is a folder"


def test_help_names_keys_and_commands_and_goes_away() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await pilot.press("f1")
        await pilot.pause()
        assert all(word in stage.screen_text for word in ("Ctrl+R", "/set [NAME VALUE]", "/copy [N]"))
        await pilot.press("escape")
        await pilot.pause()
        assert "Ctrl+R  " not in stage.screen_text

    play(act, size=(120, 50))


def test_ctrl_underscore_undoes_since_ctrl_z_sleeps() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await pilot.press("a")  # one: what is typed within two seconds is undone together
        await pilot.press("ctrl+z")  # no terminal here to go back to
        assert stage.chat.composer.text == "a"
        await pilot.press("ctrl+underscore")
        assert stage.chat.composer.text == ""

    play(act)


def test_edit_last_brings_the_message_back() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await stage.send("hi", pilot)
        await pilot.press("f8")
        await pilot.pause()
        assert stage.chat.composer.text == "hi" and not stage.chat.transcript.replies

    assert roles(play(act)) == []


def test_copy_takes_the_reply_or_a_code_block() -> None:
    reply = "Look:\n```python\nx = 1\n```\nand\n~~~\ny\n~~~\n"

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await stage.send("hi", pilot)
        await pilot.press("f9")
        assert stage.app.clipboard == reply
        for number, code in (("1", "x = 1"), ("2", "y"), ("9", "y")):
            await stage.send(f"/copy {number}", pilot)
            assert stage.app.clipboard == code

    play(act, ScriptedSession(steps=[Step((Piece(reply),), (1,), 0, 0, 0, 0.0)]))


def test_the_picker_offers_what_is_here_first_and_loads_it() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        stage.chat_session.registry = [
            ModelEntry("big/one", "absent", "needs 99 GiB", "90.0 GiB"),
            ModelEntry("fits/one", "partial", "fits in nf4", "9.0 GiB"),
            ModelEntry("here", "local", "fits", "1.0 GiB"),
        ]
        await pilot.press("f7")
        await stage.until(lambda: "Fits this machine" in stage.screen_text, pilot)
        text = stage.screen_text
        assert text.index("here  ") < text.index("big/one") < text.index("needs 99 GiB") < text.index("fits/one")
        await pilot.press("enter")
        await pilot.pause()
        await stage.idle(pilot)

    assert play(act).chat_session.executed == ["/model here"]


def test_a_registry_that_cannot_be_read_is_told() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        stage.chat_session.registry = SettingsError("registry.yaml line 3: no such key")
        await stage.send("/models", pilot)
        assert "registry.yaml line 3" in stage.screen_text

    play(act)
