"""The About tab: what runs here, and the certificate."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dflash_local.errors import Interrupted
from tests.ui.web.conftest import Visitor
from tests.ui.web.stand import saved, visiting, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

RUN = {"prompt": 0, "case": "greedy", "block_size": 8, "tokens": 56, "mean_acceptance_length": 7.86}
REPORT: dict[str, Any] = {
    "verdict": "identical",
    "statement": "identical (float32): the same token ids with and without drafting in 1 of 1 runs",
    "promise": "identical: the token ids are the same with and without drafting.",
    "note": "toy pair: test material, never a speed claim",
    "runs": [{**RUN, "verdict": "identical"}],
}


def test_a_certificate_shows_its_progress_is_cancelled_by_button_or_closing_and_is_saved(visitor: Visitor) -> None:
    go_on = threading.Event()
    running: list[int] = []

    def certify(hear: Callable[[str, float], None], cancelled: Callable[[], bool]) -> Mapping[str, Any]:
        hear("certifying, run 1 of 2", 0.25)
        running.append(1)
        wait_until(lambda: go_on.is_set() or cancelled())
        running.pop()
        if cancelled():
            raise Interrupted("the certificate was stopped")
        return REPORT

    with visiting(visitor, "About", change=lambda served: setattr(served, "certify", certify)) as (_, page):
        assert "unloaded meanwhile" in page.get_by_text("The certificate answers").inner_text()
        page.locator("#df-certify").click()
        bar = page.locator("#df-certificate [role=progressbar]")
        page.locator("#df-certificate").get_by_text("run 1 of 2").wait_for()
        assert bar.get_attribute("aria-valuenow") == "25" and page.locator("#df-certify").is_disabled()
        page.locator("#df-certify-cancel:enabled").click()
        page.locator("#df-certificate").get_by_text("the certificate was stopped").wait_for()
        go_on.set()
        page.locator("#df-certify:enabled").click()
        check_report(page)
        go_on.clear()
        page.locator("#df-certify:enabled").click()
        wait_until(lambda: bool(running))
        page.close()
        wait_until(lambda: not running)


def check_report(page: Page) -> None:
    """It is saved as it came, and shown."""
    assert saved(page.locator("#df-certificate-file a")) == ("dflash-certificate.json", REPORT)
    words = page.locator("#df-certificate").inner_text()
    assert f"Verdict: {REPORT['statement']}" in words and "toy pair" in words
    assert page.locator("#df-certificate-runs tbody").inner_text().split() == "1 greedy 8 56 7.86 identical".split()
