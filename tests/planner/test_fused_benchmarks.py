"""Random checkpoints of true shapes and the benchmark that loads one, in toy widths on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="holds the planner to the engine, and torch is not installed here")

from benchmarks import adapted_pair, loaded_pair, peers, random_checkpoint  # noqa: E402
from benchmarks.random_checkpoint import LAYOUTS, OUTLIER  # noqa: E402
from dflash_local.errors import MissingDependencyError  # noqa: E402
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
        assert any("mask_token_id" in key for key in built.assumed.get("drafter", ())) == ("lama" in name)
    facts = check_pair(Checkpoint.open(folder / "target"), Checkpoint.open(folder / "drafter"))
    assert facts.target.model.num_layers == (2 if folder is tmp_path else 4)
    assert facts.drafter.taps and max(facts.drafter.taps) < facts.target.model.num_layers - 1


@pytest.mark.parametrize(
    ("model", "stored", "name"),
    [
        ("qwen3.5-9b", "q4_1", "Q4_1 and Q8_0"),
        pytest.param("qwen3.5-9b", "autoround-g128", "int4 g128", marks=pytest.mark.slow),
        pytest.param("Qwen3-Coder-30B-A3B", "q4_1", "Q4_1 and Q8_0", marks=pytest.mark.slow),
    ],
)
def test_a_pair_is_written_in_a_layout_loaded_filled_and_timed(
    model: str,
    stored: str,
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loaded_pair, "TOKENS", 15)
    out = tmp_path / "load.json"
    shape = ["--stored", stored, "--tiny", "--layers", "4", "--device", "cpu", "--runs", "1"]
    more = ["--context", "256", "--timing", "64", "--cap", "1", "--at", str(tmp_path), "--out", str(out)]
    fill = ["--fill"] if model == "qwen3.5-9b" else []
    assert loaded_pair.main([model, *shape, *more, *fill]) == 0
    found = json.loads(out.read_text())
    assert found["stored"] == name and found["timing"]["step"]["ms"] > 0
    assert found["planned"]["engine"] == "fused" and 0 < found["rounds"][0]["placed_s"] <= found["rounds"][0]["ready_s"]
    written = {name: each["emitted"] for name, each in found["replies"].items()}
    assert written == (dict.fromkeys(loaded_pair.SAMPLINGS, loaded_pair.TOKENS) if fill else {})
    said = capsys.readouterr().out
    assert "the planner, before: fits" in said and "ready after" in said
    assert [each.name for each in tmp_path.iterdir()] == ["load.json"]


@pytest.mark.slow  # half a minute of learning, by the clock
def test_a_drafter_of_true_shape_learns_beside_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "adapted.json"
    shape = "--stored int4-g128 --tiny --layers 4 --device cpu --minutes 0.5 --timing 64 --at"
    assert adapted_pair.main(["qwen3.5-9b", *shape.split(), str(tmp_path), "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["steps"] > 2 and found["planned"]["learning"] > 0 and len(found["timings"]) == 2
    assert "ms before" in capsys.readouterr().out and [each.name for each in tmp_path.iterdir()] == ["adapted.json"]


class Slow:
    """A program that takes ever as long."""

    def __init__(self, slow: dict[str, float]) -> None:
        self._slow = slow
        self.about: dict[str, Any] = {"version": "1.2", "drafts": 15, "tried": {15: {"cycle_ms": 4e6, "accepted": 3.0}}}

    def figures(self) -> dict[str, float]:
        return self._slow


def test_peers_stand_beside_our_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are not there say why; our own rows are drafted as planted, from the very files that a peer reads."""
    seen: list[peers.Files] = []

    def there(files: peers.Files, work: peers.Work, _stack: Any) -> Slow:
        seen.append(files)
        assert files.gguf.is_file() and files.gguf_drafter.is_file() and work.rows == (1, 16)
        return Slow({"drafted token": work.token_ms(4e6, 15)})

    def missing(_files: peers.Files, _work: peers.Work, _stack: Any) -> Slow:
        raise MissingDependencyError("not installed")

    monkeypatch.setattr(peers, "OWN", peers.OWN[-1:])
    out = tmp_path / "peers.json"
    shape = "--tiny --layers 2 --device cpu --gguf q4_1 --at"
    work = "--runs 2 --tokens 8 --prompt 16 --long 24 --rows 1 16 17 --drafts 2 15 16 --rate 1"
    words = ["qwen3-8b", *shape.split(), str(tmp_path), *work.split(), "--out", str(out)]
    assert peers.main(words, {"slow": there, "gone": missing}) == 0
    found = json.loads(out.read_text())
    assert found["absent"] == {"gone": "not installed"} and not seen[0].gguf.exists()
    own, other = found["rows"].values()
    assert len(own["runs"]) == 2 and "verify, 16 rows" in own["median"]
    cycles = {drafts: 8 / (own["about"]["tried"][str(drafts)]["accepted"] + 1) for drafts in (2, 15)}
    assert cycles == {2: 3, 15: 1} and other["median"]["drafted token"] == 4e6 / 16
    said = capsys.readouterr().out
    assert "slow 1.2" in said and "15 drafts 4000000.000 ms, 3.00 accepted, the best" in said
    assert "gone: not installed" in said
    assert [peers.ratio(theirs, 1.0) for theirs in (1.05, 0.95, 1.2, 0.5)] == ["level", "level", "1.20", "0.50"]


def test_a_large_checkpoint_is_cut_into_files(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_checkpoint, "SHARD_BYTES", 400_000)
    random_checkpoint.build("Qwen/Qwen3.5-9B", tmp_path, layers=4, tiny=True, device="cpu")
    assert len(list((tmp_path / "target").glob("model-*.safetensors"))) > 2
    cut, whole = (Checkpoint.open(folder / "target") for folder in (tmp_path, toy))
    assert cut.tensors.keys() == whole.tensors.keys()
    assert any(name.startswith("model.visual.") for name in cut.tensors)


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
        ("gpt-oss-20b", None, Fp4Weight),
        ("qwen3.5-35b-a3b", "int4-g128", IntWeight),
        pytest.param("qwen3-coder-30b-a3b", "fp8", Fp8Weight, marks=pytest.mark.slow),
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
