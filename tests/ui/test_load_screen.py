"""The dialog of the ways to load a pair: their order, its keys, what does not fit, the download that comes first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dflash_local.app import load_choices as module
from dflash_local.app.load_choices import LoadChoices, load_choices
from dflash_local.app.model_entries import ModelEntry
from dflash_local.errors import DFlashError, DoesNotFitError, UnknownModelError
from dflash_local.events import PullProgress
from dflash_local.load_config import LoadConfig
from dflash_local.planner.machine import named
from dflash_local.settings import load
from dflash_local.ui.tui.dialogs import PullScreen
from dflash_local.ui.tui.load import LoadScreen
from tests.service.scripted import ScriptedSession
from tests.ui.stage import Stage, play, staged

NAME = "Qwen/Qwen3.6-27B"
BEST = "Lorbus/Qwen3.6-27B-int4-AutoRound"
ALONE = "cyankiwi/Qwen3.6-27B-AWQ-INT4"  # the best without a drafter
INTEL = "Intel/Qwen3.6-27B-int4-AutoRound: published in 4 bits"
Plan = Callable[[str, int | None, bool], LoadChoices | None]
PLANS: dict[tuple[str, int | None, bool], LoadChoices | None] = {}  # each takes a second or more


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
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


async def open_dialog(stage: Stage, plan: Plan) -> None:
    stage.chat_session.plan = plan
    await stage.enter(f"/model {NAME}")
    await stage.until(lambda: is_drawn(stage))


def is_drawn(stage: Stage) -> bool:
    return dialog(stage) is not None and "Esc closes" in stage.screen_text


def words(stage: Stage) -> str:
    """What stands on the screen, as if it were one line."""
    return " ".join(stage.screen_text.replace("│", " ").split())


def row(stage: Stage, words: str) -> str:
    """The line of the screen that holds these words."""
    return next(line for line in stage.screen_text.splitlines() if words in line)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["narrow", "wide"])
def test_the_best_is_first_and_what_does_not_fit_cannot_be_chosen(plan: Plan, size: tuple[int, int]) -> None:
    async def act(stage: Stage) -> None:
        await open_dialog(stage, plan)
        text = words(stage)
        assert f"{NAME} on RTX 4090 (24 GiB, 1,008 GB/s): fits weights int4, variant autoround-int4, 20.02 GiB" in text
        assert "speed about 53 tok/s plain, 161 to 342 drafted (acceptance of similar pairs) better" in text
        assert f"{BEST}: published in 4 bits" in text and "scaled by data sheets" in text
        assert "Enter downloads and loads · d: drafter on · c: context max · m: begin with it · Esc closes" in text
        heading, best = row(stage, "Memory"), row(stage, "autoround-int4 ")
        assert all(word in heading for word in ("Weights", "Context", "Plain", "Drafted", "Download"))
        assert all(cell in best for cell in ("34,816", "23.55 GiB", "53", "161 to 342", "20.02 GiB"))
        assert text.index("autoround-int4 ") < text.index("pack-quantized-int4") < text.index("published weights")
        assert ("Engine" in heading) == (size[0] > 100), "all run on the fused one: not worth a narrow column"
        await stage.press("down")
        await stage.shows(INTEL)
        await stage.press("end")
        await stage.shows("unsloth/Qwen3.6-27B-NVFP4 in nvfp4 needs 26.0 GiB")
        assert "does not fit weights nvfp4" in words(stage) and "nearest autoround-int4, which fits" in words(stage)
        assert "2.4 GiB too little" in words(stage) and "Enter" not in row(stage, "Esc closes")
        await stage.press("enter")
        await stage.shows("cannot be loaded: unsloth")
        assert dialog(stage) is not None
        await stage.press("escape")
        await stage.until(lambda: stage.app.screen is stage.chat)

    stage = play(act, size=size)
    assert stage.chat_session.plans == [(NAME, None, True)], "planned once, and nothing more"
    assert stage.chat_session.loaded == [] == stage.chat_session.pulls == stage.chat_session.executed


@staged(size=(120, 40))
async def test_d_and_c_plan_all_of_it_anew_and_what_is_chosen_has_both(stage: Stage, plan: Plan) -> None:
    def here(*asked: Any) -> LoadChoices:
        found = plan(*asked)
        assert found is not None
        return replace(found, choices=tuple(replace(each, download_gib=0.0) for each in found.choices))

    await open_dialog(stage, here)
    await stage.press("d")
    await stage.shows("d: drafter off")
    assert f"{NAME} without its drafter" in stage.screen_text and "Drafted" not in stage.screen_text
    for context in ("8,192", "16,384"):
        await stage.press("c")
        await stage.shows(f"c: context {context}")
        assert context in row(stage, "autoround-int4 ")
    await stage.press("down", "down")
    await stage.shows(INTEL)
    await stage.press("d")
    await stage.shows("Drafted", "d: drafter on")
    assert INTEL in stage.screen_text, "the same row as before"
    await stage.press("d")
    await stage.shows("d: drafter off")
    await stage.press("enter")
    await stage.shows("now talking to Intel/")
    (chosen,) = stage.chat_session.loaded
    assert f"{chosen.model}: published in 4 bits" == INTEL and chosen.plan.context == 16_384
    assert not chosen.config.draft and stage.chat_session.pulls == []


@staged()
async def test_planning_holds_nothing_up_and_can_be_left(stage: Stage, plan: Plan) -> None:
    gate = threading.Event()

    def slow(name: str, context: int | None, draft: bool) -> LoadChoices | None:
        assert draft or gate.wait(60)
        return plan(name, context, draft)

    await open_dialog(stage, slow)
    try:
        await stage.press("d")
        await stage.shows("planning")
        await stage.press("c", "enter")
        assert dialog(stage) is not None
        await stage.press("escape")
        await stage.until(lambda: stage.app.screen is stage.chat)
    finally:
        gate.set()
    await stage.idle()
    assert stage.chat_session.loaded == [] and len(stage.chat_session.plans) == 2, "one thing at a time"


@staged()
async def test_what_is_missing_is_downloaded_first_with_its_size_licence_and_the_room(stage: Stage, plan: Plan) -> None:
    stage.chat_session.on_pull = lambda hear, _: hear(PullProgress(BEST, 5 * 2**20, 20 * 2**20, 2 * 2**20, 1 * 2**20))
    await open_dialog(stage, plan)
    await stage.press("d")
    await stage.shows("d: drafter off")
    await stage.press("home", "enter")
    await stage.shows("Enter downloads it, Esc does not")
    for text in ("It takes 18.60 GiB of disk", "apache-2.0", "512 GiB free for /models", f"Download {ALONE}"):
        assert text in stage.screen_text
    await stage.press("escape")
    await stage.until(lambda: dialog(stage) is not None)
    await stage.shows("d: drafter off")
    assert stage.chat_session.pulls == []
    await stage.press("enter")
    await stage.until(lambda: isinstance(stage.app.screen, PullScreen))
    await stage.press("enter")
    await stage.shows(f"now talking to {ALONE}")
    assert stage.chat_session.pulls == [f"{ALONE} without its drafter"]
    assert [choice.model for choice in stage.chat_session.loaded] == [ALONE]


@staged()
async def test_what_waits_for_the_plans_is_given_back_when_they_are_shown(stage: Stage, plan: Plan) -> None:
    gate = threading.Event()

    def slow(name: str, context: int | None, draft: bool) -> LoadChoices | None:
        assert gate.wait(60)
        return plan(name, context, draft)

    stage.chat_session.plan = slow
    try:
        await stage.enter(f"/model {NAME}")
        await stage.enter("hi")
        assert stage.composer.text == ""
    finally:
        gate.set()
    await stage.until(lambda: is_drawn(stage))
    assert stage.composer.text == "hi" and stage.session.requests == []


def refusing(error: DFlashError) -> Plan:
    def refuse(*_: Any) -> None:
        raise error

    return refuse


@staged()
async def test_there_is_no_dialog_where_there_is_nothing_to_choose(stage: Stage, plan: Plan) -> None:
    several = plan(NAME, None, True)
    assert several is not None
    one = replace(several, choices=(replace(several.choices[0], download_gib=0.0),))
    for found in (None, one, replace(several, has_drafter=False)):
        stage.chat_session.plan = lambda *_, found=found: found  # type: ignore[misc]
        await stage.send("/model demo")
        assert dialog(stage) is None
    for error in (UnknownModelError("unknown model 'x'", "did you mean another?"), DoesNotFitError("on a server only")):
        stage.chat_session.plan = refusing(error)
        await stage.send("/model x")
        assert (error.hint or error.message) in stage.screen_text and dialog(stage) is None
    for line in ("/model", "/model a b", "/model 'a"):
        await stage.send(line)
        assert dialog(stage) is None
    assert stage.chat_session.executed == ["/model demo"] * 3 + ["/model", "/model a b", "/model 'a"]
    assert len(stage.chat_session.plans) == 5


@staged()
async def test_the_list_of_pairs_leads_there_and_back(stage: Stage, plan: Plan) -> None:
    stage.chat_session.plan = plan
    stage.chat_session.registry = [
        ModelEntry("demo", "bundled", "fits", ""),
        ModelEntry(NAME, "absent", "fits in int4", "54.97 GiB"),
    ]
    await stage.press("f7")
    await stage.shows("Fits this machine")
    await stage.press("down", "enter")
    await stage.until(lambda: dialog(stage) is not None and "Esc closes" in stage.screen_text)
    await stage.press("escape")
    await stage.shows("Fits this machine")
    await stage.press("enter")
    await stage.until(lambda: dialog(stage) is not None)
    assert [name for name, *_ in stage.chat_session.plans] == [NAME, NAME]


@staged(lambda: ScriptedSession(gate=threading.Event()))
async def test_while_a_reply_runs_the_command_waits_in_the_field(stage: Stage) -> None:
    await stage.enter("hi")
    await stage.until(lambda: bool(stage.session.requests))
    await stage.enter(f"/model {NAME}")
    assert dialog(stage) is None and stage.composer.text == f"/model {NAME}"
    await stage.press("escape")
    await stage.idle()
    assert stage.chat_session.plans == []
