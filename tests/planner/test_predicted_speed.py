"""Plans beside what an H200 measured: the record, its table in the docs, and the bars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from benchmarks import dflash2_cycle  # noqa: E402
from benchmarks.predicted_speed import FORMATS, KINDS, errors, planned, table  # noqa: E402
from dflash_local.load_config import LoadConfig  # noqa: E402
from dflash_local.planner.load import Load  # noqa: E402
from dflash_local.planner.machine import Machine  # noqa: E402
from dflash_local.planner.speed import times_on  # noqa: E402

ROOT = Path(__file__).parents[2]
TIME, MEMORY = 0.15, 0.03  # of what was measured


@pytest.fixture(scope="module")
def entries() -> list[dict[str, Any]]:
    text = (ROOT / "benchmarks/results/h200_predicted_speed.json").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = json.loads(text)["entries"]
    return found


def test_the_docs_show_the_record(entries: list[dict[str, Any]]) -> None:
    assert [(entry["pair"], entry["format"]) for entry in entries] == [
        (name, form) for name in KINDS for form in FORMATS
    ]
    assert "\n".join(table(entries)) in (ROOT / "docs/figures.md").read_text(encoding="utf-8")


def test_what_was_predicted_came_true(entries: list[dict[str, Any]]) -> None:
    for entry in entries:
        off = errors(entry)
        assert off == pytest.approx(entry["errors"])
        assert abs(off.pop("memory")) <= MEMORY and max(map(abs, off.values())) <= TIME, entry["pair"]


def test_a_dflash2_drafter_is_predicted_as_well() -> None:
    """Cycles with and without its convolutions and selector, by the table of today; and the docs show them."""
    text = (ROOT / "benchmarks/results/h200_dflash2_cycle.json").read_text(encoding="utf-8")
    found = json.loads(text)
    assert "\n".join(dflash2_cycle.table(found["entries"])) in (ROOT / "docs/figures.md").read_text(encoding="utf-8")
    known = dflash2_cycle.pairs()
    for entry in found["entries"]:
        pair = dflash2_cycle.stored_as(known[entry["pair"]], dflash2_cycle.FORMATS[entry["format"]])
        load = Load.of("cuda", LoadConfig(drafter_precision="8bit"), found["context"], pair.config.block_size)
        times = times_on("NVIDIA H200", pair.model, pair.config, load)
        cycle = entry["measured"]["cycle_ms"][str(pair.config.block_size)]
        assert times is not None and times.cycle_ms == pytest.approx(cycle, rel=TIME)
        assert times.step_ms == pytest.approx(entry["measured"]["step_ms"], rel=TIME)


def test_what_is_predicted_now_holds_as_well(entries: list[dict[str, Any]]) -> None:
    """Of what is in the tree: a table or a plan that drifts from the card is found out."""
    for entry in entries:
        card = Machine(entry["measured"]["card"], "cuda", 141 * 2**30, 141 * 2**30, "", "cuda")
        off = errors(entry | {"planned": planned(entry["pair"], FORMATS[entry["format"]], card)})
        assert abs(off.pop("memory")) <= MEMORY and max(map(abs, off.values())) <= TIME, entry["pair"]
