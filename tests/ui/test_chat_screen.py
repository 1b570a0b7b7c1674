"""The chat screen, key by key, over a scripted session."""

from __future__ import annotations

import threading

import pytest
from textual.widgets import Collapsible, Static

from dflash_local.errors import CheckpointError, ContextError, DeviceLostError, EngineError, ServerError
from dflash_local.events import Notice, Piece, Step
from dflash_local.remote.endpoint import endpoint
from dflash_local.remote.openai_server import attach
from dflash_local.remote.server_checks import WantedModel
from dflash_local.service.chat_options import ChatOptions
from tests.remote.openai_fake import Fake, running
from tests.service.scripted import ScriptedModels, ScriptedSession
from tests.ui.stage import Stage, play, staged


def waiting() -> ScriptedSession:
    """A session that says nothing until its gate is opened."""
    return ScriptedSession(gate=threading.Event())


def test_a_message_is_sent_and_the_reply_and_its_figures_are_shown() -> None:
    async def act(stage: Stage) -> None:
        await stage.press(*"hi there", "shift+enter", "b", "ctrl+j", "c", "enter")
        await stage.idle()
        text = stage.screen_text
        assert "Hello, world!" in text and "hi there" in text and "welcome" in text
        assert "6 tokens · 120 tok/s · 2.0x · 2.5 a step · first token 10 ms" in text
        assert stage.composer.text == ""

    stage = play(act)
    said = [(turn.role, turn.content) for turn in stage.turns]
    assert said == [("user", "hi there\nb\nc"), ("assistant", "Hello, world!\n")]
    assert stage.session.closed and stage.session.threads and threading.get_ident() not in stage.session.threads


@staged()
async def test_the_arrows_bring_back_what_was_sent_and_the_draft_and_edit_the_last_message(stage: Stage) -> None:
    await stage.send("first")
    await stage.send("second")
    await stage.send("second")
    await stage.press(*"draft", "up")
    assert stage.composer.text == "second"
    await stage.press("up", "up")
    assert stage.composer.text == "first"
    await stage.press("down", "down")
    assert stage.composer.text == "draft"
    await stage.press("ctrl+u", "f8")
    assert stage.composer.text == "second" and len(stage.chat.transcript.replies) == 2
    assert stage.roles == ["user", "assistant"] * 2


@staged(waiting)
async def test_escape_stops_the_reply_and_keeps_what_came(stage: Stage) -> None:
    gate = stage.session.gate
    assert gate is not None
    stage.session.on_step = lambda index: gate.set() if index == 0 else gate.clear()
    await stage.press("x", "enter")
    await stage.until(lambda: any("Hello" in view.text for view in stage.chat.transcript.replies))
    await stage.press("escape")
    await stage.idle()
    assert "■ stopped" in stage.screen_text and stage.app.is_running
    assert stage.turns[-1].stopped and stage.turns[-1].content == "Hello"


