"""The load dialog of the Models tab: order, what is picked at first, drafter, context, what does not fit, one click."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dflash_local import settings
from dflash_local.app import load_choices as planning
from dflash_local.app.load_choices import LoadChoices
from dflash_local.app.model_entries import ModelEntry
from dflash_local.errors import DoesNotFitError, DownloadError
from dflash_local.events import PullProgress
from dflash_local.load_config import LoadConfig
from dflash_local.planner.machine import named
from dflash_local.service.backend import Model
from dflash_local.service.service import Service
from tests.service.scripted import ScriptedSession
from tests.ui.web.conftest import Visitor
from tests.ui.web.stand import FakeServedPair, Site, enter, visiting, wait_until
from tests.ui.web.test_models_tab import choose, row, start

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

CARD = named("RTX 4090", 24)
PAIR = "Qwen/Qwen3.6-27B"


class Pairs:
    """A registry of one pair that is planned for ``CARD`` as it is, and what became of it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int | None, bool]] = []
        self.loads: list[tuple[str, LoadConfig | None]] = []
        self.pulls: list[tuple[str, bool]] = []
        self.here = False
        self.fault: DownloadError | None = None

    def change(self, served: FakeServedPair) -> None:
        served.registry.append(ModelEntry(PAIR, "absent", "fits in int4", "54.97 GiB"))
        served.planning = self.plan
        served.pull = self.pull  # type: ignore[assignment, method-assign]

    def plan(self, name: str, context: int | None, draft: bool) -> LoadChoices | None:
        if name != PAIR:
            return None
        self.asked.append((name, context, draft))
        found = planning.load_choices(name, settings.load(), LoadConfig(context=context, draft=draft))
        assert found is not None
        if not self.here:
            return found
        return replace(found, choices=tuple(replace(each, download_gib=0.0) for each in found.choices))

    def pull(self, name: str, on_event: Any, _cancelled: Any, draft: bool = True) -> None:
        self.pulls.append((name, draft))
        on_event(PullProgress(name, 4, 4))
        self.here = True

    def find(self, name: str, load: LoadConfig | None) -> Model:
        if self.fault is not None:
            raise self.fault
        self.loads.append((name, load))
        return Model(name, lambda _progress: ScriptedSession())


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Pairs:
    monkeypatch.setattr(planning, "machine", lambda _user, **_more: CARD)
    return Pairs()


@contextmanager
def dialog(visitor: Visitor, pairs: Pairs) -> Iterator[tuple[Site, Page]]:
    """Within, a window with the pair's plans."""
    with visiting(visitor, "Models", change=pairs.change, find=pairs.find) as (here, page):
        choose(page, PAIR)
        planned(page)
        yield here, page


def planned(page: Page) -> None:
    page.locator(f'.df-plans[data-pair="{PAIR}"]:not([aria-busy])').wait_for()


def ways(page: Page) -> Locator:
    return page.locator(".df-ways tr[data-key]")


def picked(page: Page) -> str:
    return page.locator(".df-ways tr[data-key]:has(input:checked)").inner_text().split("\t")[0].strip()


def test_the_ways_to_load_stand_in_order_and_the_keyboard_picks_one_that_fits(visitor: Visitor, pairs: Pairs) -> None:
    with dialog(visitor, pairs) as (_, page):
        check_order(page, pairs)
        head = page.locator(".df-plans > .df-verdict:first-child h2").inner_text()
        assert head == f"{PAIR} on RTX 4090 (24 GiB, 1,008 GB/s): fits", "of the plans of the table, and of no others"
        labels = page.locator(".df-plans > .df-verdict:first-child dt").all_inner_texts()
        assert labels == ["weights", "context", "speed", "better"]
        section = page.locator(".df-plans section:visible")
        assert "published in 4 bits: Lorbus/Qwen3.6-27B-int4-AutoRound" in section.inner_text()
        assert "licence apache-2.0; 100.0 GiB free for /models" in section.inner_text()
        start(page, "Download 20.02 GiB and load$")
        page.locator(".df-ways input:checked").focus()
        page.keyboard.press("ArrowDown")
        assert picked(page) == "autoround-int4-intel"
        assert section.locator("button").inner_text() == "Download ~19.69 GiB and load"
        page.get_by_text("int4, rounded at load").click()
        assert "rounded to 4 bits" in section.inner_text()
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "df-start", "after what does not fit"
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert re.search("^needed .* GiB", section.locator("pre").inner_text(), re.M)
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Enter")
        wait_until(lambda: bool(pairs.loads))
        assert pairs.pulls == [(PAIR, True)]
        assert pairs.loads[0][1] == LoadConfig(quantize="int4")


