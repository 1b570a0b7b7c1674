"""The memory benchmark runs whole on a toy, and judges its own figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks import memory, memory_report  # noqa: E402

RECORD = Path(__file__).resolve().parents[2] / "benchmarks/results/h200_memory_reference.json"


def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


@pytest.mark.slow  # a script of benchmarks/ from end to end
def test_a_toy_run_fills_its_context_with_drafts_to_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert memory.main(["--tiny", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]) == 0
    found = json.loads((tmp_path / "out/memory.json").read_text(encoding="utf-8"))
    assert [(row["shape"], row["mode"]) for row in found["rows"]] == [
        ("tiny Qwen3", "dflash"),
        ("tiny Qwen3", "ar"),
        ("tiny Qwen3.5", "dflash"),
        ("tiny Qwen3.5", "ar"),
    ]
    drafted = [row["measured"]["drafted_cycles"] for row in found["rows"]]
    assert drafted[1] == drafted[3] == 0 and min(drafted[0], drafted[2]) > memory.TOKENS / 2
    assert found["verdict"] == "nothing measured" and "tiny Qwen3.5" in capsys.readouterr().out
    assert not list((tmp_path / "work").iterdir())


def test_the_record_is_within_the_bound_and_says_so() -> None:
    found = record()
    assert "within 5 %" in found["verdict"] and found["verdict"] == memory_report.verdict(found["rows"])
    text = "\n".join(memory_report.lines(found))
    assert "NVIDIA H200" in text and text.count("Qwen3-8B") == 7


def test_a_prediction_too_far_off_is_called_so() -> None:
    rows = record()["rows"]
    rows[0]["predicted"]["running"] = round(rows[0]["predicted"]["running"] * 1.07)
    assert "OUTSIDE 5 %" in memory_report.verdict(rows)
