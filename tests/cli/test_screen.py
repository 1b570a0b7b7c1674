"""When ``dflash chat`` and ``dflash race`` take the whole screen, and how they serve it."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_local import terminal
from dflash_local.cli.console import Console
from dflash_local.cli.screen import draw_plainly
from dflash_local.errors import DFlashError, EngineError, Interrupted, UsageError
from dflash_local.events import LoadProgress, PullProgress
from dflash_local.planner.occupancy import Occupancy
from dflash_local.store import history
from tests.cli.conftest import DRAFTER, TARGET, Cli, Opened
from tests.fake_hub import FakeHub
from tests.service.scripted import ScriptedFacts, ScriptedSession


@pytest.fixture
def person(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody sits at both ends."""
    monkeypatch.setattr(terminal, "is_terminal", lambda _stream: True)
    monkeypatch.setattr(Console, "interactive", property(lambda self: True))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The chats that a screen was opened for; the screen itself loads, and leaves with 0."""
    chats: list[Any] = []
    acting(monkeypatch, lambda chat: chats.append(chat) or 0)
    return chats


def acting(monkeypatch: pytest.MonkeyPatch, act: Callable[[Any], int]) -> None:
    def run(chat: Any, greeting: str) -> int:
        chat.told, chat.greeting = [], greeting
        chat.listen(chat.told.append)
        chat.open()
        return act(chat)

    monkeypatch.setattr("dflash_local.cli.chat.application", lambda _console: run)


def test_only_a_real_terminal_gets_the_screen(
    cli: Cli, opened: Opened, person: None, shown: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtins, "input", lambda _prompt: (_ for _ in ()).throw(EOFError))
    assert cli("chat", "demo").code == 0 and len(shown) == 1 and opened.session.closed
    cli("chat", "demo", "--plain")
    monkeypatch.setenv("TERM", "dumb")
    cli("chat", "demo")
    assert len(shown) == 1
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(Console, "interactive", property(lambda self: False))
    assert cli("chat", "demo", stdin="hi\n").out == "Hello, world!\n" and len(shown) == 1
    monkeypatch.setattr(Console, "interactive", property(lambda self: True))
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: stream is not sys.stderr)
    cli("chat", "demo")
    assert len(shown) == 1, "screens paint on stderr, so that one counts as well"


def test_without_textual_it_is_the_line_chat_and_one_note(
    cli: Cli, opened: Opened, person: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dflash_local.ui.tui.app", None)
    monkeypatch.setattr(builtins, "input", lambda _prompt: (_ for _ in ()).throw(EOFError))
    result = cli("chat", "demo")
    assert result.code == 0 and result.err.count("the screen cannot be shown") == 1 and "bye" in result.err


def test_the_toy_pair_is_called_one_and_told_what_a_gpu_brings(
    cli: Cli, opened: Opened, person: None, shown: list[Any]
) -> None:
    cli("chat")
    assert "demo (toy pair) (no MODEL was given)" in shown[0].greeting and "With a GPU" in shown[0].greeting


def test_the_commands_answer_the_screen(
    cli: Cli, opened: Opened, person: None, monkeypatch: pytest.MonkeyPatch, chats: Any
) -> None:
    def act(chat: Any) -> int:
        with chat.conversation.answer("hi") as answer:
            list(answer)
        lines = ("/set top_k 5", "/stats", "/save mine", "/clear", "/load mine", "/model demo-hybrid")
        texts = [chat.execute(line) for line in lines]
        with pytest.raises(UsageError, match="unknown command"):
            chat.execute("/xyzzy")
        assert texts[0] == "top_k 5" and "how often each acceptance length" in texts[1]
        assert all(isinstance(event, LoadProgress) for event in chat.told)
        assert "2 messages of a chat with demo" in texts[4] and "Hello" not in texts[4]
        assert texts[5] == "now talking to demo-hybrid (toy pair)"
        assert chat.conversation.options.sampling == {"top_k": 5} and len(chat.conversation.turns) == 2
        own = {name for name, command in chat.commands.items() if command.act is None}
        assert own == {"/help", "/regen", "/continue", "/quit"}, "each screen has its own"
        return 0

    acting(monkeypatch, act)
    result = cli("chat", "demo")
    assert result.code == 0, result.err
    assert "mine" in [entry.name for entry in history.entries(chats)] and [pair.name for pair in opened.pairs] == [
        "demo",
        "demo-hybrid",
    ]


def test_the_exit_code_is_the_screens_or_7_for_a_broken_session(
    cli: Cli, opened: Opened, person: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting(monkeypatch, lambda _chat: 143)
    assert cli("chat", "demo").code == 143

    def act(chat: Any) -> int:
        with pytest.raises(EngineError), chat.conversation.answer("hi") as answer:
            list(answer)
        return 0

    opened.make = lambda _pair: ScriptedSession(faults=[EngineError("dead")])
    acting(monkeypatch, act)
    result = cli("chat", "demo")
    assert result.code == 7 and "the session broke" in result.err and opened.session.closed


def test_where_the_encoding_is_poor_signs_stand_for_signs() -> None:
    draw_plainly()
    shown = "╭─╮│█▌░ ▲ a·b ‹c› 模é".encode("ascii", "dflash-screen")
    assert shown == b"+-+|#|. ! a.b <c> ??"
    with pytest.raises(UnicodeDecodeError):
        b"\xff".decode("ascii", "dflash-screen")


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "dflash serve"])
def test_the_memory_is_of_the_process_that_holds_the_pair(
    cli: Cli, opened: Opened, person: None, own_home: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    facts = ScriptedFacts(pid=os.getpid())

    def act(chat: Any) -> int:
        held = chat.memory()
        assert held.whose == ("the engine" if elsewhere else "this process")
        assert 0 < held.used < held.total
        chat.close()
        assert chat.memory() == Occupancy(), "nothing is loaded"
        return 0

    if elsewhere:
        opened.make = lambda _pair: ScriptedSession(facts)
    acting(monkeypatch, act)
    assert cli("chat", "demo").code == 0


def test_a_race_on_a_screen_leaves_its_table_on_the_terminal(
    cli: Cli, opened: Opened, person: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(title: str, prompt: str, prepare: Any, about: Any) -> tuple[int, Any]:
        assert (title, prompt) == ("demo (toy pair)", "hi")
        race = prepare(lambda _event: None).run()
        assert about(race).command == f"dflash race demo --seed {race.seed} --max-new-tokens 256 --no-think hi"
        return 0, race

    monkeypatch.setattr("dflash_local.cli.race.application", lambda *_: run)
    result = cli("race", "demo", "hi")
    assert result.code == 0 and "identical: yes" in result.out and opened.session.closed
    assert "Hello" not in result.out


def test_a_race_on_a_screen_is_saved_when_it_is_left(
    cli: Cli, opened: Opened, person: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(_title: str, _prompt: str, prepare: Any, *_about: Any) -> tuple[int, Any]:
        return 0, prepare(lambda _event: None).run()

    monkeypatch.setattr("dflash_local.cli.race.application", lambda *_: run)
    assert cli("race", "demo", "hi", "--save", str(tmp_path / "race.json")).code == 0
    assert '"identical": true' in (tmp_path / "race.json").read_text(encoding="utf-8")


def test_the_screen_downloads_a_pair_of_the_registry(
    toy_hub: FakeHub, own_home: Path, cli: Cli, opened: Opened, person: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(chat: Any) -> int:
        entries = {entry.name: entry for entry in chat.entries()}
        assert entries["demo"].here and entries[TARGET].state == "absent" and len(entries) > 20
        assert chat.entry("toy-9b") == entries[TARGET] and not entries[TARGET].here
        heard: list[Any] = []
        with pytest.raises(Interrupted, match="stopped; "):
            chat.pull(TARGET, heard.append, lambda: True)
        heard.clear()
        before = chat.before_download("toy-9b")
        assert before.licence == "unknown" and "free for" in before.disk
        chat.pull("toy-9b", heard.append, lambda: False, draft=False)
        assert {event.repo for event in heard if isinstance(event, PullProgress)} == {TARGET}
        assert chat.entry("toy-9b").state == "partial", "to be run without its drafter"
        chat.pull("toy-9b", heard.append, lambda: False)
        assert {event.repo for event in heard if isinstance(event, PullProgress)} == {TARGET, DRAFTER}
        assert chat.entry("toy-9b").state == "local" and chat.told == []
        for act in (lambda name: chat.pull(name, heard.append, lambda: False), chat.entry):
            with pytest.raises(DFlashError):
                act("nosuchname")
        with pytest.raises(UsageError, match="not in the registry"):
            chat.entry(str(own_home))
        return 0

    acting(monkeypatch, act)
    result = cli("chat", "demo")
    assert result.code == 0, result.err


def test_the_picker_downloads_from_the_hub_is_stopped_goes_on_and_talks(
    toy_hub: FakeHub, cli: Cli, opened: Opened, person: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_local.ui.tui.app import ChatApp
    from tests.ui.stage import Stage, drive

    async def act(stage: Stage) -> None:
        toy_hub.fault("model.safetensors", "trickle", rate=250_000)
        await stage.send("/pull toy-9b")
        await stage.until(lambda: bool(toy_hub.gets("model.safetensors")))  # then smaller files are finished
        await stage.shows("in all", "MiB/s")
        assert TARGET in stage.screen_text and "Esc stops it" in stage.screen_text
        await stage.press("escape")
        await stage.shows("Enter tries again", "finished files (", ") are kept")
        toy_hub.clear_faults()
        await stage.press("enter")
        await stage.shows(f"{TARGET} is here and verified")
        await stage.press("enter")
        await stage.shows(f"now talking to {TARGET}")
        await stage.idle()  # the screen is drawn once more

    def run(chat: Any, greeting: str) -> int:
        stage = Stage(ChatApp(chat, greeting), chat, opened)  # type: ignore[arg-type]

        async def play(pilot: Any) -> None:
            stage.pilot = pilot
            await stage.idle()
            await act(stage)

        drive(stage.app, play, (100, 30))
        return 0

    monkeypatch.setattr("dflash_local.cli.chat.application", lambda _console: run)
    result = cli("chat", "demo")
    assert result.code == 0, result.err
    assert [pair.name for pair in opened.pairs] == ["demo", TARGET] and opened.pairs[-1].target.is_dir()
