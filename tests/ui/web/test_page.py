"""The page as a whole: it loads, alone."""

from __future__ import annotations

from tests.ui.web.conftest import Visitor
from tests.ui.web.stand import site


def test_web_09_the_page_asks_no_other_machine(visitor: Visitor) -> None:
    with site() as here:
        visitor.page.goto(here.url)
        visitor.page.get_by_role("tab", name="About").wait_for()
        visitor.page.wait_for_load_state("networkidle")
    assert visitor.foreign == []
    assert visitor.complaints == []
