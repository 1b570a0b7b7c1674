"""The commands and keys that act on the conversation as a whole: slash commands, help, copy, the picker."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from textual.widgets import Static

from dflash_local import settings
from dflash_local.app.model_entries import ModelEntry
from dflash_local.errors import SettingsError
from dflash_local.request import Request
from dflash_local.settings import SETTINGS_FILE
from dflash_local.store import history
from dflash_local.store.records import Chat, Turn, encode_chat
from dflash_local.ui.tui.command_menu import CommandMenu
from dflash_local.ui.tui.theme import use_theme
from dflash_local.ui.tui.transcript import UnsentFold, UserMessage
from tests.service.scripted import ScriptedSession
from tests.ui.stage import Stage, play, saying, staged


@staged()
async def test_commands_run_beside_the_screen_and_answer_in_it(stage: Stage) -> None:
    stage.chat_session.acts["/stats"] = lambda: stage.chat_session.say("all the [bold]figures[/bold]")
    await stage.press(*"/st")
    assert "/stats  figures" in stage.screen_text
    await stage.press("tab", "enter")
    await stage.idle()
    assert "all the [bold]figures[/bold]" in stage.screen_text, "no markup is read into it"
    await stage.send("//etc is a folder")
    assert stage.chat_session.executed == ["/stats"] and stage.sent == ["/etc is a folder"]


@staged()
async def test_a_slash_offers_the_commands_and_the_arrows_choose(stage: Stage) -> None:
    menu, composer = stage.chat.query_one(CommandMenu), stage.composer
    await stage.press("/")
    assert menu.display and "/copy [N]" in stage.screen_text
    await stage.press("s")
    assert list(composer.offered) == ["/set [NAME VALUE]", "/stats"]
    await stage.press("up", "tab")
    assert composer.text == "/stats " and not menu.display
    await stage.press("ctrl+c")
    assert composer.text == "" and stage.notified != "Ctrl+C again leaves", "the first Ctrl+C empties the field"
    await stage.press(*"/s", "down", "enter")
    await stage.idle()
    await stage.press(*"/pul", "enter")
    assert composer.text == "/pull " and stage.chat_session.executed == ["/stats"], "one that needs a word is not sent"
    await stage.press("ctrl+u", *"/s", "escape")
    assert composer.text == "/s" and not menu.display
    await stage.press("ctrl+u", "up", "up")
    assert composer.text == "/stats" and not menu.display, "the arrows bring back what was sent"


class NearlyFull(ScriptedSession):
    """Counts 420 tokens of its context of 512."""

    def count(self, request: Request) -> int:
        return 420


def test_a_context_that_is_nearly_full_is_said_above_the_reply_also_on_a_small_screen() -> None:
    async def act(stage: Stage) -> None:
        await stage.send("hi")
        text = " ".join(stage.screen_text.split())
        assert text.index("the context is 82% full (420 of 512 tokens)") < text.index("Hello, world!")

    play(act, NearlyFull(), size=(80, 24))


class SoonFull(ScriptedSession):
    """Counts 120 tokens for each message, of its context of 512."""

    def count(self, request: Request) -> int:
        return 120 * len(request.messages)


@staged(SoonFull)
async def test_what_is_not_sent_any_more_is_behind_a_line_that_opens(stage: Stage) -> None:
    for text in ("first", "second", "third"):
        await stage.send(text)
    fold = stage.chat.query_one(UnsentFold)
    shown = [one.display for one in stage.chat.query(UserMessage)]
    assert len(stage.session.requests[-1].messages) == 1 and len(stage.turns) == 6
    assert shown == [False, False, True]
    fold.scroll_visible(animate=False)
    await stage.shows("▶ 4 earlier messages are not sent, the chat keeps them")
    fold.focus()
    await stage.press("enter")
    await stage.shows("▼ 4 earlier messages", "first", "second")
    stage.composer.focus()
    await stage.send("fourth")
    assert [one.display for one in stage.chat.query(UserMessage)] == [False, False, True, True]
    await stage.send("/edit")
    await stage.send("/edit")
    assert not stage.chat.query(UnsentFold), "where fewer are left than were not to be sent, all are"
    assert [one.content for one in stage.chat.query(UserMessage)] == ["first", "second"]


def keep_chats(stage: Stage, folder: Path) -> None:
    for name, words in (("rivers", "why rivers wind"), ("apples", "twelve apples")):
        history.save(folder, name, encode_chat("demo", "", [Turn("user", words)]), replace=False)
    stage.chat_session.folder = folder


def test_chats_are_found_by_words_and_gone_on_with(tmp_path: Path) -> None:
    @staged()
    async def act(stage: Stage) -> None:
        keep_chats(stage, tmp_path)
        await stage.enter("/load")
        await stage.shows("apples")
        assert "rivers" in stage.screen_text and "just now" in stage.screen_text
        await stage.press(*"WIND")
        await stage.until(lambda: "apples" not in stage.screen_text)
        await stage.press("down", "enter")
        await stage.idle()
        assert stage.chat_session.executed == ["/load rivers"]

    act()


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


@pytest.mark.parametrize(("ahead", "executed"), [("hi", ["/stats"]), ("/set seed 1", ["/stats", "/set seed 1"])])
@staged()
async def test_what_is_sent_while_a_command_runs_waits(stage: Stage, ahead: str, executed: list[str]) -> None:
    with slow_command(stage):
        await stage.enter("/stats")
        await stage.enter(ahead)
        await stage.shows("counting")
        assert stage.composer.text == "" and "waits for what runs" in stage.screen_text
        assert stage.session.requests == [] and stage.chat_session.executed == ["/stats"]
        await stage.enter("one too many")
        assert stage.composer.text == "one too many", "one line waits, not two"
    await stage.until(lambda: len(stage.chat_session.executed) + len(stage.session.requests) == 2)
    await stage.idle()
    assert "waits for what runs" not in stage.screen_text and stage.composer.text == "one too many"
    assert ("Hello, world!" in stage.screen_text) == (ahead == "hi")
    assert stage.chat_session.executed == executed


@staged()
async def test_what_waits_goes_back_on_escape_and_when_the_command_fails(stage: Stage) -> None:
    with slow_command(stage):
        await stage.enter("/stats")
        await stage.enter("hi")
        assert stage.composer.text == ""
        await stage.press("escape")
        assert stage.composer.text == "hi" and "waits for what runs" not in stage.screen_text
    await stage.idle()
    with slow_command(stage, SettingsError("no figures")):
        await stage.enter("/stats")
        await stage.enter("hi")
    await stage.until(lambda: stage.composer.text == "hi" and "no figures" in stage.screen_text)
    assert "waits for what runs" not in stage.screen_text and stage.session.requests == []


@staged()
async def test_what_waits_is_sent_when_the_command_changed_what_was_said(stage: Stage) -> None:
    go = threading.Event()
    turns = [Turn("user", "before"), Turn("assistant", "earlier")]
    stage.chat_session.acts["/load x"] = lambda: stage.turns.extend(turns) if go.wait(60) else None
    await stage.enter("/load x")
    await stage.enter("hi")
    go.set()
    await stage.until(lambda: bool(stage.session.requests))
    await stage.idle()
    assert [str(child.render()) for child in stage.chat.query(UserMessage)] == ["before", "hi"]
    assert [message.content for message in stage.session.requests[0].messages] == ["before", "earlier", "hi"]


@staged()
async def test_a_reply_being_written_down_cannot_be_stopped(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    written = threading.Event()
    recorder = stage.chat_session.conversation.recorder
    write = recorder.turn

    def slowly(pair: str, system: str, turns: Sequence[Turn]) -> None:
        assert turns[-1].role == "user" or written.wait(60)
        write(pair, system, turns)

    monkeypatch.setattr(recorder, "turn", slowly)
    await stage.enter("hi")
    try:
        await stage.until(lambda: stage.chat.busy and stage.chat.readings.stats is not None)
        await stage.press("ctrl+c")
        assert stage.notified == "Ctrl+C again leaves"
    finally:
        written.set()
    await stage.idle()
    assert stage.chat.readings.state == "ready"


OFFERED = ("Say hello.", "Say [bold]goodbye[/bold].")


@staged(examples=OFFERED)
async def test_an_empty_conversation_offers_prompts_to_tab_and_to_a_click(stage: Stage) -> None:
    composer = stage.composer
    assert all(prompt in stage.screen_text for prompt in OFFERED)
    await stage.press("tab")
    assert composer.text == OFFERED[0]
    await stage.press("tab", "tab", "tab")
    assert composer.text == OFFERED[1]
    await stage.press("!", "tab")
    assert composer.text == f"{OFFERED[1]}!", "what the user typed is the user's"
    composer.focus()
    await stage.pilot.click(".example")
    assert composer.text == OFFERED[0] and composer.has_focus
    await stage.press("enter")
    await stage.idle()
    assert "Try one of these" not in stage.screen_text
    await stage.press("tab")
    assert composer.text == ""
    composer.focus()
    stage.chat_session.acts["/clear"] = stage.chat_session.conversation.start_over
    stage.chat_session.examples = OFFERED[1:]
    await stage.send("/clear")
    assert OFFERED[1] in stage.screen_text and OFFERED[0] not in stage.screen_text
    assert stage.sent == [OFFERED[0]]


@staged()
async def test_figures_go_with_the_conversation_they_are_of(stage: Stage) -> None:
    chat, line = stage.chat_session.conversation, stage.chat.query_one("#status", Static)
    taken_up = Chat("scripted", "", (Turn("user", "earlier"), Turn("assistant", "yes")), False, 0, 0, 1)
    stage.chat_session.acts |= {"/clear": chat.start_over, "/take": lambda: chat.take_up(taken_up)}
    for command in ("/clear", "/take"):
        await stage.send("hi")
        assert "120.0 tok/s" in str(line.content) and "ctx 11/512" in str(line.content)
        await stage.send(command)
        assert "tok/s" not in str(line.content) and "ctx 0/512" in str(line.content)
        assert "0 of 512 tokens" in stage.screen_text and "seed 99" not in stage.screen_text


@staged(size=(120, 50))
async def test_help_names_keys_and_commands_and_goes_away(stage: Stage) -> None:
    await stage.press("f1")
    assert all(word in stage.screen_text for word in ("Ctrl+R", "/set [NAME VALUE]", "/copy [N]"))
    await stage.press("escape")
    assert "Ctrl+R  " not in stage.screen_text


REPLY = "Look:\n```python\nx = 1\n```\nand\n~~~\ny\n~~~\n"


@staged(lambda: saying(REPLY))
async def test_copy_takes_the_reply_or_a_code_block(stage: Stage) -> None:
    await stage.send("hi")
    await stage.press("f9")
    assert stage.app.clipboard == REPLY
    for number, code in (("1", "x = 1"), ("2", "y"), ("9", "y")):
        await stage.send(f"/copy {number}")
        assert stage.app.clipboard == code


@staged()
async def test_the_picker_offers_what_is_here_first_and_loads_it_or_tells_what_is_wrong(stage: Stage) -> None:
    stage.chat_session.registry = SettingsError("registry.yaml line 3: no such key")
    await stage.send("/models")
    assert "registry.yaml line 3" in stage.screen_text
    stage.chat_session.registry = [
        ModelEntry("big/one", "absent", "needs 99 GiB", "90.0 GiB"),
        ModelEntry("fits/one", "partial", "fits in nf4", "9.0 GiB"),
        ModelEntry("here", "local", "fits", "1.0 GiB"),
    ]
    await stage.press("f7")
    await stage.shows("Fits this machine")
    text = stage.screen_text
    assert text.index("here  ") < text.index("big/one") < text.index("needs 99 GiB") < text.index("fits/one")
    await stage.press("enter")
    await stage.idle()
    assert stage.chat_session.executed == ["/model here"]


@staged(lambda: ScriptedSession(end="length"))
async def test_a_reply_that_was_cut_off_goes_on_in_its_place(stage: Stage) -> None:
    await stage.send("hi")
    await stage.send("/continue")
    assert stage.turns[-1].content == "Hello, world!\n" * 2 and stage.roles == ["user", "assistant"]
    assert stage.screen_text.count("Hello, world!") == 2 and stage.screen_text.count("cut off at its limit") == 1


@staged()
async def test_a_theme_and_the_pair_to_begin_with_are_kept_for_the_next_start(stage: Stage, tmp_path: Path) -> None:
    """They go into the settings file, which stays what it was otherwise."""
    file = tmp_path / "dotfiles.json"
    file.write_text('{"temperature": 0.5, "history": false}')
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / SETTINGS_FILE).symlink_to(file)
    environ = {"DFLASH_HOME": str(tmp_path)}
    stage.chat_session.user = settings.load(environ)
    use_theme(stage.app, stage.chat_session.user)
    stage.chat_session.registry = [ModelEntry("rivers", "local", "fits", "1 GiB")]
    await stage.send("/theme nord")
    await stage.enter("/models")
    await stage.shows("m: begin with it")
    await stage.press("m")
    await stage.shows("dflash chat begins with rivers from now on")
    await stage.press("escape")
    kept = settings.load(environ)
    assert (kept.theme, kept.model, kept.temperature, kept.history) == ("nord", "rivers", 0.5, False)
    assert (tmp_path / "config" / SETTINGS_FILE).is_symlink() and file.read_text().index("temp") < 10
    stage.app.theme = "textual-light"
    use_theme(stage.app, replace(kept, theme="none such"))
    await stage.until(lambda: "a theme that is not there: none such" in stage.notified)
    assert stage.app.theme == "textual-light"
    use_theme(stage.app, kept)
    assert stage.app.theme == "nord"
    file.write_text("{")
    await stage.send("/theme dracula")
    await stage.until(lambda: stage.app.theme == "dracula" and "is not JSON any more" in stage.notified)
