"""The Models tab: a pull with its progress, cancelling, loading and removing; only the hub is ours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dflash_local import settings
from dflash_local.app import model_entries
from dflash_local.app.model_entries import ModelEntry
from dflash_local.catalog.bundled import Pair
from dflash_local.catalog.registry import Registry
from dflash_local.errors import BusyError, Interrupted, UnknownModelError
from dflash_local.load_config import LoadConfig
from dflash_local.service.backend import Model
from dflash_local.service.service import Service
from tests.cli.conftest import TARGET, toy_hub  # noqa: F401  # a fixture
from tests.fake_hub import FakeHub
from tests.service.scripted import ScriptedSession
from tests.ui.web.conftest import Visitor
from tests.ui.web.stand import FakeServedPair, visiting, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

SLOW = 200_000  # bytes per second of a file that is to be seen coming


def real_pair(service: Service) -> Any:
    """What the command hands to the page, over the home and the hub of this test."""
    from dflash_local.app.model_sources import LocalModels
    from dflash_local.app.served_pair import ServedPair

    user = settings.load()
    return ServedPair(service, LocalModels(user, LoadConfig(), print), LoadConfig(), user, "http://127.0.0.1:1")


def any_model(name: str, _load: LoadConfig | None = None) -> Model:
    return Model(name, lambda _progress: ScriptedSession(), Pair(name, Path("nowhere"), None, bundled=False))


def row(page: Page, name: str) -> Locator:
    return page.locator(f'#df-pairs li[data-name="{name}"]')


def choose(page: Page, name: str) -> None:
    """Click a row, and wait until what belongs to it is shown."""
    row(page, name).locator("button").click()
    page.locator("#df-details summary").get_by_text(name).first.wait_for()
    page.locator(f'.df-plans[data-pair="{name}"]').wait_for()


def start(page: Page, action: str) -> Locator:
    """The button of the load dialog, once it offers this."""
    found = page.locator(".df-start:visible:enabled", has_text=re.compile(f"^{action}"))
    found.wait_for()
    return found


def enabled(page: Page, button: str) -> Locator:
    found = page.locator(f"#{button}:enabled")
    found.wait_for()
    return found


def test_a_pair_is_pulled_loaded_and_removed_and_a_pull_that_fails_is_one_plain_line(
    visitor: Visitor,
    toy_hub: FakeHub,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = model_entries.registry
    # Of the rows the first and the hub's: to plan all of them takes a second each time.
    monkeypatch.setattr(
        model_entries, "registry", lambda user: Registry(whole(user).rows[:: len(whole(user).rows) - 1])
    )
    toy_hub.fault("api", "404", times=99, code="RepoNotFound")
    with visiting(visitor, "Models", make=real_pair, find=any_model) as (here, page):
        choose(page, TARGET)
        assert page.locator("#df-remove").is_disabled()
        start(page, "Download$").click()
        line = page.locator("#df-pulling [role=alert]")
        line.wait_for()
        assert "was not downloaded" in line.inner_text() and "\n" not in line.inner_text()
        toy_hub.clear_faults()
        start(page, "Download$").click()
        page.locator("#df-pulling").get_by_text("every file verified").wait_for()
        row(page, TARGET).get_by_text("here", exact=True).wait_for()
        assert toy_hub.sent("*.safetensors") > 1_000_000

        start(page, "Load$").click()  # its shapes are known now, and so its plans
        page.locator("#df-standing").get_by_text(f"{TARGET} is loaded").wait_for()
        row(page, TARGET).locator(".df-served").wait_for()
        assert here.service.model.name == TARGET
        assert page.locator("#df-remove").is_disabled(), "what is loaded is not removed"
        enabled(page, "df-unload").click()
        page.locator("#df-standing").get_by_text("is not loaded").wait_for()
        check_removal(page)


def check_removal(page: Page) -> None:
    """It is asked about, refused, and done."""
    enabled(page, "df-remove").click()
    page.locator("#df-question").get_by_text("would be freed").wait_for()
    page.locator("#df-no").click()
    page.locator("#df-question").wait_for(state="hidden")
    row(page, TARGET).get_by_text("here", exact=True).wait_for()
    enabled(page, "df-remove").click()
    page.locator("#df-yes").click()
    page.locator("#df-models-notice").get_by_text("freed").wait_for()
    row(page, TARGET).get_by_text("not here").wait_for()
    assert TARGET in page.locator("#df-models-notice").inner_text()


def test_names_are_shown_as_text_and_no_row_moves_while_the_tab_is_open(visitor: Visitor) -> None:
    odd = "<img src=x onerror=alert(1)>"

    def entry(name: str, state: str = "absent", fits: str = "fits") -> ModelEntry:
        return ModelEntry(name, state, fits, "9 GiB", "", "Code.", "Apache-2.0", 88.2, (290.4, 449.9))

    def change(served: FakeServedPair) -> None:
        served.registry = [
            ModelEntry("scripted", "bundled", "fits", ""),
            *(entry(name) for name in ("d", "c", "b", odd)),
        ]

    def order(page: Page) -> list[str]:
        return page.locator("#df-pairs li[data-name] button").all_inner_texts()

    with visiting(visitor, "Models", change=change) as (here, page):
        assert order(page) == ["scripted", "d", "c", "b", odd]
        news = {"d": ("absent", "needs 9 GiB"), "b": ("local", "fits"), "c": ("absent", "target alone")}
        here.served.registry = [
            entry(one.name, *news.get(one.name, (one.state, one.fits))) for one in here.served.registry
        ]
        here.service.load()
        row(page, "d").get_by_text("needs 9 GiB").wait_for()
        assert order(page) == ["scripted", "d", "c", "b", odd]
        page.get_by_role("tab", name="Chat").click()
        page.get_by_role("tab", name="Models").click()
        wait_until(lambda: order(page) == ["scripted", "b", "d", "c", odd])
        page.locator("#df-pairs").get_by_text(odd).click()
        page.locator("#df-details summary").get_by_text(odd).click()
        page.locator("#df-details").get_by_text(f"all about {odd}").wait_for()
        card = row(page, "d").inner_text()
        assert "Code." in card and "about 88 tok/s plain, 290 to 450 drafted" in card and "Apache-2.0" in card
        assert page.locator("#df-pairs img").count() == 0


def test_two_pulls_at_once_are_refused() -> None:
    from dflash_local.ui.web.models_view import ModelsView

    def pulling(_name: str, _hear: Any, cancelled: Any) -> None:
        wait_until(cancelled)
        raise Interrupted("stopped")

    service = Service(any_model("scripted"))
    entries = [ModelEntry(name, "absent", "fits", "") for name in "ab"]
    served = FakeServedPair(service, registry=entries)
    served.pulling = pulling
    models_view = ModelsView(served)
    models_view.start_by_name("A")
    pull = models_view.pull
    assert pull is not None
    with pytest.raises(BusyError, match="a is being downloaded"):
        models_view.start_by_name("b")
    with pytest.raises(BusyError, match="cancel that first"):
        models_view.remove("a")
    with pytest.raises(UnknownModelError):
        models_view.start_by_name("../../etc")
    pull.cancel()
    wait_until(lambda: not pull.running)
    assert isinstance(pull.error, Interrupted) and "cancelled" in pull.verdict
    models_view.start_by_name("b")
    again = models_view.pull
    assert again is not None and again is not pull
    again.cancel()
    wait_until(lambda: not again.running)
    service.close()
