"""The benchmarks of the fused engine's memory and loading, on a toy checkpoint and a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="holds the planner to the engine, and torch is not installed here")

from benchmarks import fused_memory, load_speed, random_checkpoint  # noqa: E402
from benchmarks.stored_layouts import LAYOUTS, OUTLIER  # noqa: E402
from dflash_local.engine import LoadConfig  # noqa: E402
from dflash_local.kernels.quantized_weight import Fp4Weight, Fp8Weight, IntWeight  # noqa: E402
from dflash_local.models.checkpoint import Checkpoint  # noqa: E402
from dflash_local.models.decoded_tensors import decoded_tensors  # noqa: E402
from dflash_local.models.fused.weights import read_weights  # noqa: E402
from dflash_local.models.pair import check_pair  # noqa: E402
from dflash_local.models.target_facts import TargetFacts  # noqa: E402


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


@pytest.mark.slow  # a script of benchmarks/ from end to end
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
    found = load_speed.measure(toy, LoadConfig(device="cpu", engine="fused", dtype="bfloat16", context=64), 1)
    assert "plain read" in capsys.readouterr().out
    assert 0 < found["weights_in_place_s"] <= found["ready_s"] and found["ratio"] > 0


@pytest.mark.parametrize(
    ("model", "stored", "name"),
    [
        ("qwen3.5-9b", "autoround-g128", "int4 g128"),
        ("qwen3.5-9b", "q4_1", "Q4_1 and Q8_0"),
        ("Qwen3-Coder-30B-A3B", "q4_1", "Q4_1 and Q8_0"),
    ],
)
def test_a_pair_is_written_in_a_layout_loaded_and_timed(
    model: str, stored: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "load.json"
    arguments = [
        model,
        "--stored",
        stored,
        "--tiny",
        "--layers",
        "4",
        "--device",
        "cpu",
        "--runs",
        "1",
    ]
    more = ["--context", "256", "--timing", "64", "--at", str(tmp_path), "--out", str(out)]
    assert load_speed.main([*arguments, *more]) == 0
    found = json.loads(out.read_text())
    assert found["stored"] == name and found["timing"]["step"]["ms"] > 0
    assert "ready after" in capsys.readouterr().out and [each.name for each in tmp_path.iterdir()] == ["load.json"]


@pytest.mark.parametrize("stored", LAYOUTS)
def test_random_checkpoints_are_read_in_every_layout(stored: str, tmp_path: Path) -> None:
    """With outliers, signs and equal tiles, and sums that stay in range."""
    random_checkpoint.build("Qwen/Qwen3.5-9B", tmp_path, layers=8, tiny=True, device="cpu", stored=stored, tiled=True)
    checkpoint = Checkpoint.open(tmp_path / "target")
    facts = TargetFacts.from_checkpoint(checkpoint)
    decoded = decoded_tensors(checkpoint, facts, torch.device("cpu"), torch.float32)
    down = decoded["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(down, decoded["model.layers.4.mlp.down_proj.weight"])
    assert not torch.equal(down, decoded["model.layers.1.mlp.down_proj.weight"])
    up = decoded["model.layers.0.mlp.up_proj.weight"]
    assert 0.4 < up.std() * up.shape[1] ** 0.5 < 2
    if not stored.startswith("fp8"):  # whose one scale is of more than a toy's rows
        assert down[0].std() > OUTLIER / 5 * down[-1].std()
    assert (decoded["model.layers.3.self_attn.k_norm.weight"][:4] > 2).all()


@pytest.mark.parametrize(
    ("name", "stored", "kept"),
    [
        ("qwen3.5-35b-a3b", "int4-g128", IntWeight),
        ("qwen3-coder-30b-a3b", "fp8", Fp8Weight),
        ("gpt-oss-20b", None, Fp4Weight),
    ],
)
def test_random_mixtures_hold_the_experts_in_the_layout(
    name: str, stored: str | None, kept: type, tmp_path: Path
) -> None:
    """One by one, gpt-oss's together; not plain, as transformers has them in memory."""
    random_checkpoint.build(name, tmp_path, layers=2, tiny=True, device="cpu", stored=stored)
    checkpoint = Checkpoint.open(tmp_path / "target")
    facts = TargetFacts.from_checkpoint(checkpoint)
    weights = read_weights(checkpoint, facts, torch.device("cpu"), torch.float32)
    for layer in weights.layers:
        part: Any = layer.mlp
        for expert in part.experts.matrices:
            assert isinstance(expert.weight, kept)
            values = expert.rows(0, slice(0, expert.out_features), torch.float32)
            assert 0.1 < values.std() * values.shape[1] ** 0.5 < 3
