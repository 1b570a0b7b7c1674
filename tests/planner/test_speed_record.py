"""What a card measured is kept, and what later predictions on it make of it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from dflash_local.load_config import LoadConfig
from dflash_local.planner.ledger import Ledger, MemoryLine
from dflash_local.planner.machine import Machine
from dflash_local.planner.plan import Plan
from dflash_local.planner.speed import Prediction, Times
from dflash_local.planner.speed_record import KEPT, SpeedMeasurement, SpeedRecord, corrected

CARD = Machine("NVIDIA GeForce RTX 4090", "cuda", 24, 23, "", "cuda:0")
PLAN = Plan(
    True, "local", "fused", "bfloat16", LoadConfig(context=8192), 16, CARD, Ledger((), MemoryLine("loading", 0)), ""
)
PREDICTED = Prediction(
    (Times(1024, 10.0, 16.0, 16, ((4, 10.0), (8, 12.0))), Times(8192, 11.0, 18.0, 16, ((8, 14.0),))), None, "scaled"
)
LOADED = replace(PLAN, load=replace(PLAN.load, drafter_precision="8bit"))
TOOK = Times(1024, 12.0, 24.0, 16, ((4, 11.0),))
MEASURED = SpeedMeasurement.of(CARD.name, "a/b", LOADED.format, LOADED.load, TOOK, PREDICTED)


def test_a_measured_plan_has_its_own_times_and_scaled_ones_at_other_contexts() -> None:
    found = corrected(PREDICTED, PLAN, "a/b", (MEASURED,))
    assert found is not None
    assert found.basis == "measured on this card at 1,024 tokens of context; other contexts scaled by that"
    assert found.times[0] == replace(TOOK, measured=True)
    assert found.times[1].step_ms == pytest.approx(13.2) and found.times[1].cycle_ms == pytest.approx(27.0)
    assert found.times[1].shorter == ((8, 21.0),)
    assert [each["measured"] for each in found.as_dict()["at"]] == [True, False]
    other = corrected(replace(PREDICTED, basis="by a probe taken since"), PLAN, "a/b", (MEASURED,))
    assert other is not None and other.basis.endswith("of context; other contexts predicted")
    assert other.times == (found.times[0], PREDICTED.times[1])


def test_where_every_context_was_measured_none_is_scaled() -> None:
    found = corrected(PREDICTED, PLAN, "a/b", (MEASURED, replace(MEASURED, context=8000)))
    assert found is not None and found.basis == "measured on this card at 1,024, 8,000 tokens of context"


def test_other_plans_are_corrected_by_the_median() -> None:
    measured = tuple(replace(MEASURED, target=f"c/{n}", step_ms=ms) for n, ms in enumerate((9.0, 12.0, 30.0)))
    found = corrected(PREDICTED, PLAN, "a/b", measured)
    assert found is not None and found.basis == "scaled; corrected by 3 measurements on this card"
    assert [one.step_ms for one in found.times] == pytest.approx([12.0, 13.2])
    elsewise = replace(PREDICTED, basis="by a probe taken since")
    assert corrected(elsewise, PLAN, "a/b", measured) is elsewise, "what was predicted otherwise tells nothing of it"
    assert corrected(PREDICTED, PLAN, "a/b", ()) is PREDICTED and corrected(None, PLAN, "a/b", measured) is None


@pytest.mark.parametrize(
    "changes",
    [{"quantize": "int4"}, {"kv_cache": "int8"}, {"drafter_precision": "full"}],
    ids=["format", "caches", "drafter"],
)
def test_another_load_is_another_plan(changes: dict[str, Any]) -> None:
    other = replace(PLAN, load=replace(PLAN.load, **changes))
    assert not MEASURED.is_of(other, "a/b") and MEASURED.is_of(PLAN, "a/b") and not MEASURED.is_of(PLAN, "a/c")


def test_the_newest_measurement_of_a_plan_is_kept(tmp_path: Path) -> None:
    record = SpeedRecord(tmp_path, CARD.name)
    assert record.read() == ()
    record.add([MEASURED, replace(MEASURED, context=8192)])
    record.add([replace(MEASURED, step_ms=13.0)])
    assert [(each.context, each.step_ms) for each in record.read()] == [(8192, 12.0), (1024, 13.0)]
    assert SpeedRecord(tmp_path, "NVIDIA H200").read() == ()
    record.add(replace(MEASURED, context=count) for count in range(1, 2 * KEPT))
    assert len(record.read()) == KEPT
    SpeedRecord(None, CARD.name).add([MEASURED])


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "[1]", '[{"card": "x"}]', json.dumps([dict.fromkeys(asdict(MEASURED), "x")])]
)
def test_a_damaged_record_is_no_record(text: str, tmp_path: Path) -> None:
    record = SpeedRecord(tmp_path, CARD.name)
    assert record.path is not None
    record.path.write_text(text, encoding="utf-8")
    assert record.read() == ()
    record.add([MEASURED])
    assert record.read() == (MEASURED,)
