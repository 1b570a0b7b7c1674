"""The dialog of the ways to load a pair: their order, its keys, what does not fit, the download that comes first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from textual.pilot import Pilot

from dflash_local.app import load_choices as module
from dflash_local.app.load_choices import LoadChoices, load_choices
from dflash_local.app.model_entries import ModelEntry
from dflash_local.errors import DoesNotFitError, UnknownModelError
from dflash_local.events import PullProgress
from dflash_local.load_config import LoadConfig
from dflash_local.planner.machine import named
from dflash_local.settings import load
from dflash_local.ui.tui.dialogs import PullScreen
from dflash_local.ui.tui.load import LoadScreen
from tests.ui.stage import Stage, play

NAME = "Qwen/Qwen3.6-27B"
BEST = "Lorbus/Qwen3.6-27B-int4-AutoRound"
ALONE = "cyankiwi/Qwen3.6-27B-AWQ-INT4"  # the best without a drafter
INTEL = "Intel/Qwen3.6-27B-int4-AutoRound: published in 4 bits"
PLANS: dict[tuple[str, int | None, bool], LoadChoices | None] = {}  # each takes a second or more
SIZES = pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["narrow", "wide"])


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int | None, bool], LoadChoices | None]:
    """Plans of a machine with one RTX 4090 on which nothing was downloaded."""
    monkeypatch.setattr(module, "machine", lambda _user, **_more: named("RTX 4090", 24))

    def of(name: str, context: int | None, draft: bool) -> LoadChoices | None:
        key = name, context, draft
        if key not in PLANS:
            PLANS[key] = load_choices(name, load(), LoadConfig(context=context, draft=draft))
        return PLANS[key]

    return of


def dialog(stage: Stage) -> LoadScreen | None:
    screen = stage.app.screen
    return screen if isinstance(screen, LoadScreen) else None


async def open_dialog(stage: Stage, pilot: Pilot[Any], line: str = f"/model {NAME}") -> None:
    stage.chat.composer.put(line)
    await pilot.press("enter")
    await stage.until(lambda: dialog(stage) is not None and "Esc closes" in stage.screen_text, pilot)


def words(stage: Stage) -> str:
    """What stands on the screen, as if it were one line."""
    return " ".join(stage.screen_text.replace("│", " ").split())


async def press_c(stage: Stage, pilot: Pilot[Any], context: str) -> None:
    await pilot.press("c")
    await stage.until(lambda: f"c: context {context}" in stage.screen_text, pilot)


def row(stage: Stage, words: str) -> str:
    """The line of the screen that holds these words."""
    return next(line for line in stage.screen_text.splitlines() if words in line)


@SIZES
def test_the_best_is_first_and_preselected_and_all_of_it_can_be_read(plan: Any, size: tuple[int, int]) -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        stage.chat_session.plan = plan
        await open_dialog(stage, pilot)
        text = words(stage)
        assert f"Load {NAME} on RTX 4090, 23.60 GiB free" in text
        assert f"{BEST}: published in 4 bits" in text and "scaled by data sheets" in text
        assert "Enter downloads and loads · d: drafter on · c: context max · Esc closes" in text
        heading, best = row(stage, "Memory"), row(stage, "autoround-int4 ")
        assert all(word in heading for word in ("Weights", "Context", "Plain", "Drafted", "Download"))
        assert all(cell in best for cell in ("35,840", "23.54 GiB", "53", "161 to 342", "20.02 GiB"))
        assert text.index("autoround-int4 ") < text.index("pack-quantized-int4") < text.index("published weights")
        assert ("Engine" in heading) == (size[0] > 100), "all run on the fused one: not worth a narrow column"
        await pilot.press("down")
        await stage.until(lambda: INTEL in stage.screen_text, pilot)
        await pilot.press("escape")
        await stage.until(lambda: stage.app.screen is stage.chat, pilot)

    stage = play(act, size=size)
    assert stage.chat_session.plans == [(NAME, None, True)], "planned once, and nothing more"
    assert stage.chat_session.loaded == [] == stage.chat_session.pulls == stage.chat_session.executed


def test_what_does_not_fit_says_why_and_cannot_be_chosen(plan: Any) -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        stage.chat_session.plan = plan
        await open_dialog(stage, pilot)
        await pilot.press("end")
        await stage.until(lambda: "unsloth/Qwen3.6-27B-NVFP4 in nvfp4 needs 26.0 GiB" in stage.screen_text, pilot)
        assert "2.4 GiB too little" in words(stage)
        assert "Enter" not in row(stage, "Esc closes")
        await pilot.press("enter")
        await stage.until(lambda: "cannot be loaded: unsloth" in stage.screen_text, pilot)
        assert dialog(stage) is not None

    stage = play(act)
    assert stage.chat_session.loaded == [] == stage.chat_session.pulls


def test_d_and_c_plan_all_of_it_anew_and_what_is_chosen_has_both(plan: Any) -> None:
    def here(*asked: Any) -> LoadChoices:
        found = plan(*asked)
        return replace(found, choices=tuple(replace(each, download_gib=0.0) for each in found.choices))

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        stage.chat_session.plan = here
        await open_dialog(stage, pilot)
        await pilot.press("d")
        await stage.until(lambda: "d: drafter off" in stage.screen_text, pilot)
        assert f"{NAME} without its drafter" in stage.screen_text and "Drafted" not in stage.screen_text
        for context in ("8,192", "16,384"):
            await press_c(stage, pilot, context)
            assert context in row(stage, "autoround-int4 ")
        await pilot.press("down", "down")
        await stage.until(lambda: INTEL in stage.screen_text, pilot)
        await pilot.press("d")
        await stage.until(lambda: "Drafted" in stage.screen_text and "d: drafter on" in stage.screen_text, pilot)
        assert INTEL in stage.screen_text, "the same row as before"
        await pilot.press("d")
        await stage.until(lambda: "d: drafter off" in stage.screen_text, pilot)
        await pilot.press("enter")
        await stage.until(lambda: "now talking to Intel/" in stage.screen_text, pilot)

    stage = play(act, size=(120, 40))
    (chosen,) = stage.chat_session.loaded
    assert f"{chosen.model}: published in 4 bits" == INTEL and chosen.plan.context == 16_384
    assert not chosen.config.draft and stage.chat_session.pulls == []


def test_planning_holds_nothing_up_and_can_be_left(plan: Any) -> None:
    gate = threading.Event()

    def slow(name: str, context: int | None, draft: bool) -> LoadChoices | None:
        if not draft:
            gate.wait(60)
        return plan(name, context, draft)

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        stage.chat_session.plan = slow
        await open_dialog(stage, pilot)
        await pilot.press("d")
        await stage.until(lambda: "planning" in stage.screen_text, pilot)
        await pilot.press("c", "enter")
        assert dialog(stage) is not None
        await pilot.press("escape")
        await stage.until(lambda: stage.app.screen is stage.chat, pilot)
        gate.set()

    try:
        stage = play(act)
        assert stage.chat_session.loaded == [] and len(stage.chat_session.plans) == 2, "one thing at a time"
    finally:
        gate.set()


def test_what_is_missing_is_downloaded_first_with_its_size_licence_and_the_room(plan: Any) -> None:
    def pull(on_event: Any, _cancelled: Any) -> None:
        on_event(PullProgress(BEST, 5 * 2**20, 20 * 2**20, 2 * 2**20, 1 * 2**20))

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        stage.chat_session.plan, stage.chat_session.on_pull = plan, pull
        await open_dialog(stage, pilot)
        await pilot.press("d")
        await stage.until(lambda: "d: drafter off" in stage.screen_text, pilot)
        await pilot.press("home", "enter")
        await stage.until(lambda: "Enter downloads it, Esc does not" in stage.screen_text, pilot)
        for text in ("It takes 18.60 GiB of disk", "apache-2.0", "512 GiB free for /models", f"Download {ALONE}"):
            assert text in stage.screen_text
        await pilot.press("escape")
        await stage.until(lambda: dialog(stage) is not None, pilot)
        await stage.until(lambda: "d: drafter off" in stage.screen_text, pilot)
        assert stage.chat_session.pulls == []
        await pilot.press("enter")
        await stage.until(lambda: isinstance(stage.app.screen, PullScreen), pilot)
        await pilot.press("enter")
        await stage.until(lambda: f"now talking to {ALONE}" in stage.screen_text, pilot)

    stage = play(act)
    assert stage.chat_session.pulls == [f"{ALONE} without its drafter"]
    assert [choice.model for choice in stage.chat_session.loaded] == [ALONE]


def test_there_is_no_dialog_where_there_is_nothing_to_choose(plan: Any) -> None:
    several = plan(NAME, None, True)
    one = replace(several, choices=(replace(several.choices[0], download_gib=0.0),))

    def refuse(*_: Any) -> None:
        raise UnknownModelError("unknown model 'x'", "did you mean another?")

    def server(*_: Any) -> None:
        raise DoesNotFitError("it runs on a server only")

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        for found in (None, one, replace(several, has_drafter=False)):
            stage.chat_session.plan = lambda *_, found=found: found  # type: ignore[misc]
            await stage.send("/model demo", pilot)
            assert dialog(stage) is None
        for plans, error in ((refuse, "did you mean another?"), (server, "runs on a server only")):
            stage.chat_session.plan = plans
            await stage.send("/model x", pilot)
            assert error in stage.screen_text and dialog(stage) is None
        for line in ("/model", "/model a b", "/model 'a"):
            await stage.send(line, pilot)
            assert dialog(stage) is None

    stage = play(act)
    assert stage.chat_session.executed == ["/model demo"] * 3 + ["/model", "/model a b", "/model 'a"]
    assert len(stage.chat_session.plans) == 5


def test_the_list_of_pairs_leads_there_and_back(plan: Any) -> None:
    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        stage.chat_session.plan = plan
        stage.chat_session.registry = [
            ModelEntry("demo", "bundled", "fits", ""),
            ModelEntry(NAME, "absent", "fits in int4", "54.97 GiB"),
        ]
        await pilot.press("f7")
        await stage.until(lambda: "Fits this machine" in stage.screen_text, pilot)
        await pilot.press("down", "enter")
        await stage.until(lambda: dialog(stage) is not None and "Esc closes" in stage.screen_text, pilot)
        await pilot.press("escape")
        await stage.until(lambda: "Fits this machine" in stage.screen_text, pilot)
        await pilot.press("enter")
        await stage.until(lambda: dialog(stage) is not None, pilot)

    assert [name for name, *_ in play(act).chat_session.plans] == [NAME, NAME]


def test_while_a_reply_runs_the_command_waits_in_the_field(plan: Any) -> None:
    from tests.service.scripted import ScriptedSession

    gate = threading.Event()

    async def act(stage: Stage, pilot: Pilot[Any]) -> None:
        stage.chat_session.plan = plan
        stage.chat.composer.put("hi")
        await pilot.press("enter")
        await stage.until(lambda: bool(stage.session.requests), pilot)
        stage.chat.composer.put(f"/model {NAME}")
        await pilot.press("enter")
        await pilot.pause()
        assert dialog(stage) is None and stage.chat.composer.text == f"/model {NAME}"
        gate.set()
        await stage.idle(pilot)

    try:
        assert play(act, session=ScriptedSession(gate=gate)).chat_session.plans == []
    finally:
        gate.set()
