"""What ``dflash chat`` keeps on disk, and what Ctrl-C leaves of a reply."""

from __future__ import annotations

import builtins
import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_local import terminal
from dflash_local.store import history
from dflash_local.store.records import VERSION, Turn, encode_chat
from tests.cli.conftest import Cli, Opened
from tests.service.scripted import HELLO, ScriptedSession

Typed = Callable[..., None]


def kept(chats: Path) -> list[Turn]:
    """The turns of the only chat there is."""
    (name,) = [entry.name for entry in history.entries(chats)]
    return list(history.load(chats, name)[1].turns)


def test_the_chat_is_kept_privately_with_its_figures(cli: Cli, opened: Opened, chats: Path) -> None:
    cli("chat", typed="hi\n")
    turns = kept(chats)
    assert [(turn.role, turn.content) for turn in turns] == [("user", "hi"), ("assistant", "Hello, world!\n")]
    assert turns[1].figures["mean_acceptance_length"] == 2.5 and turns[1].figures["tokens_per_s"] == 120.0
    assert [file.stat().st_mode & 0o777 for file in chats.iterdir()] == [0o600]
    assert chats.stat().st_mode & 0o777 == 0o700


def test_no_history_keeps_nothing(cli: Cli, opened: Opened, chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("chat", "--no-history", typed="hi\n")
    monkeypatch.setenv("DFLASH_HISTORY", "0")
    cli("chat", typed="hi\n")
    assert not chats.exists()
    monkeypatch.delenv("DFLASH_HISTORY")
    cli("chat", typed="/quit\n")
    assert not chats.exists(), "an empty chat is no file"
    cli("chat", stdin="hi\n")
    assert not chats.exists(), "what a program pipes in is no chat"


def test_save_load_clear_and_names(cli: Cli, opened: Opened, chats: Path) -> None:
    result = cli("chat", "--no-history", typed="hi\n/save mine\nho\n/save mine\n/clear\nalone\n/load\n")
    assert "saved:" in result.err and "/clear undo" in result.err
    assert [line.split() for line in result.err.splitlines() if "just now" in line] == [
        "1 mine just now demo 4".split()
    ]
    assert len(opened.session.requests[2].messages) == 1
    again = cli("chat", typed="/system old\n/load mine\nmore\n")
    assert "4 messages of a chat with demo" in again.err and ">>> hi" in again.err
    assert [m.content for m in opened.session.requests[0].messages][-1] == "more"
    assert len(opened.session.requests[0].messages) == 5
    assert len(history.load(chats, "mine")[1].turns) == 6, "the chat goes on in its file"
    assert "already" in cli("chat", typed="hi\n/save mine\n").err


def test_a_chat_is_named_while_it_is_open(cli: Cli, opened: Opened, chats: Path) -> None:
    result = cli("chat", typed="hi\n/title\n/title Rivers of  Peru\nho\n/load\n")
    assert "title: hi\ntitle: Rivers of Peru\n" in result.err
    assert [line.split()[1:4] for line in result.err.splitlines() if "just now" in line] == [["Rivers", "of", "Peru"]]
    assert [turn.content for turn in kept(chats)][::2] == ["hi", "ho"], "the chat goes on in its file"
    assert "4 messages of a chat" in cli("chat", "--resume", "rivers of", stdin="").err


def test_clear_is_undone_and_a_cut_reply_goes_on(cli: Cli, opened: Opened, chats: Path) -> None:
    opened.make = lambda _pair: ScriptedSession(end="length")
    result = cli("chat", typed="hi\n/clear undo\n/clear\n/clear undo\n/continue\n/clear later\n")
    assert "nothing to bring back" in result.err and "2 messages brought back" in result.err
    assert "/clear takes no 'later'" in result.err and result.out == "Hello, world!\n" * 2
    assert [turn.content for turn in kept(chats)] == ["hi", "Hello, world!\n" * 2]


def test_continue_and_resume_go_on_with_a_chat_and_its_model(cli: Cli, opened: Opened, chats: Path) -> None:
    assert "no chat to go on with" in cli("chat", "--continue").err
    cli("chat", "demo-hybrid", typed="Old tales\n")
    cli("chat", typed="new ones\n")
    for path, age in zip(sorted(chats.iterdir(), key=lambda path: b"Old" in path.read_bytes()), (60, 7200)):
        os.utime(path, (time.time() - age, time.time() - age))
    opened.pairs.clear()
    last = cli("chat", "--continue", stdin="more\n")
    assert "2 messages of a chat with demo\n>>> new ones\n" in last.err and "no MODEL" not in last.err
    assert [m.content for m in opened.session.requests[0].messages] == ["new ones", "Hello, world!\n", "more"]
    cli("chat", "--resume", "old TALES", typed="more\n")
    other = cli("chat", "demo", "--resume", "old", stdin="")
    assert "4 messages of a chat with demo-hybrid" in other.err and "talking to demo (toy pair)\n" not in other.err
    assert [pair.name for pair in opened.pairs] == ["demo", "demo-hybrid", "demo"]
    for wrong, complaint in (
        (["--resume"], "--resume needs a chat where nobody can choose"),
        (["--resume", "--continue"], "leave one out"),
        (["--resume", "none"], "no chat 'none'"),
    ):
        result = cli("chat", *wrong)
        assert result.code == 2 and complaint in result.err


def test_resume_without_a_name_lists_the_chats(cli: Cli, opened: Opened, chats: Path, typed: Typed) -> None:
    for name in ("one", "two"):
        history.save(chats, name, encode_chat("demo", "", [Turn("user", name)]), replace=False)
        os.utime(chats / f"{name}.jsonl", (1, 1 + len(name) * (name == "two")))
    typed("more")
    result = cli("chat", "--plain", "--resume", stdin="2\n")
    assert "which one? 1 to 2" in result.err and [m.content for m in opened.session.requests[0].messages] == [
        "one",
        "more",
    ]


def test_a_chat_whose_model_is_gone_is_one_clear_line(cli: Cli, opened: Opened, chats: Path) -> None:
    history.save(chats, "gone", encode_chat("/no/such/folder", "", [Turn("user", "hi")]), replace=False)
    result = cli("chat", "--continue")
    assert result.code == 2 and "the chat is with /no/such/folder, and no such model is here" in result.err
    assert cli("chat", "demo", "--continue").code == 0


def test_a_newer_chat_is_loaded_said_to_be_read_only_and_not_touched(cli: Cli, opened: Opened, chats: Path) -> None:
    raw = encode_chat("demo", "", [Turn("user", "from the future")])
    path = history.save(chats, "future", raw.replace(b'"version": %d' % VERSION, b'"version": 9'), replace=False)
    before = path.read_bytes()
    result = cli("chat", typed="/load future\nhi\n")
    assert "newer version" in result.err and path.read_bytes() == before
    assert [m.content for m in opened.session.requests[0].messages] == ["from the future", "hi"]
    assert len(history.entries(chats)) == 2


def test_a_disk_that_is_full_is_one_warning_and_the_chat_goes_on(
    cli: Cli, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    result = cli("chat", typed="one\ntwo\nthree\n")
    assert result.code == 0 and result.out == "Hello, world!\n" * 3
    assert result.err.count("warning:") == 1 and "No space left" in result.err


def test_without_home_the_chat_goes_on(cli: Cli, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "USERPROFILE", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    result = cli("chat", typed="one\ntwo\n")
    assert result.code == 0 and result.out == "Hello, world!\n" * 2 and result.err.count("warning:") == 1


def test_export_writes_both_forms(cli: Cli, opened: Opened, tmp_path: Path) -> None:
    cli("chat", "--system", "brief", typed=f"hi\n/export {tmp_path}/t.md\n/export '{tmp_path}/t.json'\n")
    assert "acceptance_length 2.5" in (tmp_path / "t.md").read_text()
    assert json.loads((tmp_path / "t.json").read_text())["messages"][1]["figures"]["seed"] == 99


def test_system_is_shown_changed_and_removed(cli: Cli, opened: Opened) -> None:
    result = cli("chat", typed="/system be kind\nhi\n/system off\nho\n/system\n")
    first, second = opened.session.requests
    assert first.messages[0].content == "be kind" and second.messages[0].role == "user"
    assert "system message: none" in result.err


def interrupting(at: int, times: int = 1, replies_before: int = 0) -> ScriptedSession:
    """A session in which Ctrl-C is pressed before a step of every reply, or of those behind so many, after which only
    cancelling helps.
    """

    def press(index: int) -> None:
        here = index == at and len(session.requests) > replies_before
        session.gate = threading.Event() if here else None
        for _ in range(times if here else 0):
            os.kill(os.getpid(), signal.SIGINT)

    session = ScriptedSession(steps=HELLO, on_step=press)
    return session


def test_ctrl_c_stops_the_reply_and_keeps_what_came_marked(cli: Cli, opened: Opened, chats: Path) -> None:
    opened.make = lambda _pair: interrupting(at=1)
    result = cli("chat", typed="one\ntwo\n")
    assert result.code == 0 and result.out == "Hello\nHello\n" and result.err.count("[stopped]") == 2
    assert [m.content for m in opened.session.requests[1].messages] == ["one", "Hello", "two"]
    assert kept(chats)[1].stopped is True


def test_ctrl_c_before_any_text_takes_the_message_back(cli: Cli, opened: Opened, chats: Path) -> None:
    opened.make = lambda _pair: interrupting(at=0)
    result = cli("chat", typed="one\n")
    assert result.code == 0 and "taken back" in result.err and kept(chats) == []


def test_ctrl_c_before_any_text_of_another_try_keeps_the_reply(cli: Cli, opened: Opened, chats: Path) -> None:
    opened.make = lambda _pair: interrupting(at=0, replies_before=1)
    result = cli("chat", typed="one\n/regen\n")
    assert "nothing came of it, the earlier reply stays" in result.err
    assert [turn.content for turn in kept(chats)] == ["one", "Hello, world!\n"]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Typed:
    """A person at a terminal who types these lines; an exception class is raised in a line's place."""

    def prepare(*lines: str | type[BaseException]) -> None:
        waiting = list(lines)

        def fake_input(prompt: str = "") -> str:
            line = waiting.pop(0) if waiting else EOFError
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr(builtins, "input", fake_input)
        monkeypatch.setattr(terminal, "is_terminal", lambda _stream: True)

    return prepare


def test_ctrl_c_at_the_prompt_hints_and_twice_leaves(cli: Cli, opened: Opened, typed: Typed) -> None:
    typed(KeyboardInterrupt, "hi", KeyboardInterrupt, KeyboardInterrupt, "never read")
    result = cli("chat", "--plain")
    assert result.code == 0 and result.err.count("Ctrl-C again") == 2
    assert len(opened.session.requests) == 1 and opened.session.closed


def test_end_of_input_leaves(cli: Cli, opened: Opened, typed: Typed) -> None:
    typed("hi")
    result = cli("chat", "--plain")
    assert result.code == 0 and "bye" in result.err and len(opened.session.requests) == 1