@staged(waiting)
async def test_escape_before_the_request_was_taken_stops_it(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    service = stage.chat_session.service
    submit = service.submit
    monkeypatch.setattr(service, "submit", lambda request: submit(request) if go.wait(20) else None)
    await stage.press("x", "enter")
    await stage.until(lambda: stage.chat.busy)
    await stage.press("escape")
    go.set()
    await stage.idle()
    assert stage.composer.text == "x" and not stage.chat.transcript.replies and stage.roles == []


@pytest.mark.parametrize("where", ["chat", "help"])
def test_ctrl_c_once_stops_and_twice_leaves(where: str) -> None:
    async def act(stage: Stage) -> None:
        await stage.press("x", "enter")
        await stage.until(lambda: len(stage.session.requests) == 1)
        if where == "help":
            await stage.press("f1")
        await stage.press("ctrl+c")
        await stage.idle()
        assert stage.app.is_running and stage.composer.text == "x", "nothing came: the message is back"
        await stage.press("ctrl+c")
        assert not stage.app.is_running

    stage = play(act, waiting())
    assert stage.roles == [] and stage.app.return_code == 0


@staged()
async def test_ctrl_z_sleeps_ctrl_underscore_undoes_and_ctrl_c_without_a_reply_says_how_to_leave(stage: Stage) -> None:
    await stage.press("a")  # one: what is typed within two seconds is undone together
    await stage.press("ctrl+z")  # no terminal here to go back to
    assert stage.composer.text == "a"
    await stage.press("ctrl+underscore")
    assert stage.composer.text == ""
    await stage.press("ctrl+c")
    assert stage.app.is_running and "again" in stage.notified


def test_leaving_in_the_middle_of_a_reply_stops_it_and_keeps_nothing_half_written() -> None:
    async def act(stage: Stage) -> None:
        await stage.press("x", "enter")
        await stage.until(lambda: len(stage.session.requests) == 1)
        await stage.press("ctrl+q")

    stage = play(act, waiting())
    assert stage.session.closed and stage.chat.job is not None and stage.chat.job.join(0) and stage.roles == []


@staged(
    lambda: ScriptedSession(faults=[None, None, ContextError("too long")]),
    options=ChatOptions({"temperature": 1.0, "seed": 7}),
)
async def test_regenerate_asks_with_a_fresh_seed_and_replaces_the_reply_unless_it_fails(stage: Stage) -> None:
    await stage.send("hi")
    await stage.press("ctrl+r")
    await stage.idle()
    assert len(stage.chat.transcript.replies) == 1
    seeds = [request.sampling.seed for request in stage.session.requests]
    assert seeds[0] == 7 and seeds[1] != 7 and stage.roles == ["user", "assistant"]
    await stage.press("ctrl+r")
    await stage.idle()
    assert "too long" in stage.screen_text and "Hello, world!" in stage.screen_text
    assert stage.roles == ["user", "assistant"]


FAULTS = (ContextError("at once too long", "shorten it"), *(None, ServerError("it is gone", "ask again")))


@staged(lambda: ScriptedSession(faults=[*FAULTS, None, DeviceLostError("it is gone", "ask again")]))
async def test_a_failed_message_comes_back_unless_a_part_of_the_reply_came_which_stays(stage: Stage) -> None:
    await stage.send("long")
    assert "error: at once too long" in stage.screen_text and "shorten it" in stage.screen_text
    assert stage.composer.text == "long"
    await stage.send("short")
    turns = [("short", False), ("Hello, world!\n", False)]
    for times, message in enumerate(("over a server", "here"), 1):
        await stage.send(message)
        assert stage.screen_text.count("error: it is gone") == times and "Hello, world!" in stage.screen_text
        assert stage.composer.text == "" and stage.screen_text.count("■ stopped") == times
        await stage.send("again")
        turns += [(message, False), ("Hello, world!\n", True), ("again", False), ("Hello, world!\n", False)]
        assert [(turn.content, turn.stopped) for turn in stage.turns] == turns


def test_a_reply_of_a_server_is_shown_with_what_is_known_of_it() -> None:
    """No origins, no cycles, and a speed and an acceptance length all the same."""

    async def act(stage: Stage) -> None:
        await stage.send("hi")
        text = stage.screen_text
        assert "Hello, world!" in text and "vLLM 0.32.0 at http" in text
        assert "8 tokens" in text and "acceptance 2.33" in text
        fake.speculative = False
        await stage.send("again")
        assert "the acceptance length of this" in stage.screen_text
        await stage.press("f5")
        await stage.idle()
        assert "no request can switch that off" in stage.screen_text
        assert stage.roles == ["user", "assistant", "user", "assistant"]

    with running(Fake()) as fake:
        session = attach(endpoint(fake.url), WantedModel())
        play(act, start=lambda *_: session)


THINKING = (
    Step((Piece("let me see", "thinking"),), (1, 2), 0, 0, 0, 0.5),
    Step((Piece(", well", "thinking", "accepted"),), (3, 4, 5), 3, 2, 4, 2.0),
    Step((Piece("yes"),), (6,), 3, 0, 4, 2.1),
)


class Alarmed(ScriptedSession):
    def generate(self, request, *rest):  # type: ignore[no-untyped-def]
        for event in ScriptedSession.generate(self, request, *rest):
            yield event
            if event is self.steps[0]:
                yield Notice("acceptance is below its band", "warning")


@staged(lambda: Alarmed(steps=THINKING, end="length"))
async def test_thinking_is_folded_an_alarm_stays_and_a_cut_off_says_so_also_when_it_is_shown_again(
    stage: Stage,
) -> None:
    await stage.send("hi")
    fold = stage.chat.query_one(Collapsible)
    assert fold.title == "Thinking (5 tokens, 1.5 s)" and fold.collapsed
    assert "yes" in stage.screen_text and "let me see" not in stage.screen_text
    fold.collapsed = False
    await stage.pilot.pause()
    assert "let me see, well" in stage.screen_text and stage.turns[-1].thinking == "let me see, well"
    assert "acceptance is below its" in str(stage.chat.query_one("#alarms", Static).render())
    assert "■ cut off at its limit of 6 tokens" in stage.screen_text
    await stage.chat.transcript.rebuild(stage.turns)
    await stage.pilot.pause()
    assert "■ cut off at its limit of 6 tokens" in stage.screen_text


@staged()
async def test_origins_have_a_mark_and_the_meter_shows_all_figures_and_the_speed_up(stage: Stage) -> None:
    await stage.send("hi")
    for figure in ("120 mean", "2.50 mean of 4", " 1 ██", "100%", " 50%", " draft ██", "float32: exact"):
        assert figure in stage.screen_text, figure
    assert "11 of 512 tokens" in stage.screen_text and "plain: 60.0 tok/s, 2.00x" in stage.screen_text
    await stage.press("f3")
    assert "‹Hello›, wor‹ld›!" in stage.screen_text and "underlined ‹in marks›: chosen by" in stage.screen_text
    await stage.press("f3")
    assert "Hello, world!" in stage.screen_text and "‹" not in stage.screen_text
    await stage.press("f2")
    assert " draft ██" not in stage.screen_text
    await stage.press("f2")
    stage.chat_session.conversation.options.mode = "ar"
    await stage.send("hi")
    assert "no drafts in this mode" in stage.screen_text
    assert "60 tok/s · plain · first token 10 ms" in stage.screen_text and "seed 99" in stage.screen_text


def test_a_pair_that_cannot_be_loaded_ends_the_application_with_its_error() -> None:
    def start(*_: object):  # type: ignore[no-untyped-def]
        raise CheckpointError("no such file")

    async def act(stage: Stage) -> None:
        await stage.pilot.pause()

    assert isinstance(play(act, start=start).app.return_value, CheckpointError)


@staged(lambda: ScriptedSession(faults=[EngineError("dead context")]))
async def test_a_broken_session_is_told_and_a_model_command_mends_it(stage: Stage) -> None:
    fresh, chat = ScriptedSession(), stage.chat_session
    await stage.send("hi")
    assert "the session broke" in stage.screen_text and stage.app.is_running
    chat.models = ScriptedModels(lambda *_: fresh)
    chat.acts["/model scripted"] = lambda: chat.change_model(chat.pair)
    await stage.send("/model scripted")
    await stage.send("again")
    assert "Hello, world!" in stage.screen_text
    assert fresh.requests and not chat.broken


@staged()
async def test_a_chat_over_a_server_plans_and_downloads_nothing(stage: Stage) -> None:
    stage.chat_session.models = ScriptedModels(lambda *_: ScriptedSession(), "the server at x")
    await stage.send("/model another/one")
    for command in ("/models", "/pull another/one"):
        await stage.send(command)
    assert stage.screen_text.count("replies come from a server") == 2
    assert stage.chat_session.executed == ["/model another/one"]
    assert stage.chat_session.plans == [] and stage.chat_session.pulls == []
