"""One conversation behind two faces: what is kept, taken back, asked again and recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_local.catalog.bundled import Pair
from dflash_local.errors import BusyError, CheckpointError, ContextError, DFlashError, UsageError
from dflash_local.events import Finished, Piece, Step
from dflash_local.request import MAX_MESSAGE_CHARS, Limits
from dflash_local.service.chat_options import ChatOptions, merged, parse_setting
from dflash_local.service.conversation import Answer, Conversation
from dflash_local.service.service import Service
from dflash_local.store import history
from dflash_local.store.history import Recorder
from dflash_local.store.records import Chat, Turn
from tests.service.scripted import ScriptedFacts, ScriptedSession


class Table:
    """A conversation over scripted sessions, kept in a folder."""

    def __init__(
        self, folder: Path, session: ScriptedSession | None = None, options: ChatOptions | None = None
    ) -> None:
        self.folder, self.session = folder / "chats", session or ScriptedSession()
        self.loads: list[tuple[str, bool]] = []
        self.warnings: list[str] = []
        recorder = Recorder(self.folder, self.warnings.append)
        self.talk = Conversation(self.pair("one"), self.load, options or ChatOptions(), recorder)

    @staticmethod
    def pair(name: str, drafter: bool = True) -> Pair:
        return Pair(name, Path("nowhere"), Path("nowhere") if drafter else None, bundled=False)

    def load(self, pair: Pair, draft: bool) -> Service:
        self.loads.append((pair.name, draft))
        if pair.name == "bad":
            raise CheckpointError("no such file")
        return Service(ScriptedSession(ScriptedFacts(has_tokenizer=False)) if pair.name == "mute" else self.session)

    def kept(self) -> list[tuple[str, str]]:
        (name,) = history.names(self.folder)
        return [(turn.role, turn.content) for turn in history.load(self.folder, name)[1].turns]


@pytest.fixture
def table(tmp_path: Path) -> Table:
    made = Table(tmp_path)
    made.talk.open()
    return made


def finish(answer: Answer) -> Answer:
    with answer:
        for _event in answer:
            pass
    return answer


def test_an_answer_is_a_turn_when_its_with_is_left(table: Table) -> None:
    with table.talk.answer("hi") as answer:
        events = list(answer)
        assert isinstance(events[-1], Finished) and [turn.role for turn in table.talk.turns] == ["user"]
    assert answer.text == "Hello, world!\n" and table.talk.last is answer.finished
    assert table.kept() == [("user", "hi"), ("assistant", "Hello, world!\n")]
    assert table.talk.turns[1].figures["mean_acceptance_length"] == 2.5


def test_an_abandoned_answer_is_cancelled_and_taken_back(table: Table) -> None:
    with table.talk.answer("hi") as answer:
        next(answer)
    assert answer.cancelled and table.talk.turns == [] and table.kept() == []
    assert finish(table.talk.answer("ho")).text, "the next one is answered"


def test_a_failed_answer_is_taken_back_with_its_error(tmp_path: Path) -> None:
    table = Table(tmp_path, ScriptedSession(faults=[ContextError("too long")]))
    table.talk.open()
    with pytest.raises(ContextError):
        finish(table.talk.answer("hi"))
    assert table.talk.turns == [] and table.kept() == []


def test_what_cannot_be_sent_leaves_nothing(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError):
        table.talk.answer("x" * (MAX_MESSAGE_CHARS + 1))
    finish(table.talk.answer("hi"))

    def full(_request: object) -> None:
        raise BusyError("full")

    monkeypatch.setattr(table.talk.service, "submit", full)
    for ask in (lambda: table.talk.answer("ho"), table.talk.regenerate):
        with pytest.raises(BusyError):
            ask()
    assert [turn.role for turn in table.talk.turns] == ["user", "assistant"]


def test_a_stopped_answer_keeps_what_came(tmp_path: Path) -> None:
    table = Table(tmp_path)
    table.session.on_step = lambda index: answer.cancel() if index == 1 else None
    table.talk.open()
    answer = table.talk.answer("hi")
    finish(answer)
    assert answer.stopped and table.talk.turns[-1].stopped and table.talk.turns[-1].content.startswith("Hello")


def test_regenerate_replaces_or_restores(tmp_path: Path) -> None:
    table = Table(tmp_path, ScriptedSession(faults=[None, None, ContextError("no")]), ChatOptions({"seed": 7}))
    table.talk.open()
    with pytest.raises(UsageError, match="no reply"):
        table.talk.regenerate()
    finish(table.talk.answer("hi"))
    finish(table.talk.regenerate())
    with pytest.raises(ContextError):
        finish(table.talk.regenerate())
    assert [turn.role for turn in table.talk.turns] == ["user", "assistant"] and len(table.kept()) == 2
    seeds = [request.sampling.seed for request in table.session.requests]
    assert seeds[0] == 7 and len(set(seeds)) == 3


def test_taking_back_the_last_message_returns_it(table: Table) -> None:
    finish(table.talk.answer("one"))
    finish(table.talk.answer("two"))
    assert table.talk.take_back() == "two" and len(table.talk.turns) == 2 == len(table.kept())
    assert table.talk.take_back() == "one"
    with pytest.raises(UsageError, match="no message"):
        table.talk.take_back()


def test_the_request_of_now_has_the_system_message_the_turns_and_the_options(table: Table) -> None:
    table.talk.set_system("brief")
    table.talk.options.limits = Limits(9)
    finish(table.talk.answer("one"))
    assert [m.content for m in table.talk.request("two").messages] == ["brief", "one", "Hello, world!\n", "two"]
    again = table.talk.request()
    assert [m.content for m in again.messages] == ["brief", "one"] and again.limits.max_new_tokens == 9


def test_a_model_that_cannot_be_had_leaves_the_old_one(table: Table) -> None:
    for name in ("bad", "mute"):
        with pytest.raises(DFlashError):
            table.talk.change_model(table.pair(name))
        assert table.talk.pair.name == "one" and finish(table.talk.answer("hi")).text
    table.talk.options.mode = "ar"
    table.talk.change_model(table.pair("alone", drafter=False))
    assert table.loads[-1] == ("alone", False) and table.talk.pair.name == "alone"


def test_the_models_own_sampling_holds_where_nothing_was_set(tmp_path: Path) -> None:
    table = Table(tmp_path, options=ChatOptions({"top_k": 3}))
    config = {"do_sample": True, "temperature": 0.6, "top_k": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    table.talk.change_model(Pair("own", tmp_path, tmp_path, bundled=False))
    assert (table.talk.sampling.temperature, table.talk.sampling.top_k) == (0.6, 3)
    with pytest.raises(UsageError):
        merged(table.talk.sampling, {"top_p": 2.0})


def test_taking_up_and_starting_over(table: Table) -> None:
    finish(table.talk.answer("one"))
    table.talk.take_up(Chat("m", "be kind", (Turn("user", "old"),), False, 0, 0, 0))
    assert table.talk.options.system == "be kind" and [turn.content for turn in table.talk.turns] == ["old"]
    table.talk.start_over()
    assert table.talk.turns == [] and table.talk.last is None
    finish(table.talk.answer("new"))
    assert len(history.names(table.folder)) == 2


def test_thinking_is_kept_apart(tmp_path: Path) -> None:
    steps = [Step((Piece("hm", "thinking"), Piece("yes")), (1,), 0, 0, 0, 0.0)]
    table = Table(tmp_path, ScriptedSession(steps=steps))
    table.talk.open()
    answer = finish(table.talk.answer("hi"))
    assert (answer.text, answer.thinking) == ("yes", "hm") and table.talk.turns[-1].thinking == "hm"


def test_without_a_model_there_is_a_hint(tmp_path: Path) -> None:
    table = Table(tmp_path)
    assert table.talk.facts is None and not table.talk.broken
    with pytest.raises(UsageError, match="no model"):
        table.talk.answer("hi")
    assert table.talk.turns == []


@pytest.mark.parametrize("name, value", [("thinking", "maybe"), ("top_k", "1.5"), ("temperature", "9")])
def test_a_bad_setting_changes_nothing(name: str, value: str) -> None:
    options = ChatOptions()
    with pytest.raises(UsageError):
        parse_setting(options, name, value)
    assert options == ChatOptions()
