"""What a drafter learns, stored as its checkpoint is: whole, in codes, and as pairs of a low rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dflash_local.adapt import drafter_file
from dflash_local.adapt.drafter_file import LearningDrafter, read_module, trainable
from dflash_local.adapt.low_rank import RANK, LowRank
from dflash_local.catalog import bundled
from dflash_local.drafters.dflash.layout import DFlashConfig
from dflash_local.drafters.kinds import read_drafter
from dflash_local.errors import CheckpointError, PairError
from dflash_local.models.adapted_drafter import adapted
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.drafter_weights import DrafterWeights, read_weights
from dflash_local.models.pair import open_drafter
from tests.engine.named_pairs import GOLDEN

CPU = torch.device("cpu")
TOY, SMALL = (bundled.FOLDER / name / "drafter" for name in ("demo", "smollm2"))


def weights(files: Checkpoint) -> DrafterWeights:
    config = read_drafter(files.config, files.source.config_file)
    assert isinstance(config, DFlashConfig)
    return read_weights(files, config, CPU, torch.float32, print)


def learner(files: Checkpoint) -> LearningDrafter:
    return LearningDrafter(files, read_module(files), torch.float32)


@pytest.mark.parametrize("folder", [TOY, SMALL], ids=["bfloat16", "codes"])
def test_what_has_learnt_nothing_is_what_was_published(folder: Path, tmp_path: Path) -> None:
    published = open_drafter(folder)
    learning = learner(published)
    assert learning.whole
    save_file(learning.tensors(learning.module), tmp_path / "learnt")
    before, after = weights(published), weights(adapted(published, tmp_path / "learnt"))
    for old, new in zip(before.layers, after.layers, strict=True):
        assert torch.equal(old.qkv, new.qkv) and torch.equal(old.down, new.down)
        assert torch.equal(old.input_norm, new.input_norm)


def test_a_large_drafter_learns_pairs_that_are_merged_as_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_file, "MOST_BYTES", 10**6)
    published = open_drafter(TOY)
    learning = learner(published)
    trained = [name for name, parameter in learning.module.named_parameters() if parameter.requires_grad]
    assert not learning.whole and not any(name.startswith("layers.0") and "norm" not in name for name in trained)
    part = learning.module.layers[-1].get_submodule("mlp.down_proj")
    assert isinstance(part, LowRank)
    with torch.no_grad():
        part.up.normal_(std=0.1)
    tensors = learning.tensors(learning.module)
    assert sum(value.numel() for value in tensors.values()) < 10**5
    assert tensors["layers.1.mlp.down_proj.weight.up"].shape == (learning.config.hidden_size, RANK)
    save_file(tensors, tmp_path / "learnt")
    before, after = weights(published), weights(adapted(published, tmp_path / "learnt"))
    assert torch.allclose(after.layers[-1].down - before.layers[-1].down, part.up @ part.down, atol=1e-5)
    assert torch.equal(after.layers[0].down, before.layers[0].down)
    x = torch.randn(3, before.layers[-1].down.shape[1])
    assert torch.allclose(part(x), x @ after.layers[-1].down.t(), atol=1e-4)


def test_of_another_drafter_it_is_refused(tmp_path: Path) -> None:
    learning = learner(open_drafter(TOY))
    save_file(learning.tensors(learning.module), tmp_path / "learnt")
    with pytest.raises(CheckpointError, match="was made for another drafter: hidden_norm.weight, layers.0"):
        adapted(open_drafter(SMALL), tmp_path / "learnt")


def test_kinds_that_are_not_trained_are_named() -> None:
    with pytest.raises(PairError, match="of the kind mtp"):
        learner(open_drafter(bundled.FOLDER / "demo-hybrid" / "target"))


@pytest.mark.parametrize("pair", ["qwen3-v1-b8", "qwen3-dflash2-b8"])
def test_options_that_are_not_trained_are_named(pair: str) -> None:
    config = trainable(open_drafter(GOLDEN / pair / "drafter"))
    assert "biases" in replace(config, attention_bias=True).training_refusal()
    scaled = replace(config, rope=replace(config.rope, kind="yarn"))
    assert "rope is scaled" in scaled.training_refusal()
