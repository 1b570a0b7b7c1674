"""The benchmark of true Qwen3.5-9B shape, its tiny form end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import random_pair, random_qwen35_9b
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.pair import check_pair


@pytest.mark.slow  # a script of benchmarks/ from end to end
def test_the_tiny_form_proves_and_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = random_qwen35_9b.main(["--tiny", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")])
    shown = capsys.readouterr().out
    assert code == 0 and "random weights" in shown and "AR step" in shown
    found = json.loads((tmp_path / "out/random_qwen35_9b.json").read_text(encoding="utf-8"))
    verdicts = {(proof["dtype"], proof["drafter"]): proof["verdict"] for proof in found["proofs"]}
    assert verdicts["float32", "planted"] == verdicts["float32", "random"] == "identical"
    assert verdicts["bfloat16", "planted"] != "BUG"
    assert found["logit_std"] == pytest.approx(random_pair.LOGIT_STD, abs=1)
    assert found["times"]["planted_drafter"]["acceptance_length"] > 3
    assert not any((tmp_path / "work").iterdir()), "25 GB are not left behind"


def test_the_checkpoint_has_the_published_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_pair, "SHARD_BYTES", 100_000)
    random_pair.build_target(tmp_path / "target", random_pair.TINY, "cpu")
    random_pair.build_drafter(tmp_path / "drafter", random_pair.TINY_DRAFTER, random_pair.TINY, "cpu")
    target, drafter = Checkpoint.open(tmp_path / "target"), Checkpoint.open(tmp_path / "drafter")
    facts = check_pair(target, drafter)
    assert facts.target.wrapped and facts.target.prefix == "model.language_model."
    assert any(name.startswith("model.visual.") for name in target.tensors)
    assert facts.drafter.block_size == 16 and facts.drafter.causal == (True, False)
    assert len(list((tmp_path / "target").glob("model-*.safetensors"))) > 2


def test_the_true_shape_has_the_published_size() -> None:
    """Parameters of the published checkpoints: 8,953,803,264 of the text model and 1,291,904,512 of the drafter."""
    from dflash_local.config.drafter_config import DrafterConfig

    config = random_pair.drafter_config(random_pair.DRAFTER_9B, random_pair.QWEN35_9B)
    shapes = DrafterConfig.from_json(config, Path("config.json")).tensor_shapes(4096)
    assert len(shapes) == 69 and sum(_size(shape) for shape in shapes.values()) == 1_291_904_512
    names = dict(random_pair.target_shapes(random_pair.target_config(random_pair.QWEN35_9B)))
    text = {name: shape for name, shape in names.items() if "visual" not in name}
    assert sum(_size(shape) for shape in text.values()) == 8_953_803_264


def _size(shape: tuple[int, ...]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count
