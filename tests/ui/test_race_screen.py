"""The race on a screen: run one after the other, replayed side by side, its verdict, its ends."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from textual.pilot import Pilot

from dflash_local.errors import ContextError, DFlashError
from dflash_local.events import Event, Finished, FinishReason, Piece, Step
from dflash_local.report.race_file import About
from dflash_local.request import Request, user_request
from dflash_local.service.race import Racer
from dflash_local.service.race_lanes import Track
from dflash_local.service.service import Service
from dflash_local.ui.tui.app import RaceApp
from dflash_local.ui.tui.race import LaneLayout, LaneView, RaceScreen
from dflash_local.ui.tui.text_view import TextView
from tests.service.scripted import PartingSession, ScriptedSession
from tests.ui.stage import Stage, drive, screen_text, staged, until

ABOUT = About("scripted", "say hello", "dflash race scripted", {})
FAR = [  # an hour between two steps
    Step((Piece("first "),), (1,), 0, 0, 0, 0.0),
    Step((Piece("las", origin="accepted"), Piece("t")), (2, 3), 3, 1, 4, 3600.0),
    Step((Piece("\n"),), (4,), 0, 0, 0, 7200.0),
]


def race(
    act: Callable[[RaceApp, Pilot[DFlashError]], Awaitable[None]],
    session: ScriptedSession,
    size: tuple[int, int] = (100, 30),
    moving: bool = True,
) -> RaceApp:
    """Show a race over a scripted session and drive it."""
    with Service.over(session) as service:
        racer = partial(Racer, service, user_request("hi"))
        screen = RaceScreen("scripted", "say [bold]hello[/bold]", lambda _hear: racer(), lambda _race: ABOUT)
        app = RaceApp(screen)
        app.animation_level = "full" if moving else "none"
        drive(app, partial(act, app), size)
        screen.run_of.join(60)
    return app


async def shows(app: RaceApp, pilot: Pilot[DFlashError], *parts: str) -> None:
    await until(lambda: all(part in screen_text(app) for part in parts), pilot)


def test_both_lanes_end_with_times_speed_up_and_verdict() -> None:
    async def act(app: RaceApp, pilot: Pilot[DFlashError]) -> None:
        await until(lambda: app.race_screen.run_of.shown, pilot)
        await shows(app, pilot, "■ 0.11 s · 6 tokens · 60.0 tok/s", "■ 0.06 s · 6 tokens · 120 tok/s")
        await shows(app, pilot, "same text", "identical: yes", "this run: 1.83x wall clock, 2.00x decode speed · ")
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
    async def act(app: RaceApp, pilot: Pilot[DFlashError]) -> None:
        await shows(app, pilot, "replay at true speed", "first")  # the race itself had shown all of it
        assert "last" not in screen_text(app) and not app.race_screen.run_of.shown
        for _ in range(2):
            await pilot.press("space")
            await until(lambda: app.race_screen.run_of.shown, pilot)
            await until(lambda: screen_text(app).count("first last") == 2, pilot)
            await pilot.press("r")
            await until(lambda: not app.race_screen.run_of.shown, pilot)

    race(act, ScriptedSession(steps=FAR))


def test_without_motion_the_end_is_shown_at_once_and_it_is_saved_as_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(app: RaceApp, pilot: Pilot[DFlashError]) -> None:
        await until(lambda: app.race_screen.run_of.shown, pilot)
        await until(lambda: screen_text(app).count("first last") == 2, pilot)
        await pilot.press("s")
        await until(lambda: any("saved: race-" in note.message for note in app._notifications), pilot)

    monkeypatch.chdir(tmp_path)
    race(act, ScriptedSession(steps=FAR), moving=False)
    (file,) = tmp_path.iterdir()
    assert file.suffix == ".html" and "dflash race scripted" in file.read_text(encoding="utf-8")


def test_a_block_is_lit_with_its_tokens_over_the_lines_that_it_takes() -> None:
    whole = Track()
    whole.take(Step((Piece("a\nbc\nd"),), (1,), 0, 0, 0, 0.0))
    layout = LaneLayout(whole, marked=False)
    layout.show(5, 3, "+2")
    assert [item.plain for item in layout.closed] == ["a"] and [item.plain for item in layout.open] == ["bc", "+2"]
    assert [span.start for span in layout.open[0].text.spans] == [1]
    layout.show(6, 6, "")
    assert [item.plain for item in (*layout.closed, *layout.open)] == ["a", "bc", "d"]
    assert not any(item.text.spans for item in (*layout.closed, *layout.open))


def test_the_targets_own_tokens_are_underlined_in_the_drafted_reply_alone_and_that_one_wins() -> None:
    async def act(app: RaceApp, pilot: Pilot[DFlashError]) -> None:
        screen = app.race_screen
        await until(lambda: screen.run_of.shown and screen_text(app).count("first last") == 2, pilot)
        plain, drafted = (lane.query_one(TextView) for lane in screen.query(LaneView))
        assert underlined(plain) == "" and underlined(drafted) == "first t"
        assert [lane.mode for lane in screen.query(LaneView) if lane.has_class("-won")] == ["dflash"]

    race(act, ScriptedSession(steps=FAR), moving=False)


def underlined(view: TextView) -> str:
    return "".join(part.text for part in view.render_lines(view.size.region)[0] if part.style and part.style.underline)


def test_a_slower_drafted_reply_lets_the_plain_one_win() -> None:
    async def act(app: RaceApp, pilot: Pilot[DFlashError]) -> None:
        await until(lambda: app.race_screen.run_of.shown, pilot)
        await shows(app, pilot, "0.50x decode speed")
        assert [lane.mode for lane in app.screen.query(LaneView) if lane.has_class("-won")] == ["ar"]

    race(act, SlowDrafts())


class SlowDrafts(ScriptedSession):
    """Drafts at half the speed of the plain reply."""

    def generate(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        return super().generate(replace(request, mode="ar" if request.mode == "dflash" else "dflash"), cancelled)


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


async def race_within(stage: Stage) -> None:
    """Race the message of the field until the chat is back."""
    await stage.press("f5")
    await stage.until(lambda: isinstance(stage.app.screen, RaceScreen))
    await stage.until(lambda: getattr(getattr(stage.app.screen, "run_of", None), "shown", False))
    await stage.press("escape")
    await stage.until(lambda: stage.app.screen is stage.chat)


@staged()
async def test_a_race_within_a_chat_tells_the_meter_what_a_plain_step_takes(stage: Stage) -> None:
    await stage.send("one")
    stage.composer.put("two")
    await race_within(stage)
    await stage.shows("race: 1.83x wall clock", "plain: 60.0 tok/s, 2.00x")
    assert stage.composer.text == "two" and len(stage.turns) == 2
    asked = [[m.content for m in request.messages] for request in stage.session.requests[1:]]
    assert asked == [["one", "Hello, world!\n", "two"]] * 4


class SpeedlessSession(ScriptedSession):
    """Its replies are too short for a speed."""

    def _finished(self, request: Request, tokens: int, reason: FinishReason) -> Finished:
        finished = super()._finished(request, tokens, reason)
        return replace(finished, stats=replace(finished.stats, tokens_per_s=0.0))


@staged(SpeedlessSession)
async def test_a_race_within_a_chat_leaves_out_a_speed_that_is_not_known(stage: Stage) -> None:
    stage.composer.put("one")
    await race_within(stage)
    await stage.shows("race: 1.83x wall clock")
    assert "race: 1.83x wall clock; identical: yes" in stage.screen_text
