"""Plans beside what an H200 measured: the record, its table in the docs, and the bars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from benchmarks.predicted_speed import FORMATS, KINDS, errors, planned, table  # noqa: E402
from dflash_local.planner.machine import Machine  # noqa: E402

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


def test_what_is_predicted_now_holds_as_well(entries: list[dict[str, Any]]) -> None:
    """Of what is in the tree: a table or a plan that drifts from the card is found out."""
    for entry in entries:
        card = Machine(entry["measured"]["card"], "cuda", 141 * 2**30, 141 * 2**30, "", "cuda")
        off = errors(entry | {"planned": planned(entry["pair"], FORMATS[entry["format"]], card)})
        assert abs(off.pop("memory")) <= MEMORY and max(map(abs, off.values())) <= TIME, entry["pair"]
