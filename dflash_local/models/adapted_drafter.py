"""A drafter's checkpoint with what it has learnt (``dflash adapt``) in the place of what was published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dflash_local.checkpoint_files.safetensors_folder import name_list
from dflash_local.checkpoint_files.safetensors_header import read_header
from dflash_local.checkpoint_files.tensor_info import TensorInfo
from dflash_local.errors import CheckpointError
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.stored_tensor import StoredTensors
from dflash_local.store.adaptations import DOWN, UP


def adapted(drafter: Checkpoint, file: Path) -> Checkpoint:
    """Merge a file of ``store.adaptations``: whole tensors as the checkpoint has them, and pairs of a low rank.

    Raises:
        CheckpointError: the file is damaged, or has a tensor that the drafter does not have so.
    """
    found = read_header(file)
    whole = {name: info for name, info in found.items() if not name.endswith((DOWN, UP))}
    names = {name.removesuffix(DOWN) for name in found if name.endswith(DOWN)}
    wrong = [name for name, info in whole.items() if not _alike(drafter.tensors.get(name), info)]
    wrong += [name for name in names if name not in drafter.tensors or f"{name}{UP}" not in found]
    if wrong:
        what = f"{file} was made for another drafter: {name_list(wrong)}"
        raise CheckpointError(what, "leave it out with --no-adaptation, or run dflash adapt again")
    stored = StoredTensors.open(file)
    added = {name: (stored.read(found[f"{name}{DOWN}"]), stored.read(found[f"{name}{UP}"])) for name in sorted(names)}
    return replace(drafter, tensors={**drafter.tensors, **whole}, added=added)


def _alike(published: TensorInfo | None, learnt: TensorInfo) -> bool:
    return published is not None and published.shape == learnt.shape
