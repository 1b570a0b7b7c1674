"""Plans beside what two cards measured: the records, their tables in the docs, and the bar."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from benchmarks.predicted_speed import FORMATS, KINDS, errors, measured, predicted_today, table  # noqa: E402
from benchmarks.speed_table import stored_as  # noqa: E402
from dflash_local.bench.random_pair import RandomPair, of_row  # noqa: E402
from dflash_local.catalog import registry  # noqa: E402
from dflash_local.config.quantization import GGUF_TYPES  # noqa: E402
from dflash_local.drafters.dflash.layout import DFlashConfig
from dflash_local.load_config import LoadConfig  # noqa: E402
from dflash_local.planner.load import Load  # noqa: E402
from dflash_local.planner.machine import Machine  # noqa: E402
from dflash_local.planner.speed import LIKE, predict_load, tables  # noqa: E402
from tests.drafter_configs import published_drafter, published_target  # noqa: E402

ROOT = Path(__file__).parents[2]
TIME, MEMORY = 0.12, 0.03  # of what was measured


def record(card: str) -> dict[str, Any]:
    text = (ROOT / f"benchmarks/results/{card}_predicted_speed.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    assert [(entry["pair"], entry["format"]) for entry in found["entries"]] == [
        (name, form) for name in KINDS for form in FORMATS
    ]
    return found


def assert_near(entries: list[dict[str, Any]]) -> None:
    for entry in entries:
        off = errors(entry)
        assert abs(off.pop("memory")) <= MEMORY and max(map(abs, off.values())) <= TIME, entry["pair"]


def docs() -> str:
    return (ROOT / "docs/figures.md").read_text(encoding="utf-8")


def test_what_was_predicted_of_an_h100_came_true() -> None:
    """By its own probe, on a card that had been idle; and the docs show it."""
    entries = record("h100")["entries"]
    assert_near(entries)
    assert "\n".join(table(entries)) in docs()


@pytest.mark.parametrize("card", ["h100", "h200"])
def test_what_is_predicted_today_holds(card: str) -> None:
    """By the recorded probe of such a card: a table or a plan that drifts from the card is found out."""
    assert_near(predicted_today(record(card)))


def test_a_report_of_dflash_bench_becomes_an_entry() -> None:
    text = (ROOT / "benchmarks/results/h200_bench_qwen35_9b_int4_g128.json").read_text(encoding="utf-8")
    entry = measured(json.loads(text))
    assert (entry["pair"], entry["format"]) == ("qwen3.5-9b", "int4")
    assert 0 < entry["measured"]["at"]["1024"]["step_ms"] < entry["measured"]["at"]["1024"]["cycle_ms"]
    with pytest.raises(SystemExit, match="is not compared here"):
        measured({**json.loads(text), "stored": "NVFP4"})


def dflash2_pairs() -> dict[str, RandomPair]:
    """A pair with a DFlash 2 drafter, by what was measured: whole, without its parts, with a published one in codes,
    and the DFlash pair of the same shape.
    """
    rows = registry.load()
    second, first = (of_row(row) for name in ("qwen3.8-27b", "qwen3.6-27b") if (row := rows.find(name)) is not None)
    parts = {part.name: getattr(second.config, part.name) for part in fields(DFlashConfig)}
    plain = DFlashConfig(**parts)
    coded = "syvai/Qwen3.8-27B-DFlash2-W4A16"
    return {
        "qwen3.8-27b, DFlash 2": second,
        "qwen3.8-27b, without its parts": replace(second, config=plain),
        "qwen3.8-27b, W4A16": replace(second, config=published_drafter(coded)),
        "qwen3.6-27b, DFlash": first,
    }


def test_a_dflash2_drafter_is_predicted_as_well() -> None:
    """Cycles with and without its convolutions and selector, by the table of today; and the docs show them."""
    found = json.loads((ROOT / "benchmarks/results/h200_dflash2_cycle.json").read_text(encoding="utf-8"))
    known, shown = dflash2_pairs(), docs()
    for entry in found["entries"]:
        pair, at = known[entry["pair"]], entry["measured"]
        load = Load.of("cuda", LoadConfig(drafter_precision="8bit"), found["context"], pair.config.block_size)
        model = stored_as(pair.model, FORMATS[entry["format"]])
        predicted = predict_load(Machine("NVIDIA H200", "cuda", 0, 0, ""), model, pair.config, load)
        cycle = at["cycle_ms"][str(pair.config.block_size)]
        assert predicted is not None and predicted.times[0].cycle_ms == pytest.approx(cycle, rel=TIME)
        assert predicted.times[0].step_ms == pytest.approx(at["step_ms"], rel=TIME)
        times = " | ".join(f"{ms:.3f}" for ms in (at["step_ms"], at["draft_ms"], at["cycle_ms"]["8"], cycle))
        assert f"| {entry['pair']} | {entry['format']} | {at['block']} | {times} |" in shown


@pytest.mark.parametrize("card", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
def test_a_gguf_target_is_predicted_by_the_nearest_format_that_was_measured(card: str) -> None:
    """A step takes as long as its bytes: between those of int4 and of int8."""
    model = published_target("Qwen/Qwen3-8B")
    load, machine = Load.of("cuda", LoadConfig(), 1024, 1), Machine(card, "cuda", 0, 0, "")
    steps = {}
    for stored in ("int4-g128", "q4_k_m", "q4_1", "int8-g128"):
        predicted = predict_load(machine, stored_as(model, stored), None, load)
        assert predicted is not None, stored
        steps[stored] = predicted.times[0].step_ms
    assert steps["int4-g128"] * 0.95 < steps["q4_k_m"] < steps["int8-g128"]
    assert steps["int4-g128"] * 0.95 < steps["q4_1"] < steps["int8-g128"]
    every = {launch for table in tables() for kind in (table.products, table.experts) for launch in kind}
    assert set(GGUF_TYPES) <= LIKE.keys() | every and set(LIKE.values()) <= every
