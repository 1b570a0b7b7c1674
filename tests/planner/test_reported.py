"""What is said of reports of a plan's card, and where nothing is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_local.catalog.shapes import shape
from dflash_local.config.read_model import read_model
from dflash_local.planner.machine import Machine, named
from dflash_local.planner.plan import Plan, plan
from dflash_local.planner.reported import measured_by_others, reports_of, standing


def planned(where: Machine) -> Plan:
    kept = shape("Qwen/Qwen3.5-9B")
    assert kept is not None
    return plan(read_model(kept, "a target"), None, where)


def test_another_card_format_or_engine_was_never_run() -> None:
    found = planned(named("H200", None))
    assert standing(planned(named("RTX 4090", None))) == "never run on this card"
    assert standing(replace(found, dtype="float32")) == standing(replace(found, stored="int4 g64")) != standing(found)
    assert reports_of(replace(found, engine="other")) == 0 < (reports_of(replace(found, engine="reference")) or 0)


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_without_a_named_card_nothing_is_said(kind: str) -> None:
    where = Machine("CPU", kind, 2**37, 2**37, "", kind)  # type: ignore[arg-type]
    assert standing(planned(where)) == "" and reports_of(planned(where)) is None


def test_a_pair_measured_on_the_card_is_told_with_its_speed() -> None:
    found = planned(named("H200", None))
    assert measured_by_others("Qwen/Qwen3.5-9B", found) == "1 row, 225 tok/s plain (random weights)"
    assert measured_by_others("Qwen/Qwen3.5-9B", planned(named("RTX 4090", None))) == ""
    assert measured_by_others("Qwen/Qwen3-4B", found) == "", "another pair in the same format"
