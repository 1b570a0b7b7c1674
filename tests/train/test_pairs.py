"""The shipped pairs are ordinary, small, and say that they are toys; the recipe runs end to end."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.pair import check_pair
from tools.train import demo
from tools.train.shapes import BLOCK, LAYERS, MASK_ID, PAIRS, TAPS, Schedule

DEMO = demo.PACKAGE / "demo"


@pytest.mark.parametrize("name", list(PAIRS))
def test_pair_fits_in_eight_megabytes_of_bfloat16(name: str) -> None:
    assert sum(file.stat().st_size for file in (DEMO / name).rglob("*") if file.is_file()) <= 8_000_000
    for part in ("target", "drafter"):
        with safe_open(DEMO / name / part / "model.safetensors", "pt") as weights:
            assert {weights.get_slice(key).get_dtype() for key in weights.keys()} == {"BF16"}  # noqa: SIM118
            assert all(torch.isfinite(weights.get_tensor(key)).all() for key in weights.keys())  # noqa: SIM118
        assert json.loads((DEMO / name / part / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", list(PAIRS))
def test_pair_keeps_the_contract(name: str) -> None:
    facts = check_pair(Checkpoint.open(DEMO / name / "target"), Checkpoint.open(DEMO / name / "drafter"))
    assert (facts.drafter.block_size, facts.drafter.mask_token_id, facts.drafter.taps) == (BLOCK, MASK_ID, TAPS)
    assert (
        max(facts.drafter.taps) < LAYERS - 1 and facts.drafter.head_dim == 64 and facts.target.model.tie_word_embeddings
    )
    config = json.loads((DEMO / name / "drafter" / "config.json").read_text())
    assert config == PAIRS[name].drafter and config["architectures"] == ["DFlashDraftModel"]
    assert ("block_size" in config["dflash_config"]) == (name == "demo-hybrid")
    assert facts.drafter.windows == ((64, None) if name == "demo-hybrid" else (None, None))


@pytest.mark.parametrize("name", list(PAIRS))
def test_training_facts_call_it_a_toy_and_meet_the_bars(name: str) -> None:
    facts = json.loads((DEMO / name / "training.json").read_text())
    assert "toy" in facts["what"].lower() and "never a speed claim" in facts["what"]
    assert facts["held_out"]["right"] >= 0.9 and facts["held_out"]["acceptance"] >= 4.5
    assert facts["target_steps"] == PAIRS[name].target_schedule.steps
    assert facts["drafter_steps"] == PAIRS[name].drafter_schedule.steps
    assert "toys" in (DEMO / "README.md").read_text()


def test_recipe_runs_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = Schedule(2, 256, 1e-3)
    tiny = {
        name: dataclasses.replace(shape, target_schedule=short, drafter_schedule=short) for name, shape in PAIRS.items()
    }
    monkeypatch.setattr(demo, "PAIRS", tiny)
    monkeypatch.setattr(demo, "LIMIT", 4)
    demo.main(["--out", str(tmp_path), "--device", "cpu", "--conversations", "40", "--per-kind", "1"])
    said = capsys.readouterr().err
    assert "target step 2/2" in said and "acceptance about" in said
    for name in PAIRS:
        facts = check_pair(Checkpoint.open(tmp_path / name / "target"), Checkpoint.open(tmp_path / name / "drafter"))
        assert facts.target.model.vocab_size == MASK_ID + 1
        assert {file.name for file in (tmp_path / name / "target").iterdir()} == {
            file.name for file in (DEMO / name / "target").iterdir()
        }
        assert json.loads((tmp_path / name / "training.json").read_text())["device"] == "cpu"
    assert (tmp_path / "heldout.json").read_text() == (DEMO / "heldout.json").read_text()
