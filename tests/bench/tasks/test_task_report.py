"""The Markdown beside the published row: which cells, what differs, nothing that a source does not name."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the head of every report is made where certificates are, which need torch")

from dflash_local.bench.tasks import card_table, figures, task_report  # noqa: E402
from dflash_local.bench.tasks.results import PromptResult, Turn  # noqa: E402
from dflash_local.bench.tasks.table import TASKS  # noqa: E402
from dflash_local.catalog.bundled import FOLDER, Pair  # noqa: E402
from dflash_local.catalog.registry import load  # noqa: E402
from dflash_local.load_config import LoadConfig  # noqa: E402
from dflash_local.loaded import SessionFacts  # noqa: E402
from dflash_local.store.datasets import DataFile  # noqa: E402
from tests.bench.tasks.test_figures import DRAFTED, PLAIN  # noqa: E402

FACTS = SessionFacts("target", "drafter", 16, True, LoadConfig(engine="fused", dtype="bfloat16", device="cuda"))
SETTINGS = task_report.Settings((16,), 4096, False)
DATA = DataFile("owner/data", "test.jsonl", "a" * 40, "b" * 64, 10, "2026-01-01T00:00:00Z")


def measured(name: str, settings: task_report.Settings) -> task_report.Measured:
    row = load().find("Qwen/Qwen3.5-9B")
    assert row is not None
    results = (PromptResult("1", (Turn(5, True, PLAIN, DRAFTED),)), PromptResult("2", error="ContextError: a | b"))
    cells, block = card_table.cells(row.published, name, settings.block_sizes), settings.block_sizes[0]
    return task_report.Measured(TASKS[name], block, DATA, results, figures.of_results(results), cells, "rows.jsonl")


def lines(name: str, settings: task_report.Settings = SETTINGS) -> list[str]:
    pair = Pair("Qwen/Qwen3.5-9B", FOLDER.parent, None, bundled=False)
    return task_report.task_lines(pair, FACTS, [measured(name, settings)], settings)


def test_the_card_s_row_stands_below_ours_with_source_and_differences() -> None:
    shown = lines("gsm8k")
    table = [line for line in shown if line.startswith("| GSM8K")]
    assert table[0] == "| GSM8K | here | 16 | 10.0 | 24.4 | 2.4x | 3.00 |"
    assert table[1] == "| GSM8K | published [1] | 16 | 198 | 697 | 3.5x | 6.71 |"
    (source,) = (line for line in shown if line.startswith("[1]"))
    assert "model card of z-lab/Qwen3.5-9B-DFlash" in source and "B200" in source
    assert "thinking on there, off here" in source and "temperature not known there, 0 here" in source
    assert "prompts not known there, the first 1 here" in source and "block" not in source.partition("Differs")[2]
    assert "  - failed: ContextError: a | b" in shown
    assert any(DATA.commit in line and DATA.sha256 in line for line in shown)


def test_another_block_is_shown_with_those_published() -> None:
    settings = task_report.Settings((4,), 2048, True)
    shown = lines("mt-bench", settings)
    assert [line.split(" | ")[2] for line in shown if "published [1]" in line] == ["8", "16"]
    (source,) = (line for line in shown if line.startswith("[1]"))
    assert "block 8 there, 4 here; " in source and "block 16 there, 4 here" in source
    assert "thinking" not in source.partition("Differs")[2] and "at most 2048 tokens a reply here" in source


def test_the_report_holds_the_cells_and_every_prompt() -> None:
    pair = Pair("demo", FOLDER / "demo" / "target", None, bundled=False)
    one = measured("humaneval", SETTINGS)
    content = task_report.task_report(pair, FACTS, [one], SETTINGS)
    (task,) = content["tasks"]
    assert task["published"][0]["acceptance_length"] == 7.93 and task["published"][0]["differences"]
    assert [row["error"] for row in task["rows"]] == [None, "ContextError: a | b"]
    assert task["mean_acceptance_length"] == 3.0
