"""From an empty machine: a pair of which only a published quantised form fits is chatted with after three clicks."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
from dflash_local import settings  # noqa: E402
from dflash_local.app import load_choices  # noqa: E402
from dflash_local.app.model_sources import LocalModels  # noqa: E402
from dflash_local.load_config import LoadConfig  # noqa: E402
from dflash_local.planner.machine import named  # noqa: E402
from dflash_local.service.backend import Model  # noqa: E402
from tests.cli.conftest import DRAFTER, TARGET, toy_hub  # noqa: E402, F401  # a fixture
from tests.cli.test_chat_what_fits import VARIANT, variant  # noqa: E402, F401  # a fixture
from tests.fake_hub import FakeHub  # noqa: E402
from tests.ui.web.conftest import Visitor  # noqa: E402
from tests.ui.web.stand import wait_until  # noqa: E402
from tests.ui.web.test_chat_tab import BOT, send  # noqa: E402
from tests.ui.web.test_models_tab import choose, models, real_pair, row, start  # noqa: E402

CARD = named(None, 9)  # of Qwen3-8B only four bits fit, and a context to chat in


def find(name: str, load: LoadConfig | None) -> Model:
    """What the server takes a name for, on this machine's own processor."""
    return LocalModels(settings.load(), LoadConfig(), print, served=True).find(name, load)


# The dialog is in test_load_dialog; the same way to a chat by keys in tests/ui/test_terminal_session, by a command in
# tests/cli/test_chat_what_fits.
@pytest.mark.slow
def test_a_pair_that_fits_only_quantised_is_chatted_with_after_three_clicks(
    visitor: Visitor,
    toy_hub: FakeHub,  # noqa: F811
    variant: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_choices, "machine", lambda _user, **_more: CARD)
    with models(visitor, make=real_pair, find=find) as (here, page):
        page.set_default_timeout(60_000)  # a real download and a real load
        choose(page, TARGET)
        button = start(page, "Download .* and load$")
        assert "published in 4 bits" in page.locator(".df-plans section:visible").inner_text()
        assert "published weights" in page.locator(".df-unfit").inner_text()
        button.click()
        page.locator("#df-standing").get_by_text(f"{VARIANT} is loaded").wait_for()
        fetched = [request.path for request in toy_hub.gets("*.safetensors") if request.server == "hub"]
        assert fetched and all(path.startswith((f"/{VARIANT}/", f"/{DRAFTER}/")) for path in fetched)
        row(page, TARGET).get_by_text("here, quantised").wait_for()
        row(page, TARGET).locator(".df-served").wait_for()
        start(page, "Load again$")
        assert here.service.facts is not None and here.service.facts.drafter is not None

        page.get_by_role("tab", name="Chat").click()
        send(page, "one two three")
        wait_until(lambda: _text(page) != "")
        page.get_by_role("tab", name="Models").click()
        page.locator("#df-unload:enabled").click()
        page.locator("#df-remove:enabled").click()
        page.locator("#df-question").get_by_text("would be freed").wait_for()
        assert VARIANT in page.locator("#df-question").inner_text()
        page.locator("#df-yes").click()
        row(page, TARGET).get_by_text("not here").wait_for()


def _text(page: Any) -> str:
    found = page.locator(BOT)
    return str(found.first.inner_text()).strip() if found.count() else ""
