"""The benchmarks of the fused engine's memory and loading, on a toy checkpoint and a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="holds the planner to the engine, and torch is not installed here")

from benchmarks import fused_memory, load_speed, random_checkpoint  # noqa: E402
from dflash_local.models.checkpoint import Checkpoint  # noqa: E402
from dflash_local.models.pair import check_pair  # noqa: E402


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    random_checkpoint.build("Qwen/Qwen3.5-9B", folder, layers=4, tiny=True, device="cpu")
    return folder


@pytest.mark.parametrize("name", ["Qwen/Qwen3.5-9B", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct"])
def test_a_random_pair_keeps_its_contract(name: str, toy: Path, tmp_path: Path) -> None:
    """Each opens like a downloaded pair, and says what of its shape no source tells."""
    folder = toy if name.endswith("9B") else tmp_path
    if folder is tmp_path:
        built = random_checkpoint.build(name, folder, layers=2, tiny=True, device="cpu")
        assert any("mask_token_id" in key for key in built.assumed) == ("lama" in name)
    facts = check_pair(Checkpoint.open(folder / "target"), Checkpoint.open(folder / "drafter"))
    assert facts.target.model.num_layers == (2 if folder is tmp_path else 4)
    assert facts.drafter.taps and max(facts.drafter.taps) < facts.target.model.num_layers - 1


def test_the_memory_benchmark_fills_the_context(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "memory.json"
    arguments = [str(toy), "--context", "200", "--device", "cpu", "--cap", "1", "--out", str(out)]
    assert fused_memory.main(arguments) == 0
    assert "the planner, before: fits" in capsys.readouterr().out
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["planned"]["engine"] == "fused" and found["measured"]["error"] is None
    for name in fused_memory.SAMPLINGS:
        assert found["measured"][name]["emitted"] == fused_memory.TOKENS
    assert found["predicted_peak"] == found["predicted"]["peak"] > 0


def test_the_loading_benchmark_times_both(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_speed.main([str(toy), "--device", "cpu", "--runs", "1", "--context", "64"]) == 0
    found = load_speed.measure(toy, "cpu", 1, 64)
    assert "plain read" in capsys.readouterr().out
    assert 0 < found["weights_in_place_s"] <= found["ready_s"] and found["ratio"] > 0
