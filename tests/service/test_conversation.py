"""One conversation behind three faces: what is kept, taken back, asked again and recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_local.errors import BusyError, ContextError, ServerError, UsageError
from dflash_local.events import Finished, Piece, Step
from dflash_local.request import MAX_MESSAGE_CHARS, Limits, SamplingParams
from dflash_local.service import gathered
from dflash_local.service.chat_options import ChatOptions, parse_setting
from dflash_local.service.conversation import Conversation
from dflash_local.service.gathered import Answer
from dflash_local.service.service import Service
from dflash_local.store import history
from dflash_local.store.history import Recorder
from dflash_local.store.records import Chat, Turn
from tests.service.scripted import ScriptedSession


class Model:
    """What answers: a scripted session."""

    def __init__(self, session: ScriptedSession) -> None:
        self.name, self.sampling = "one", SamplingParams()
        self.service = Service.over(session)
        self.submit, self.count, self.facts = self.service.submit, self.service.count, session.facts


class Table:
    """A conversation with a scripted session, kept in a folder."""

    def __init__(
        self, folder: Path, session: ScriptedSession | None = None, options: ChatOptions | None = None
    ) -> None:
        self.folder, self.session = folder / "chats", session or ScriptedSession()
        self.warnings: list[str] = []
        recorder = Recorder(self.folder, self.warnings.append)
        self.model = Model(self.session)
        self.chat = Conversation(self.model, options or ChatOptions(), recorder)

    def kept(self) -> list[tuple[str, str]]:
        (name,) = [entry.name for entry in history.entries(self.folder)]
        return [(turn.role, turn.content) for turn in history.load(self.folder, name)[1].turns]


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path)


def finish(answer: Answer) -> Answer:
    with answer:
        for _event in answer:
            pass
    return answer


def test_an_answer_is_a_turn_when_its_with_is_left(table: Table) -> None:
    with table.chat.answer("hi") as answer:
        events = list(answer)
        assert isinstance(events[-1], Finished) and [turn.role for turn in table.chat.turns] == ["user"]
    assert answer.text == "Hello, world!\n" and table.chat.last is answer.finished
    assert table.kept() == [("user", "hi"), ("assistant", "Hello, world!\n")]
    assert table.chat.turns[1].figures["mean_acceptance_length"] == 2.5


def test_an_abandoned_answer_is_cancelled_and_taken_back(table: Table) -> None:
    with table.chat.answer("hi") as answer:
        next(answer)
    assert answer.cancelled and table.chat.turns == [] and table.kept() == []
    assert finish(table.chat.answer("ho")).text, "the next one is answered"


def test_a_failed_answer_is_taken_back_with_its_error(tmp_path: Path) -> None:
    table = Table(tmp_path, ScriptedSession(faults=[ContextError("too long")]))
    with pytest.raises(ContextError):
        finish(table.chat.answer("hi"))
    assert table.chat.turns == [] and table.kept() == []


def test_what_cannot_be_sent_leaves_nothing(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError):
        table.chat.answer("x" * (MAX_MESSAGE_CHARS + 1))
    finish(table.chat.answer("hi"))

    def full(_request: object) -> None:
        raise BusyError("full")

    monkeypatch.setattr(table.model, "submit", full)
    for ask in (lambda: table.chat.answer("ho"), table.chat.regenerate):
        with pytest.raises(BusyError):
            finish(ask())
    assert [turn.role for turn in table.chat.turns] == ["user", "assistant"]


def test_a_stopped_answer_keeps_what_came(tmp_path: Path) -> None:
    table = Table(tmp_path)
    answer: Any
    table.session.on_step = lambda index: answer.cancel() if index == 1 else None
    answer = table.chat.answer("hi")
    finish(answer)
    assert answer.stopped and table.chat.turns[-1].stopped and table.chat.turns[-1].content.startswith("Hello")


def test_regenerate_replaces_or_restores(tmp_path: Path) -> None:
    table = Table(tmp_path, ScriptedSession(faults=[None, None, ContextError("no")]), ChatOptions({"seed": 7}))
    with pytest.raises(UsageError, match="no reply"):
        table.chat.regenerate()
    finish(table.chat.answer("hi"))
    finish(table.chat.regenerate())
    with pytest.raises(ContextError):
        finish(table.chat.regenerate())
    assert [turn.role for turn in table.chat.turns] == ["user", "assistant"] and len(table.kept()) == 2
    seeds = [request.sampling.seed for request in table.session.requests]
    assert seeds[0] == 7 and len(set(seeds)) == 3


def test_taking_back_the_last_message_returns_it(table: Table) -> None:
    finish(table.chat.answer("one"))
    finish(table.chat.answer("two"))
    assert table.chat.take_back() == "two" and len(table.chat.turns) == 2 == len(table.kept())
    assert table.chat.take_back() == "one"
    with pytest.raises(UsageError, match="no message"):
        table.chat.take_back()


def test_the_request_of_now_has_the_system_message_the_turns_and_the_options(table: Table) -> None:
    table.chat.set_system("brief")
    table.chat.options.limits = Limits(9)
    finish(table.chat.answer("one"))
    assert [m.content for m in table.chat.request("two").messages] == ["brief", "one", "Hello, world!\n", "two"]
    again = table.chat.request()
    assert [m.content for m in again.messages] == ["brief", "one"] and again.limits.max_new_tokens == 9


def test_taking_up_and_starting_over(table: Table) -> None:
    finish(table.chat.answer("one"))
    table.chat.take_up(Chat("m", "be kind", (Turn("user", "old"),), False, 0, 0, 0))
    assert table.chat.options.system == "be kind" and [turn.content for turn in table.chat.turns] == ["old"]
    table.chat.start_over()
    assert table.chat.turns == [] and table.chat.last is None
    finish(table.chat.answer("new"))
    assert len(history.entries(table.folder)) == 2


def test_an_edited_message_is_answered_anew_or_all_is_as_before(tmp_path: Path) -> None:
    table = Table(tmp_path, ScriptedSession(faults=[None, None, ContextError("no")]))
    for text in ("one", "two"):
        finish(table.chat.answer(text))
    before = list(table.chat.turns)
    with pytest.raises(ContextError):
        finish(table.chat.edit(0, "uno"))
    assert table.chat.turns == before and [text for _, text in table.kept()] == [turn.content for turn in before]
    finish(table.chat.edit(0, "uno"))
    assert [turn.content for turn in table.chat.turns] == ["uno", "Hello, world!\n"]
    assert [text for _, text in table.kept()] == ["uno", "Hello, world!\n"]
    for nowhere in (1, 2, -1):
        with pytest.raises(UsageError, match="no message of yours"):
            table.chat.edit(nowhere, "x")


def test_a_reply_that_was_cut_off_goes_on_as_one_turn(tmp_path: Path) -> None:
    table = Table(tmp_path, ScriptedSession(end="length", faults=[None, ServerError("gone")]))
    with pytest.raises(UsageError, match="cut off"):
        table.chat.continue_reply()
    finish(table.chat.answer("hi"))
    with pytest.raises(ServerError):
        finish(table.chat.continue_reply())
    assert table.chat.turns[-1].content == "Hello, world!\n" * 2 and table.chat.turns[-1].ending == "stopped"
    table.session.end = "stop"
    answer = finish(table.chat.continue_reply())
    assert answer.request.continues and answer.request.messages[-1].content == "Hello, world!\n" * 2
    assert [text for _, text in table.kept()] == ["hi", "Hello, world!\n" * 3]
    with pytest.raises(UsageError, match="cut off"):
        table.chat.continue_reply()


def test_a_message_that_a_crash_left_without_a_reply_gets_one(table: Table) -> None:
    table.chat.take_up(Chat("m", "", (Turn("user", "old"),), False, 0, 0, 0))
    finish(table.chat.regenerate())
    assert [turn.content for turn in table.chat.turns] == ["old", "Hello, world!\n"]


def test_a_program_that_is_killed_leaves_what_had_come(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "KEEP_S", 0.0)
    finish(table.chat.answer("one"))
    answer = table.chat.answer("two")
    with answer:
        while answer.text != "Hello, world":
            next(answer)
        (name,) = [entry.name for entry in history.entries(table.folder)]
        path, chat = history.load(table.folder, name)  # as another program finds it
        copy = path.with_name("copy.jsonl")
        copy.write_bytes(path.read_bytes())
        list(answer)
    assert [turn.content for turn in chat.turns] == ["one", "Hello, world!\n", "two", "Hello, world"]
    assert chat.turns[-1].stopped and chat.unfinished
    recorder = Recorder(table.folder, pytest.fail)
    recorder.go_on(copy)
    recorder.record("drop", count=1)
    recorder.close()
    assert [turn.content for turn in history.load(table.folder, "copy")[1].turns] == ["one", "Hello, world!\n", "two"]
    copy.unlink()
    assert [text for _, text in table.kept()] == ["one", "Hello, world!\n", "two", "Hello, world!\n"]


def test_starting_over_is_undone_until_the_next_message(table: Table) -> None:
    with pytest.raises(UsageError, match="nothing to bring back"):
        table.chat.undo_start_over()
    finish(table.chat.answer("one"))
    table.chat.start_over()
    table.chat.start_over()  # a second press loses nothing
    table.chat.undo_start_over()
    with table.chat.answer("two") as coming:
        while not coming.text:
            next(coming)
        table.chat.start_over()
    table.chat.undo_start_over()
    wanted = ["one", "Hello, world!\n", "two", "Hello"]
    assert [turn.content for turn in table.chat.turns] == wanted == [text for _, text in table.kept()]
    assert table.chat.turns[-1].stopped and coming.turn is None
    table.chat.start_over()
    finish(table.chat.answer("three"))
    with pytest.raises(UsageError, match="nothing to bring back"):
        table.chat.undo_start_over()


def test_thinking_is_kept_apart(tmp_path: Path) -> None:
    steps = [Step((Piece("hm", "thinking"), Piece("yes")), (1,), 0, 0, 0, 0.0)]
    table = Table(tmp_path, ScriptedSession(steps=steps))
    answer = finish(table.chat.answer("hi"))
    assert (answer.text, answer.thinking) == ("yes", "hm") and table.chat.turns[-1].thinking == "hm"


def test_one_reply_at_a_time_and_a_new_conversation_ends_it(table: Table) -> None:
    answer = table.chat.answer("hi")
    for refused in (lambda: table.chat.answer("ho"), table.chat.regenerate, table.chat.take_back):
        with pytest.raises(BusyError, match="on its way"):
            refused()
    table.chat.start_over()
    assert finish(answer).cancelled and answer.turn is None and table.chat.turns == []
    finish(table.chat.answer("ho"))
    assert [turn.content for turn in table.chat.turns] == ["ho", "Hello, world!\n"]


def test_a_reply_that_is_cancelled_before_it_is_asked_for_comes_to_nothing(table: Table) -> None:
    answer = table.chat.answer("hi")
    answer.cancel()
    assert finish(answer).finished is not None and answer.turn is None and table.chat.turns == []


@pytest.mark.parametrize("name, value", [("thinking", "maybe"), ("top_k", "1.5"), ("temperature", "9")])
def test_a_bad_setting_changes_nothing(name: str, value: str) -> None:
    options = ChatOptions()
    with pytest.raises(UsageError):
        parse_setting(options, name, value)
    assert options == ChatOptions()
