"""A published drafter as a module that can be trained, and what it has learnt as tensors of ``store.adaptations``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import nn

from dflash_local.adapt.low_rank import learn_pairs
from dflash_local.drafters.dflash.layout import DFlashConfig
from dflash_local.drafters.dflash.training import DraftModule
from dflash_local.drafters.engines import module_of
from dflash_local.drafters.kinds import read_drafter
from dflash_local.errors import PairError
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.drafter_codes import decode_codes
from dflash_local.models.drafter_tensors import FC, WEIGHT, check_tensors, coded_matrices, target_hidden_of
from dflash_local.store.adaptations import DOWN, MOST_BYTES, UP

LARGEST = 127  # of a signed byte
SCALE = "_scale"  # of a matrix in codes of eight bits, a row each


def new_module(files: Checkpoint) -> DraftModule:
    """Return a drafter of this shape, nothing of which is read yet.

    Raises:
        PairError: such a drafter is not trained. CheckpointError: it is damaged.
    """
    config = trainable(files)
    hidden = target_hidden_of(files, config)
    check_tensors(files, config, hidden)
    return module_of(config)(config, hidden)


def read_module(files: Checkpoint) -> DraftModule:
    """Read a drafter, in float32 on the CPU. Raises as ``new_module``."""
    module = new_module(files)
    _read(files, module.config, module.state_dict())
    return module


def read_fc(files: Checkpoint) -> torch.Tensor:
    """Read what makes features of taps, [w, layers x w of the target] in float32 on the CPU. Raises as above."""
    config = trainable(files)
    fc = torch.empty(config.hidden_size, len(config.taps) * target_hidden_of(files, config))
    _read(files, config, {f"{FC}{WEIGHT}": fc})
    return fc


def _read(files: Checkpoint, config: DFlashConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    places = {stored_name(name, files): [tensor] for name, tensor in tensors.items()}
    coded = {module: form for module, form in coded_matrices(files, config).items() if f"{module}{WEIGHT}" in places}
    files.fill({name: at for name, at in places.items() if name.removesuffix(WEIGHT) not in coded})
    decode_codes(files, coded, places, torch.float32)


def trainable(files: Checkpoint) -> DFlashConfig:
    """Return a drafter's configuration. PairError: such a drafter is not trained."""
    config = read_drafter(files.config, files.source.config_file)
    if refusal := config.training_refusal():
        raise PairError(
            f"{files.path}: {refusal}",
            "dflash adapt trains DFlash, DFlash 2 and DSpark drafters without biases whose rope is not scaled",
        )
    return cast(DFlashConfig, config)


def stored_name(name: str, files: Checkpoint) -> str:
    """Return how a checkpoint names a tensor of the module: tables by id may have a bare name."""
    bare = name.removesuffix(WEIGHT)
    return bare if bare in files.tensors else name


class LearningDrafter:
    """A drafter in training.

    Args:
        dtype: in which its target's rows are multiplied: what is not trained of layers is kept so, too.

    Attributes:
        module: whose ``fc`` is left out, as what it makes of taps is kept. whole: all matrices but ``fc`` are trained,
            those of a large drafter by pairs in its last layer and in what chooses its ids alone; norms and other small
            tensors always are.
    """

    def __init__(self, files: Checkpoint, module: DraftModule, dtype: torch.dtype) -> None:
        self.module, self.files = module, files
        self.config, self.coded = self.module.config, coded_matrices(files, self.module.config)
        self.module.fc = cast(nn.Linear, nn.Identity())
        sizes = (p.numel() * (1 if self._is_coded(name) else 2) for name, p in self.module.named_parameters())
        self.whole = sum(sizes) <= MOST_BYTES
        odd = [name for name, form in self.coded.items() if name != FC and not _has_a_byte_each(files, name)]
        if odd and self.whole or self.coded and not self.whole:
            raise PairError(
                f"{files.path}: its matrices are in codes that are not trained ({next(iter(odd or self.coded))})",
                "name the drafter in bfloat16 with --drafter",
            )
        if not self.whole:
            self._freeze(dtype)

    def _is_coded(self, name: str) -> bool:
        return name.removesuffix(WEIGHT) in self.coded

    def _freeze(self, dtype: torch.dtype) -> None:
        """Leave what is no matrix, and pairs."""
        for parameter in self.module.parameters():
            parameter.requires_grad_(parameter.ndim != 2)
        for part in self.module.learning():
            learn_pairs(part)
        for parameter in self.module.layers.parameters():
            if dtype != torch.float32 and not parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)

    def tensors(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Return what a module of this form has learnt, as the checkpoint stores it."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in module.named_parameters():
            learnt = name.endswith((DOWN, UP))
            if not learnt and (".frozen." in name or (not self.whole and parameter.ndim == 2)):
                continue
            value = parameter.detach().cpu()
            if learnt:
                matrix, _, which = name.rpartition(".")
                found[f"{stored_name(f'{matrix}{WEIGHT}', self.files)}.{which}"] = value.contiguous()
            elif self._is_coded(name):
                found[name], found[f"{name}{SCALE}"] = codes_of(value)
            else:
                found[stored_name(name, self.files)] = value.to(torch.bfloat16)
        return found


def codes_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return signed bytes [n, k] and a scale for each row [n, 1] of a matrix."""
    scale = weight.float().abs().amax(1, keepdim=True).clamp_min(1e-8) / LARGEST
    return (weight.float() / scale).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


def _has_a_byte_each(files: Checkpoint, module: str) -> bool:
    """Return whether a matrix is stored as ``codes_of`` makes them."""
    weight, scale = files.tensors.get(f"{module}{WEIGHT}"), files.tensors.get(f"{module}{WEIGHT}{SCALE}")
    if weight is None or scale is None:
        return False
    return weight.dtype == "I8" and scale.shape == (weight.shape[0], 1)
