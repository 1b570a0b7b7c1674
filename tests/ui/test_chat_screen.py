"""The chat screen, key by key, over a scripted session."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Collapsible, Static

from dflash_local.errors import CheckpointError, ContextError, DeviceLostError, DFlashError, EngineError, ServerError
from dflash_local.events import Notice, Piece, Step
from dflash_local.remote.endpoint import endpoint
from dflash_local.remote.openai_server import attach
from dflash_local.remote.server_checks import WantedModel
from dflash_local.service.chat_options import ChatOptions
from tests.remote.openai_fake import Fake, running
from tests.service.scripted import ScriptedModels, ScriptedSession
from tests.ui.stage import Stage, play


def roles(stage: Stage) -> list[str]:
    return [turn.role for turn in stage.chat_session.conversation.turns]


def test_a_message_is_sent_and_the_reply_and_its_figures_are_shown() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await pilot.press(*"hi there", "enter")
        await pilot.pause()
        await stage.idle(pilot)
        text = stage.screen_text
        assert "Hello, world!" in text and "hi there" in text and "welcome" in text
        assert "6 tokens · 120.0 tok/s · acceptance 2.50 · seed 99" in text
        assert stage.chat.composer.text == ""

    stage = play(act)
    assert [(turn.role, turn.content) for turn in stage.chat_session.conversation.turns] == [
        ("user", "hi there"),
        ("assistant", "Hello, world!\n"),
    ]
    assert stage.session.closed and stage.session.threads and threading.get_ident() not in stage.session.threads


def test_shift_enter_and_ctrl_j_begin_a_line() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await pilot.press("a", "shift+enter", "b", "ctrl+j", "c", "enter")
        await pilot.pause()
        await stage.idle(pilot)

    assert play(act).session.requests[0].messages[-1].content == "a\nb\nc"


def test_the_arrows_bring_back_what_was_sent_and_the_draft() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await stage.send("first", pilot)
        await stage.send("second", pilot)
        await pilot.press(*"draft", "up")
        assert stage.chat.composer.text == "second"
        await pilot.press("up", "up")
        assert stage.chat.composer.text == "first"
        await pilot.press("down", "down")
        assert stage.chat.composer.text == "draft"

    play(act)


def test_escape_stops_the_reply_and_keeps_what_came() -> None:
    gate = threading.Event()
    session = ScriptedSession(gate=gate, on_step=lambda index: gate.set() if index == 0 else gate.clear())

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await pilot.press("x", "enter")
        await stage.until(lambda: any("Hello" in view.text for view in stage.chat.transcript.replies), pilot)
        await pilot.press("escape")
        await stage.idle(pilot)
        assert "■ stopped" in stage.screen_text and stage.app.is_running

    stage = play(act, session)
    assert (
        stage.chat_session.conversation.turns[-1].stopped
        and stage.chat_session.conversation.turns[-1].content == "Hello"
    )


def test_escape_before_the_request_was_taken_stops_it_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        submit = stage.chat_session.service.submit
        monkeypatch.setattr(
            stage.chat_session.service, "submit", lambda request: submit(request) if go.wait(20) else None
        )
        await pilot.press("x", "enter")
        await stage.until(lambda: stage.chat.busy, pilot)
        await pilot.press("escape")
        go.set()
        await stage.idle(pilot)
        assert stage.chat.composer.text == "x" and not stage.chat.transcript.replies

    assert roles(play(act, ScriptedSession(gate=threading.Event()))) == []


def test_a_reply_cut_off_at_its_limit_says_so_also_when_it_is_shown_again() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await stage.send("hi", pilot)
        assert "■ cut off at its limit of 6 tokens" in stage.screen_text
        await stage.chat.transcript.rebuild(stage.chat_session.conversation.turns, False)
        await pilot.pause()
        assert "■ cut off at its limit of 6 tokens" in stage.screen_text

    play(act, ScriptedSession(end="length"))


@pytest.mark.parametrize("where", ["chat", "help"])
def test_ctrl_c_once_stops_and_twice_leaves(where: str) -> None:
    session = ScriptedSession(gate=threading.Event())

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await pilot.press("x", "enter")
        await stage.until(lambda: len(session.requests) == 1, pilot)
        if where == "help":
            await pilot.press("f1")
        await pilot.press("ctrl+c")
        await stage.idle(pilot)
        assert stage.app.is_running and stage.chat.composer.text == "x", "nothing came: the message is back"
        await pilot.press("ctrl+c")
        await pilot.pause()
        assert not stage.app.is_running

    stage = play(act, session)
    assert roles(stage) == [] and stage.app.return_code == 0


def test_ctrl_c_without_a_reply_says_how_to_leave() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await pilot.press("ctrl+c")
        await pilot.pause()
        assert stage.app.is_running and any("again" in note.message for note in stage.app._notifications)

    play(act)


def test_leaving_in_the_middle_of_a_reply_stops_it_and_keeps_nothing_half_written() -> None:
    session = ScriptedSession(gate=threading.Event())

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await pilot.press("x", "enter")
        await stage.until(lambda: len(session.requests) == 1, pilot)
        await pilot.press("ctrl+q")

    stage = play(act, session)
    assert stage.session.closed and stage.chat.job.join(0) and roles(stage) == []


def test_regenerate_asks_with_a_fresh_seed_and_replaces_the_reply() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await stage.send("hi", pilot)
        await pilot.press("ctrl+r")
        await pilot.pause()
        await stage.idle(pilot)
        assert len(stage.chat.transcript.replies) == 1

    stage = play(act, options=ChatOptions({"temperature": 1.0, "seed": 7}))
    seeds = [request.sampling.seed for request in stage.session.requests]
    assert seeds[0] == 7 and seeds[1] != 7 and roles(stage) == ["user", "assistant"]


def test_a_regenerate_that_fails_shows_the_old_reply_again() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await stage.send("hi", pilot)
        await pilot.press("ctrl+r")
        await pilot.pause()
        await stage.idle(pilot)
        assert "too long" in stage.screen_text and "Hello, world!" in stage.screen_text

    stage = play(act, ScriptedSession(faults=[None, ContextError("too long")]))
    assert roles(stage) == ["user", "assistant"]


def test_a_failed_message_comes_back_into_the_field() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await stage.send("long", pilot)
        assert "error: at once too long" in stage.screen_text and "shorten it" in stage.screen_text
        assert stage.chat.composer.text == "long"
        await stage.send("short", pilot)

    stage = play(act, ScriptedSession(faults=[ContextError("at once too long", "shorten it")]))
    assert [turn.content for turn in stage.chat_session.conversation.turns] == ["short", "Hello, world!\n"]


@pytest.mark.parametrize("error", [ServerError, DeviceLostError])
def test_what_came_before_a_server_or_the_engine_went_away_stays(error: type[DFlashError]) -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await stage.send("hi", pilot)
        assert "error: it is gone" in stage.screen_text and "Hello, world!" in stage.screen_text
        assert stage.chat.composer.text == "" and "stopped" in stage.screen_text
        await stage.send("again", pilot)

    stage = play(act, ScriptedSession(faults=[error("it is gone", "ask again")]))
    turns = [(turn.content, turn.stopped) for turn in stage.chat_session.conversation.turns]
    assert turns == [("hi", False), ("Hello, world!\n", True), ("again", False), ("Hello, world!\n", False)]


def test_a_reply_of_a_server_is_shown_with_what_is_known_of_it() -> None:
    """No origins, no cycles, and a speed and an acceptance length all the same."""

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await stage.send("hi", pilot)
        text = stage.screen_text
        assert "Hello, world!" in text and "vLLM 0.32.0 at http" in text
        assert "8 tokens" in text and "acceptance 2.33" in text
        fake.speculative = False
        await stage.send("again", pilot)
        assert "the acceptance length of this" in stage.screen_text
        await pilot.press("f5")
        await pilot.pause()
        await stage.idle(pilot)
        assert "no request can switch that off" in stage.screen_text

    with running(Fake()) as fake:
        session = attach(endpoint(fake.url), WantedModel())
        stage = play(act, start=lambda *_: session)
    assert roles(stage) == ["user", "assistant", "user", "assistant"]


def test_thinking_is_folded_with_its_count_and_time() -> None:
    steps = [
        Step((Piece("let me see", "thinking"),), (1, 2), 0, 0, 0, 0.5),
        Step((Piece(", well", "thinking", "accepted"),), (3, 4, 5), 3, 2, 4, 2.0),
        Step((Piece("yes"),), (6,), 3, 0, 4, 2.1),
    ]

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await stage.send("hi", pilot)
        fold = stage.chat.query_one(Collapsible)
        assert fold.title == "Thinking (5 tokens, 1.5 s)" and fold.collapsed
        assert "yes" in stage.screen_text and "let me see" not in stage.screen_text
        fold.collapsed = False
        await pilot.pause()
        assert "let me see, well" in stage.screen_text

    stage = play(act, ScriptedSession(steps=steps))
    assert stage.chat_session.conversation.turns[-1].thinking == "let me see, well"


def test_origins_have_a_mark_that_is_no_colour() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await stage.send("hi", pilot)
        await pilot.press("f3")
        await pilot.pause()
        assert "‹Hello›, wor‹ld›!" in stage.screen_text and "underlined: drafted and accepted" in stage.screen_text
        await pilot.press("f3")
        await pilot.pause()
        assert "Hello, world!" in stage.screen_text and "‹" not in stage.screen_text

    play(act)


def test_the_meter_shows_speed_acceptance_positions_split_context_and_promise() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await stage.send("hi", pilot)
        text = stage.screen_text
        for figure in ("120.0 mean", "2.50 mean of 4", " 1 ██", "100%", " 50%", " draft ██", "float32: exact"):
            assert figure in text, figure
        assert "11 of 512 tokens" in text and "AR here: unknown" in text
        await pilot.press("f2")
        await pilot.pause()
        assert " draft ██" not in stage.screen_text

    play(act)


def test_the_speed_up_is_against_this_machines_own_ar_reply() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        stage.chat_session.conversation.options.mode = "ar"
        await stage.send("hi", pilot)
        assert "no drafts in this mode" in stage.screen_text
        stage.chat_session.conversation.options.mode = "dflash"
        await stage.send("hi", pilot)
        assert "AR here: 60.0 tok/s, 2.00x" in stage.screen_text

    play(act)


def test_a_narrow_screen_has_the_figures_in_a_line() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await stage.send("hi", pilot)
        text = stage.screen_text
        assert "120.0 tok/s · acceptance 2.50 · ctx 11/512 · float32: exact" in text and "Accepted per" not in text

    play(act, size=(80, 24))


def test_an_alarm_stays_on_the_meter() -> None:
    class Alarmed(ScriptedSession):
        def generate(self, request, *rest):  # type: ignore[no-untyped-def]
            for event in ScriptedSession.generate(self, request, *rest):
                yield event
                if event is self.steps[0]:
                    yield Notice("acceptance is below its band", "warning")

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await stage.send("hi", pilot)
        assert "acceptance is below its" in str(stage.chat.query_one("#alarms", Static).render())

    play(act, Alarmed())


def test_a_pair_that_cannot_be_loaded_ends_the_application_with_its_error() -> None:
    def start(*_: object):  # type: ignore[no-untyped-def]
        raise CheckpointError("no such file")

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await pilot.pause()

    stage = play(act, start=start)
    assert isinstance(stage.app.return_value, CheckpointError)


def test_a_broken_session_is_told_and_a_model_command_mends_it() -> None:
    fresh = ScriptedSession()

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        await stage.send("hi", pilot)
        assert "the session broke" in stage.screen_text and stage.app.is_running

        def reload() -> None:
            stage.chat_session.models = ScriptedModels(lambda *_: fresh)
            stage.chat_session.change_model(stage.chat_session.pair)

        stage.chat_session.acts["/model scripted"] = reload
        await stage.send("/model scripted", pilot)
        await stage.send("again", pilot)
        assert "Hello, world!" in stage.screen_text

    stage = play(act, ScriptedSession(faults=[EngineError("dead context")]))
    assert fresh.requests and not stage.chat_session.broken


def test_a_chat_over_a_server_plans_and_downloads_nothing() -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        stage.chat_session.models = ScriptedModels(lambda *_: ScriptedSession(), "the server at x")
        await stage.send("/model another/one", pilot)
        for command in ("/models", "/pull another/one"):
            await stage.send(command, pilot)
        assert stage.screen_text.count("replies come from a server") == 2

    stage = play(act)
    assert stage.chat_session.executed == ["/model another/one"]
    assert stage.chat_session.plans == [] and stage.chat_session.pulls == []
