"""What adapting takes, as it is said before: against what torch's allocator tells and against the files."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file
from torch.profiler import profile

from dflash_local.adapt import drafter_file
from dflash_local.adapt.dialogues import Dialogues
from dflash_local.adapt.drafter_file import LearningDrafter, read_module
from dflash_local.adapt.kept_texts import KeptTexts, TargetTables, stored
from dflash_local.adapt.rehearsal import rehearse
from dflash_local.adapt.trainer import Recipe, Trainer
from dflash_local.adapt.windows import pack
from dflash_local.drafters.kinds import read_drafter
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.pair import open_drafter
from dflash_local.store.atomic import write_atomic
from tests.dspark_checkpoints import raw
from tests.engine.named_pairs import DSPARK, GOLDEN

DFLASH2 = "qwen3-dflash2-b8"
TARGET_HIDDEN, MANY = 64, 6000
MIDDLE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": MANY,
    "num_hidden_layers": 3,
    "layer_types": ["full_attention"] * 3,
}
RECIPE = Recipe(windows=2, length=192, anchors=16, rounds=1, at_once=1)


def golden(name: str, folder: Path) -> Path:
    return GOLDEN / name / "drafter"


def larger(name: str, folder: Path) -> Path:
    """Write a drafter of random weights that is larger than the tests' others."""
    config = raw() if name == DSPARK else json.loads((golden(name, folder) / "config.json").read_text("utf-8"))
    shapes = read_drafter(config := {**config, **MIDDLE}, folder).tensors(TARGET_HIDDEN)
    folder.mkdir()
    save_file({each: torch.randn(shape) * 0.02 for each, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class MostHeld:
    """The most bytes that torch's allocator held beyond those at first. ``trace``: a file."""

    def __init__(self, trace: Path) -> None:
        self._profile, self._trace, self.bytes = profile(profile_memory=True), trace, 0

    def __enter__(self) -> MostHeld:
        gc.collect()
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        self._profile.export_chrome_trace(str(self._trace))
        events = json.loads(self._trace.read_text("utf-8"))["traceEvents"]
        changes = sorted((float(each["ts"]), each["args"]["Bytes"]) for each in events if each["name"] == "[memory]")
        self.bytes = max(accumulate(size for _, size in changes))


class Learner:
    """A drafter with its trainer, over a target of random tables."""

    def __init__(self, files: Checkpoint, vocab: int, dtype: str) -> None:
        self.drafter = LearningDrafter(files, read_module(files), getattr(torch, dtype))
        row = torch.randn(1, self.drafter.config.hidden_size, dtype=getattr(torch, dtype))
        tables = TargetTables(torch.zeros(1, dtype=torch.long), row, torch.randn(vocab, row.shape[1], dtype=row.dtype))
        self.trainer = Trainer(KeptTexts(row.expand(3000, -1), tables), self.drafter.module, RECIPE)


@pytest.mark.parametrize(
    ("make", "name", "vocab", "dtype", "large"),
    [
        (golden, "qwen3-v1-b8", 96, "float32", False),
        (larger, "qwen3-v1-b8", MANY, "bfloat16", False),
        (larger, "qwen3-v1-b8", MANY, "float32", True),
        *((larger, name, MANY, "float32", large) for name in (DFLASH2, DSPARK) for large in (False, True)),
    ],
)
def test_a_drafter_that_learns_takes_what_was_said(
    make: Callable[[str, Path], Path],
    name: str,
    vocab: int,
    dtype: str,
    large: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By torch's own allocator, which also sees what operations take for themselves."""
    if large:
        monkeypatch.setattr(drafter_file, "MOST_BYTES", 1000)
    files, trace, state = open_drafter(make(name, tmp_path / "drafter")), tmp_path / "trace.json", tmp_path / "state"
    said = rehearse(files, vocab, dtype, RECIPE)
    ids = np.random.default_rng(1).integers(0, 90, 3000)
    batches = pack(Dialogues(ids, ids, np.full(30, 100), np.full(30, 20)), RECIPE.windows, RECIPE.length, 1)
    with MostHeld(trace) as most:
        learner = Learner(files, vocab, dtype)
        for _, windows in islice(batches, 2):
            learner.trainer.step(windows)
    assert said.peak == pytest.approx(most.bytes, rel=0.02)
    assert learner.drafter.whole != large
    write_atomic(state, stored(learner.trainer.state()))
    learnt = save(learner.drafter.tensors(learner.trainer.average))
    names = 400 * len(learner.trainer.state()["muon"]["state"]) * 8  # and what stands around tensors in files
    assert said.state < state.stat().st_size < said.state + names and said.learnt < len(learnt) < said.learnt + names
    del learner
    with MostHeld(trace) as most:
        Learner(files, vocab, dtype).trainer.load(state)
    assert most.bytes < said.peak, "a run that goes on takes no more"
