"""The race on a screen: run one after the other, replayed side by side, its verdict, its ends."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from textual.pilot import Pilot

from dflash_local.errors import ContextError, DFlashError
from dflash_local.events import Piece, Step
from dflash_local.request import user_request
from dflash_local.service.race import Racer
from dflash_local.service.service import Service
from dflash_local.ui.tui.app import RaceApp
from dflash_local.ui.tui.race import RaceScreen
from tests.service.scripted import PartingSession, ScriptedSession
from tests.ui.stage import Stage, drive, screen_text, staged, until


def race(
    act: Callable[[RaceApp, Pilot[DFlashError]], Awaitable[None]],
    session: ScriptedSession,
    size: tuple[int, int] = (100, 30),
) -> RaceApp:
    """Show a race over a scripted session and drive it."""
    with Service.over(session) as service:
        screen = RaceScreen("scripted", "say [bold]hello[/bold]", lambda _hear: Racer(service, user_request("hi")))
        app = RaceApp(screen)
        drive(app, partial(act, app), size)
        screen.run_of.join(60)
    return app


async def shows(app: RaceApp, pilot: Pilot[DFlashError], *parts: str) -> None:
    await until(lambda: all(part in screen_text(app) for part in parts), pilot)


def test_both_lanes_end_with_times_speed_up_and_verdict() -> None:
    async def act(app: RaceApp, pilot: Pilot[DFlashError]) -> None:
        await until(lambda: app.race_screen.run_of.shown, pilot)
        await shows(app, pilot, "■ 0.11 s · 6 tokens · 60.0 tok/s", "■ 0.06 s · 6 tokens · 120.0 tok/s")
        await shows(app, pilot, "identical: yes", "this run: 1.83x wall clock, 2.00x decode speed · ")
        await until(lambda: screen_text(app).count("Hello, world!") == 2, pilot)
        assert "say [bold]hello[/bold]" in screen_text(app)
        await pilot.press("escape")
        await pilot.pause()

    app = race(act, ScriptedSession())
    assert app.race_screen.race is not None and app.return_code == 0


def test_a_difference_is_shown_with_its_margin() -> None:
    async def act(app: RaceApp, pilot: Pilot[DFlashError]) -> None:
        await until(lambda: app.race_screen.run_of.shown, pilot)
        await until(lambda: "first difference at token 1, margin 1.2: more than" in screen_text(app), pilot)

    assert race(act, PartingSession(rival=-1.7)).race_screen.race.margin == pytest.approx(1.2)


def test_the_replay_keeps_the_true_distance_and_can_be_skipped_and_repeated() -> None:
    steps = [Step((Piece("first "),), (1,), 0, 0, 0, 0.0), Step((Piece("last"),), (2,), 3, 0, 4, 3600.0)]

    async def act(app: RaceApp, pilot: Pilot[DFlashError]) -> None:
        await shows(app, pilot, "replay at true speed", "first")  # the race itself had shown all of it
        assert "last" not in screen_text(app) and not app.race_screen.run_of.shown
        for _ in range(2):
            await pilot.press("space")
            await until(lambda: app.race_screen.run_of.shown, pilot)
            await until(lambda: screen_text(app).count("first last") == 2, pilot)
            await pilot.press("r")
            await until(lambda: not app.race_screen.run_of.shown, pilot)

    race(act, ScriptedSession(steps=steps))


def test_leaving_in_the_middle_stops_what_runs() -> None:
    session = ScriptedSession(gate=threading.Event())

    async def act(app: RaceApp, pilot: Pilot[DFlashError]) -> None:
        await until(lambda: len(session.requests) == 1, pilot)
        await pilot.press("ctrl+c")
        await pilot.pause()

    app = race(act, session)
    assert app.race_screen.race is None and len(session.requests) == 1 and session.closed


def test_a_failed_reply_is_told_on_the_screen() -> None:
    async def act(app: RaceApp, pilot: Pilot[DFlashError]) -> None:
        await until(lambda: "error: too long" in screen_text(app), pilot)

    app = race(act, ScriptedSession(faults=[None, None, ContextError("too long", "shorten it")]), size=(80, 24))
    assert isinstance(app.race_screen.error, ContextError)


def test_model_text_in_a_lane_is_made_safe() -> None:
    async def act(app: RaceApp, pilot: Pilot[DFlashError]) -> None:
        await until(lambda: app.race_screen.run_of.shown, pilot)
        await until(lambda: screen_text(app).count("a␛]0;x␇b") == 2, pilot)
        assert "\x1b" not in screen_text(app)

    race(act, ScriptedSession(steps=[Step((Piece("a\x1b]0;x"), Piece("\x07b")), (1,), 0, 0, 0, 0.0)]))


@staged()
async def test_a_race_within_a_chat_tells_the_meter_what_a_plain_step_takes(stage: Stage) -> None:
    await stage.send("one")
    stage.composer.put("two")
    await stage.press("f5")
    await stage.until(lambda: isinstance(stage.app.screen, RaceScreen))
    await stage.until(lambda: getattr(getattr(stage.app.screen, "run_of", None), "shown", False))
    await stage.press("escape")
    await stage.until(lambda: stage.app.screen is stage.chat)
    await stage.shows("race: 1.83x wall clock", "plain: 60.0 tok/s, 2.00x")
    assert stage.composer.text == "two" and len(stage.turns) == 2
    asked = [[m.content for m in request.messages] for request in stage.session.requests[1:]]
    assert asked == [["one", "Hello, world!\n", "two"]] * 4
