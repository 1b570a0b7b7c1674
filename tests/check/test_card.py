"""What is said of a card, by figures as they would be measured."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
from dflash_local.check.card import CardFigures, judged  # noqa: E402

GOOD = CardFigures("RTX 4090", 900e9, 1008e9, peak_bytes=10 * 2**30, planned_bytes=10 * 2**30)


def test_half_of_the_read_rate_is_the_border() -> None:
    for rate, state in ((900e9, "ok"), (505e9, "ok"), (500e9, "warning")):
        found = judged(CardFigures("RTX 4090", rate, 1008e9, 2**30, None), paging=False)
        assert found.state == state and f"{rate / 1e9:.0f} of 1008 GB/s" in found.text
    assert "power or clock limit" in found.remedy and "x4" in found.remedy


def test_under_wsl2_paging_is_named_first() -> None:
    slow = CardFigures("RTX 4090", 100e9, 1008e9, 2**30, None)
    causes = [judged(slow, paging).remedy.index("paged") for paging in (True, False)]
    assert causes[0] < causes[1]


def test_more_memory_than_planned_is_told() -> None:
    over = CardFigures("RTX 4090", 900e9, 1008e9, 11 * 2**30, 10 * 2**30)
    assert judged(GOOD, paging=False).state == "ok"
    assert judged(over, paging=False).state == "warning"
    assert "11.00 GiB of 10.00 GiB planned" in judged(over, paging=False).text


def test_what_is_not_known_is_no_fault() -> None:
    for rate, specified in ((None, 1008e9), (900e9, None)):
        assert judged(CardFigures("A card", rate, specified, 2**30, None), paging=True).state == "ok"
