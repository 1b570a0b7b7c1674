"""The Markdown beside the published row: which cells, what differs, nothing that a source does not name."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the head of every report is made where certificates are, which need torch")

from dflash_local.bench.tasks import card_table, figures, report  # noqa: E402
from dflash_local.bench.tasks.results import Drafted, PromptResult, ResultsFile, TaskReply  # noqa: E402
from dflash_local.bench.tasks.table import TASKS, Item, Subject, TaskOptions  # noqa: E402
from dflash_local.catalog.bundled import FOLDER, Pair  # noqa: E402
from dflash_local.catalog.registry import load  # noqa: E402

OPTIONS = TaskOptions(4096)
PLAIN = TaskReply(5, 0, 11, "stop", 0.1, 1.1, 10.0, None, "4")
DRAFTED = TaskReply(5, 0, 11, "stop", 0.2, 0.45, 40.0, Drafted(2, 14, 4), "4")


def side(folder: Path, title: str, reply: TaskReply, block: int = 0) -> report.Side:
    file = ResultsFile(folder, title, {})
    file.add(PromptResult("1", 1, 1.0, (reply,)))
    file.add(PromptResult("2", 1, 1.0, error="ContextError: a | b"))
    return report.Side(title, file, figures.of_file(file, ["1", "2"], alone=True), block)


def measured(folder: Path, name: str, block: int) -> report.MeasuredTask:
    row = load().find("Qwen/Qwen3.5-9B")
    assert row is not None
    subject = Subject(name, TASKS[name].title, (Item("1", ("a",)), Item("2", ("b",))), {}, "test.jsonl of owner/data")
    cells = card_table.cells(row.published, name, (block,))
    sides = side(folder, "DFlash", DRAFTED, block), side(folder, "plain", PLAIN)
    return report.MeasuredTask(subject, 1, *sides, cells)


def presented(folder: Path, name: str, options: TaskOptions = OPTIONS, block: int = 16) -> report.Found:
    pair = Pair("Qwen/Qwen3.5-9B", FOLDER.parent, None, bundled=False)
    return report.presented({}, "", pair, [measured(folder, name, block)], options)


def test_the_card_s_row_stands_below_ours_with_source_and_differences(tmp_path: Path) -> None:
    _, shown = presented(tmp_path, "gsm8k")
    table = [line for line in shown if line.startswith("| GSM8K")]
    assert table[0] == "| GSM8K | here | 1 | 16 | 10.0 | 24.4 | 2.4x | 3.00 | 3.00 | 1 of 1 |"
    assert table[1] == "| GSM8K | published [1] | 1 | 16 | 198 | 697 | 3.5x | 6.71 | - | - |"
    (source,) = (line for line in shown if line.startswith("[1]"))
    assert "model card of z-lab/Qwen3.5-9B-DFlash" in source and "B200" in source
    assert "thinking on there, off here" in source and "temperature not known there, 0 here" in source
    assert "prompts not known there, the first 1 here" in source and "block" not in source.partition("Differs")[2]
    assert "  - 1 at a time, plain: failed: ContextError: a | b" in shown


def test_another_block_is_shown_with_those_published(tmp_path: Path) -> None:
    _, shown = presented(tmp_path, "mt-bench", TaskOptions(2048, True), block=4)
    assert [line.split(" | ")[3] for line in shown if "published [1]" in line] == ["8", "16"]
    (source,) = (line for line in shown if line.startswith("[1]"))
    assert "block 8 there, 4 here; " in source and "block 16 there, 4 here" in source
    assert "thinking" not in source.partition("Differs")[2] and "at most 2048 tokens a reply here" in source


def test_the_report_holds_the_cells_and_every_prompt(tmp_path: Path) -> None:
    content, _ = presented(tmp_path, "humaneval")
    (task,) = content["tasks"]
    assert task["published"][0]["acceptance_length"] == 7.93 and task["published"][0]["differences"]
    assert [row["error"] for row in task["dflash"]["rows"]] == [None, "ContextError: a | b"]
    assert task["dflash"]["accepted"]["mean"] == 3.0
