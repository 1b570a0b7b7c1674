"""A conversation that outgrows the context: what is sent, what is said, what stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dflash_local.errors import ContextError, UsageError
from dflash_local.events import Finished, FinishReason, Notice, Piece, Step, Usage
from dflash_local.load_config import LoadConfig
from dflash_local.request import Limits, Request, SamplingParams
from dflash_local.service.chat_options import ChatOptions
from dflash_local.service.conversation import Conversation
from dflash_local.service.full_context import ASK
from dflash_local.service.service import Service
from dflash_local.settings import FullContext
from dflash_local.store import history
from dflash_local.store.history import Recorder
from tests.service.scripted import ScriptedFacts, ScriptedSession

CONTEXT = 100
REPLY = "five words are a reply"


def words(request: Request) -> int:
    """Count a word as a token."""
    return sum(len(message.content.split()) for message in request.messages)


@dataclass
class Counting(ScriptedSession):
    """Has a context of ``CONTEXT`` words; as the engine, it counts no prompt that is longer."""

    counts: Callable[[Request], int] = words

    def count(self, request: Request) -> int:
        if self.counts(request) > self.facts.context:
            raise ContextError("too long")
        return self.counts(request)

    def _finished(self, request: Request, tokens: int, reason: FinishReason) -> Finished:
        return replace(ScriptedSession._finished(self, request, tokens, reason), usage=Usage(words(request), tokens))


class Talk:
    """Sixty turns of ten words each with a context of a hundred."""

    def __init__(self, folder: Path, how: FullContext, session: ScriptedSession | None = None) -> None:
        facts = ScriptedFacts(load=LoadConfig(context=CONTEXT))
        steps = [Step((Piece(REPLY),), (1,), 0, 0, 0, 0.0)]
        self.session = session or Counting(facts=facts, steps=steps)
        self.session.facts, self.session.steps = facts, steps
        self.folder, self.notices = folder, list[str]()
        self.service = Service.over(self.session)
        options = ChatOptions(limits=Limits(50), full_context=how)
        self.chat = Conversation(self.service, options, Recorder(folder, pytest.fail))

    def say(self, text: str) -> None:
        with self.chat.answer(text) as answer:
            self.notices += [event.message for event in answer if isinstance(event, Notice)]

    def go_on(self, turns: int = 60) -> None:
        for number in range(turns):
            self.say(f"message {number} has five words")

    @property
    def sent(self) -> list[str]:
        return [message.content for message in self.session.requests[-1].messages]


def test_the_oldest_turns_go_and_are_said_and_kept(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "drop")
    talk.chat.set_system("be brief")
    talk.go_on()
    assert len(talk.chat.turns) == 120 and all(words(request) <= CONTEXT for request in talk.session.requests)
    first, then, *more = talk.notices
    assert first.startswith("the context is 87% full (87 of 100 tokens); when it is full, the oldest messages are not")
    assert then == "the context of 100 tokens is full: 10 earlier messages are not sent any more, the chat keeps them"
    assert all("is full:" in notice for notice in more) and 5 < len(more) < 15
    assert talk.sent[0] == "be brief" and talk.sent[1].startswith("message") and talk.sent[-1].startswith("message 59")
    talk.chat.recorder.close()
    (entry,) = history.entries(tmp_path)
    assert entry.turns == 120
    edited = talk.chat.edit(0, "anew")
    with edited:
        list(edited)
    assert talk.sent == ["be brief", "anew"], "an edit before what is sent begins with all"


def test_a_model_with_more_room_gets_all_again(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "drop")
    talk.go_on(12)
    assert len(talk.sent) < 23
    talk.session.facts = replace(talk.session.facts, load=LoadConfig(context=10_000))
    talk.say("and now")
    assert len(talk.sent) == 25


def test_the_model_summarises_and_the_file_keeps_the_summary(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "summarise")
    talk.go_on(20)
    summaries = [request for request in talk.session.requests if "Summarise" in request.messages[-1].content]
    assert summaries and all(request.sampling == SamplingParams() for request in summaries)
    assert all(words(request) <= CONTEXT for request in talk.session.requests)
    assert f"earlier messages are sent as a summary: {REPLY}" in talk.notices[1]
    assert talk.sent[0].startswith(f"[Summary of the conversation so far: {REPLY}]\n\nmessage ")
    assert summaries[1].messages[0].content.startswith("[Summary"), "a summary holds the one before"
    talk.chat.recorder.close()
    (name,) = [entry.name for entry in history.entries(tmp_path)]
    again = Talk(tmp_path, "summarise")
    again.chat.take_up(history.load(tmp_path, name)[1])
    again.say("and now")
    assert again.sent[0] == talk.sent[0] and len(again.chat.turns) == 42


@pytest.mark.parametrize(("reply", "turns"), [(60, 3), (95, 2)])
def test_of_more_than_fits_one_request_the_oldest_are_summarised(tmp_path: Path, reply: int, turns: int) -> None:
    talk = Talk(tmp_path, "summarise")
    talk.session.steps = [Step((Piece("word " * reply),), (1,), 0, 0, 0, 0.0)]
    talk.go_on(turns - 1)
    talk.session.steps = [Step((Piece(REPLY),), (1,), 0, 0, 0, 0.0)]  # a summary is as short as it is asked for
    talk.say("and one more of five words")
    (asked,) = [request for request in talk.session.requests if ASK in request.messages[-1].content]
    assert 80 < words(asked) <= CONTEXT - asked.limits.max_new_tokens == 88
    assert [message.role for message in asked.messages] == ["user", *["assistant", "user"] * (turns - 1)]
    held = 2 * (turns - 1)
    assert f"messages are sent as a summary of the oldest {held}, the last one shortened: " in talk.notices[-1]


def test_a_message_that_leaves_no_room_for_a_summary_is_sent_without(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "summarise")
    talk.go_on(3)
    long = " ".join(["word"] * 93)
    talk.say(long)
    assert talk.sent == [long] and "6 earlier messages are not sent any more" in talk.notices[-1]
    talk.say("and now")
    assert talk.sent[-1].endswith("and now") and words(talk.session.requests[-1]) <= CONTEXT


def test_a_summary_that_fails_is_said_and_one_that_is_stopped_changes_nothing(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "summarise")
    talk.go_on(9)
    before, answer = list(talk.chat.turns), talk.chat.answer("message 9 has five words")
    talk.session.on_step = lambda _index: answer.cancel()
    with answer:
        assert list(answer) == []
    assert talk.chat.turns == before and talk.chat.sent.unsent == 0
    talk.session.on_step = None
    talk.session.faults = [UsageError("at once: no")]
    talk.say("message 9 has five words")
    assert talk.notices[-1].endswith("the chat keeps them; they could not be summarised: at once: no")


def test_a_summary_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    twin, talk, asked = Talk(tmp_path / "twin", "summarise"), Talk(tmp_path, "summarise"), list[int]()
    while len(asked) < 2:
        number, before = len(twin.chat.turns) // 2, len(twin.session.requests)
        twin.say(f"message {number} has five words")
        asked += [number] if len(twin.session.requests) > before + 1 else []
    talk.go_on(asked[1])
    talk.session.faults = [UsageError("at once: no")]
    talk.say(f"message {asked[1]} has five words")
    assert "could not be summarised" in talk.notices[-1] and talk.chat.sent.unsent > 0
    assert talk.sent[0].startswith(f"[Summary of the conversation so far: {REPLY}]")


def test_stop_is_an_error_that_says_what_can_be_done(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "stop")
    talk.go_on(9)
    with pytest.raises(ContextError, match="the conversation has 97 with your message .*full-context drop"):
        talk.say("message " * 7)
    with pytest.raises(ContextError, match="more than that"):
        talk.say("message " * 70)
    assert len(talk.chat.turns) == 18
    talk.chat.options.full_context = "drop"
    talk.say("message " * 7)
    assert len(talk.chat.turns) == 20


def test_a_message_that_is_too_long_alone_is_refused_and_leaves_the_chat_as_it_was(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "drop")
    talk.go_on(3)
    with pytest.raises(ContextError, match="this message alone does not fit the context of 100 tokens"):
        talk.say("long " * 101)
    talk.say("message " * 98)
    assert talk.sent == ["message " * 98] and len(talk.chat.turns) == 8


def test_what_a_server_does_not_count_is_guessed_by_its_replies(tmp_path: Path) -> None:
    def uncounted(_request: Request) -> int:
        raise UsageError("a server applies the chat template")

    talk = Talk(tmp_path, "drop", Counting(counts=uncounted))
    talk.go_on()
    assert sum("is full:" in notice for notice in talk.notices) > 5
    assert all(words(request) <= CONTEXT for request in talk.session.requests)


def test_a_reply_that_goes_on_keeps_its_beginning(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "drop")
    talk.session.end = "length"
    talk.go_on(9)
    with talk.chat.continue_reply() as answer:
        list(answer)
    request = talk.session.requests[-1]
    assert request.continues and talk.sent[-1] == REPLY and answer.turn is not None
