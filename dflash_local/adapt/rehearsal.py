"""What adapting a drafter takes, in bytes: the trainer itself takes steps with tensors of sizes and no content."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from dflash_local.adapt.drafter_file import LearningDrafter, new_module, trainable
from dflash_local.adapt.kept_texts import TOGETHER, KeptTexts, TargetTables
from dflash_local.adapt.live_memory import LiveMemory
from dflash_local.adapt.trainer import Recipe, Trainer
from dflash_local.adapt.windows import Windows
from dflash_local.config.features import ModelConfig
from dflash_local.models.checkpoint import Checkpoint

STEPS = 2  # in the second one there is all that optimisers keep


class Rehearsed(NamedTuple):
    """Bytes: the most that are held while a drafter learns, of the state that a later run goes on with, and of what is
    learnt.
    """

    peak: int
    state: int
    learnt: int


def rehearse(files: Checkpoint, vocab: int, dtype: str, recipe: Recipe) -> Rehearsed:
    """Return what a drafter takes for a target of this vocabulary that computes in ``dtype``.

    Every operation is one of its own, as on a CPU: what a GPU compiles keeps less for the way back. Raises as
    ``new_module`` and ``LearningDrafter``.
    """
    live = LiveMemory()
    with FakeTensorMode(), live:
        drafter = LearningDrafter(files, new_module(files), getattr(torch, dtype))
        row = torch.empty(1, drafter.config.hidden_size, dtype=getattr(torch, dtype))
        tables = TargetTables(torch.zeros(1, dtype=torch.long), row, row.new_empty(vocab, row.shape[1]))
        trainer = Trainer(KeptTexts(row, tables), drafter.module, recipe)
        for _ in range(STEPS):
            trainer.step(Windows.empty(recipe.windows, recipe.length))
        return Rehearsed(live.peak, _size(trainer.state()), _size(drafter.tensors(trainer.average)))


def beside_target(files: Checkpoint, target: ModelConfig, dtype: str, chunk: int) -> int:
    """Return the bytes that ``keep_texts`` and ``keep_tables`` take of the device of a loaded pair.

    Args:
        chunk: tokens of a prompt that go through the target at once.
    """
    config = trainable(files)
    width, taps = config.hidden_size, len(config.taps) * target.hidden_size
    return getattr(torch, dtype).itemsize * max((taps + chunk) * width, TOGETHER * (width + target.vocab_size))  # type: ignore[no-any-return]


def disk_bytes(files: Checkpoint, vocab: int, dtype: str, tokens: int, rehearsed: Rehearsed) -> int:
    """Return the most bytes that are written for so many tokens: they with features and two ids, rows and head of the
    target, the state and what is learnt with the files in whose place they come.
    """
    row = trainable(files).hidden_size * getattr(torch, dtype).itemsize
    ids = np.dtype(np.int64).itemsize
    return tokens * (row + 2 * ids) + (min(tokens, vocab) + vocab) * row + 2 * (rehearsed.state + rehearsed.learnt)  # type: ignore[no-any-return]


def _size(tensors: Any) -> int:
    return sum(each.nbytes for each in tree_leaves(tensors) if isinstance(each, torch.Tensor))
