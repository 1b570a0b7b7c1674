"""A card's tasks projected onto measured cycles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.projected_tasks import table
from dflash_local.catalog import registry

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def record(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def test_every_published_task_is_its_cycles_times_its_acceptance_length() -> None:
    found = record("h200_bench_qwen35_9b_auto.json")
    row = registry.load().find("qwen3.5-9b")
    assert row is not None
    lines = table(found, row.published)
    cells = [line.strip("| ").split(" | ") for line in lines[2:-2]]
    assert {(cell[0], cell[1]) for cell in cells} == {
        (one.task, str(one.block)) for one in row.published if one.concurrency == 1
    }
    cycle = found["measured"]["at"][0]["cycle"]
    for cell in cells:
        steady = float(cell[2]) * 1000 / cycle[cell[1]]["ms"]
        assert float(cell[7].replace(",", "")) == pytest.approx(steady, rel=1e-3)
    assert lines[-1].startswith("Projection, not a measurement of text")


def test_what_projects_nothing_is_refused() -> None:
    with pytest.raises(SystemExit, match="no record of dflash bench"):
        table(record("h200_certify_fast_qwen35_9b.json"), ())
    with pytest.raises(SystemExit, match="no cycle at a published"):
        table(record("h200_bench_qwen35_9b_auto.json"), ())
