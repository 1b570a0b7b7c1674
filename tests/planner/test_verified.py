"""How often a format has run on a card, and where nothing is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_local.catalog.shapes import shape
from dflash_local.config.read_model import read_model
from dflash_local.planner.machine import Machine, named
from dflash_local.planner.plan import Plan, plan
from dflash_local.planner.verified import reports_of, standing


def planned(where: Machine) -> Plan:
    kept = shape("Qwen/Qwen3.5-9B")
    assert kept is not None
    return plan(read_model(kept, "a target"), None, where)


def test_another_card_format_or_engine_was_never_run() -> None:
    found = planned(named("H200", None))
    assert standing(planned(named("RTX 4090", None))) == "never run on this card"
    assert standing(replace(found, dtype="float32")) == standing(replace(found, stored="int4 g64")) != standing(found)
    assert reports_of(replace(found, engine="other")) == 0


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_without_a_named_card_nothing_is_said(kind: str) -> None:
    where = Machine("CPU", kind, 2**37, 2**37, "", kind)  # type: ignore[arg-type]
    assert standing(planned(where)) == "" and reports_of(planned(where)) is None