def check_order(page: Page, pairs: Pairs) -> None:
    titles = page.locator(".df-ways > table th").all_inner_texts()
    assert titles == ["Weights", "Context", "Memory", "Plain", "Drafted", "Engine", "Download"]
    names = [text.split("\t")[0].strip() for text in ways(page).all_inner_texts()]
    found = pairs.plan(PAIR, None, True)
    assert found is not None and found.preselected == 0
    assert len(names) == sum(each.fits for each in found.choices) and names[0] == picked(page) == "autoround-int4"
    assert "34,816" in ways(page).first.inner_text() and "fused" in ways(page).first.inner_text()
    unfit = page.locator(".df-unfit tbody tr")
    assert unfit.count() == len(found.choices) - len(names)
    assert all("too little" in text for text in unfit.all_inner_texts())
    assert page.locator(".df-unfit input:enabled").count() == 0
    unfit.first.click()
    assert picked(page) == "autoround-int4"
    assert "scaled by data sheets" in page.locator(".df-basis").inner_text()
    label = page.get_by_role("radio", name=re.compile("^autoround-int4, Context 34,816, Memory 23.55 GiB"))
    assert label.is_checked()


def test_the_drafter_and_the_context_are_planned_anew_and_a_pick_is_kept(visitor: Visitor, pairs: Pairs) -> None:
    with dialog(visitor, pairs) as (_, page):
        page.get_by_text("int4, rounded at load", exact=True).click()
        page.get_by_role("combobox", name="Context").focus()
        page.get_by_role("combobox", name="Context").select_option(label="8,192")
        ways(page).get_by_text("34,816").first.wait_for(state="detached")
        assert all("8,192" in text for text in ways(page).all_inner_texts())
        assert picked(page) == "int4, rounded at load"
        assert page.evaluate("document.activeElement.name") == "df-context", "the keyboard's place is kept"
        page.get_by_role("checkbox", name="Drafter").uncheck()
        page.get_by_text("no drafter").first.wait_for()
        assert pairs.asked[-1] == (PAIR, 8192, False) and not page.get_by_role("checkbox", name="Drafter").is_checked()
        start(page, "Download .* and load$").click()
        wait_until(lambda: bool(pairs.loads))
        assert pairs.pulls == [(PAIR, False)], "the drafter is not fetched either"
        assert pairs.loads == [(PAIR, LoadConfig(quantize="int4", context=8192, draft=False))]


def test_a_download_is_loaded_or_its_fault_told_and_each_window_keeps_its_choice(
    visitor: Visitor, pairs: Pairs
) -> None:
    pairs.fault = DownloadError("a shard of it is missing", "pull it again")
    with dialog(visitor, pairs) as (here, page):
        other = page.context.new_page()
        enter(other, here, "Models")
        start(page, "Download 20.02 GiB and load$").click()
        line = page.locator("#df-pulling [role=alert]")
        line.get_by_text("It was not loaded: a shard of it is missing").wait_for()
        assert "every file verified" in line.inner_text()
        pairs.fault = None
        start(page, "Load$").click()
        variant = "Lorbus/Qwen3.6-27B-int4-AutoRound"
        page.locator("#df-standing").get_by_text(f"{variant} is loaded").wait_for()
        assert here.service.model.name == variant and pairs.pulls == [(variant, True)]
        start(page, "Load again$")
        assert "served" in ways(page).first.inner_text()
        assert row(other, "scripted").locator("button").get_attribute("aria-pressed") == "true"
        assert other.locator(".df-plans tr[data-key]").count() == 0


