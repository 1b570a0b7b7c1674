"""The benchmark of steps and cycles on a CPU runs whole on a toy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
from benchmarks import cpu_speed  # noqa: E402


@pytest.mark.slow  # a script of benchmarks/ from end to end
def test_a_toy_is_measured_beside_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_speed, "BYTES", 2**20)
    out = tmp_path / "record.json"
    assert cpu_speed.main(["qwen3-4b", "--tiny", "--layers", "4", "--work", str(tmp_path), "--out", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert set(found["gb_per_s"]) == {"1", "8", "16"} and found["predicted_ms"] is None
    assert 0 < found["measured_ms"]["step"] and 0 < found["measured_ms"]["cycle"]
