"""The page as a whole: it loads, alone."""

from __future__ import annotations

from tests.ui.web.conftest import Visitor
from tests.ui.web.stand import site


def test_the_page_asks_no_other_machine(visitor: Visitor) -> None:
    page = visitor.page
    with site() as here:
        page.goto(here.url)
        for tab, part in (
            ("Race", "button"),
            ("Models", "#df-pairs"),
            ("Bench", "#df-prompts"),
            ("About", "#df-about"),
        ):
            page.get_by_role("tab", name=tab).click()
            page.locator(part).locator("visible=true").first.wait_for()
        page.locator("#df-about td").wait_for()
    assert visitor.foreign == []
    assert visitor.complaints == []