def test_a_way_that_was_not_offered_is_not_taken(pairs: Pairs) -> None:
    """A window sends numbers and flags alone; none but those of its own table do anything."""
    import gradio as gr

    from dflash_local.ui.web.load_dialog import LoadDialog
    from dflash_local.ui.web.models_view import ModelsView
    from dflash_local.ui.web.visitors import Visitors

    service = Service(Model("scripted", lambda _progress: ScriptedSession()), pairs.find, None)
    served = FakeServedPair(service)
    pairs.change(served)
    pairs.here = True
    with gr.Blocks():
        dialog = LoadDialog(ModelsView(served), Visitors(service))
    window: Any = SimpleNamespace(session_hash="window")
    other: Any = SimpleNamespace(session_hash="other")

    def send(**sent: object) -> Any:
        return gr.EventData(None, sent)

    dialog.ask(PAIR, window)
    planning, drawn = dialog.plan(window)
    assert "Planning" in planning and "data-plan" in drawn
    found, plan = pairs.plan(PAIR, None, True), 1
    assert found is not None and not found.choices[-1].fits
    bad: list[object] = [len(found.choices) - 1, len(found.choices), -1, True, 0.0, "0", None, [0]]
    for way in bad:
        assert "the plans have changed" in dialog.start(send(plan=plan, way=way), window)
    for number in (0, 2, "1", None):
        assert "the plans have changed" in dialog.start(send(plan=number, way=0), window)
    assert "the plans have changed" in dialog.start(send(plan=plan, way=0), other)
    for context in (len(found.contexts) + 1, -1, "0", None):
        dialog.ask_otherwise(send(plan=plan, context=context, draft=False), window)
    dialog.ask_otherwise(send(plan=plan, context=1, draft=False), other)
    assert list(dialog.plan(window)) == [gr.skip()], "nothing new was asked for"
    dialog.ask("scripted", window)
    assert "the plans have changed" in dialog.start(send(plan=plan, way=0), window), "another pair was chosen since"
    dialog.ask(PAIR, window)
    assert pairs.loads == [] and pairs.pulls == []
    (drawn,) = dialog.plan(window)
    plan = int(drawn.split('data-plan="')[1].split('"')[0])
    assert dialog.start(send(plan=plan, way=0), window) == "" and pairs.loads[0][0] == found.choices[0].model
    dialog.ask(PAIR, window)
    assert len(list(dialog.plan(window))) == 1
    assert dialog.start(send(plan=plan, way=0), window) == "", "clicked while the table was drawn anew"
    dialog.ask(PAIR, window)
    list(dialog.plan(window))
    assert "the plans have changed" in dialog.start(send(plan=plan, way=0), window), "two tables ago"
    service.close()


@pytest.mark.slow
def test_what_speaks_against_a_pair_is_one_line_and_planning_is_seen(visitor: Visitor, pairs: Pairs) -> None:
    go_on = threading.Event()

    def plan(name: str, _context: int | None, _draft: bool) -> LoadChoices | None:
        if name != PAIR:
            return None
        assert go_on.wait(30)
        raise DoesNotFitError(f"{name} runs on a server only", "start one")

    def change(served: FakeServedPair) -> None:
        pairs.change(served)
        served.planning = plan

    with visiting(visitor, "Models", change=change) as (_, page):
        page.locator('.df-plans[data-pair="scripted"]').wait_for()
        row(page, PAIR).locator("button").click()
        page.locator("#df-load-dialog [role=progressbar]").wait_for()
        assert f"Planning how to load {PAIR}" in page.locator("#df-load-dialog").inner_text()
        go_on.set()
        page.locator("#df-load-dialog [role=alert]").get_by_text("runs on a server only (start one)").wait_for()
        assert page.locator(".df-start:visible").count() == 0
