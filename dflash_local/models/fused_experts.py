"""The experts of a mixture as transformers has them: two tensors a layer, filled from matrices of single experts."""

from __future__ import annotations

import torch

from dflash_local.config.features import ModelConfig, MoEConfig
from dflash_local.config.module_names import EXPERT
from dflash_local.errors import CheckpointError

PARTS = 3  # of an expert


class FusedExperts:
    """``gate_up_proj`` [E, 2 I, H], the gate's rows first, and ``down_proj`` [E, H, I] of each layer that has them."""

    def __init__(self, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._model, self._device, self._dtype = model, device, dtype
        self._tensors: dict[str, torch.Tensor] = {}
        self._filled: dict[str, tuple[int, set[str]]] = {}  # by mixture: how many experts, and matrices that were given

    def place(self, module: str) -> torch.Tensor | None:
        """Where a matrix [rows, columns] of an expert belongs; None for another module.

        Raises:
            CheckpointError: the model has no such expert.
        """
        found = EXPERT.fullmatch(module)
        if found is None:
            return None
        layers = self._model.layers
        mixture = layers[int(found[2])].mlp if int(found[2]) < len(layers) else None
        if not isinstance(mixture, MoEConfig) or int(found[3]) >= mixture.num_experts:
            raise CheckpointError(
                f"{module} is in the files, and config.json describes no such expert",
                "config.json and weights do not belong together: download the target again",
            )
        experts, index, part = found[1], int(found[3]), found[4]
        inner, hidden = mixture.intermediate_size, self._model.hidden_size
        self._filled.setdefault(experts, (mixture.num_experts, set()))[1].add(module)
        if part == "down":
            return self._tensor(f"{experts}.down_proj", mixture.num_experts, hidden, inner)[index]
        both = self._tensor(f"{experts}.gate_up_proj", mixture.num_experts, 2 * inner, hidden)[index]
        return both[:inner] if part == "gate" else both[inner:]

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self._tensors:
            self._tensors[name] = torch.empty(shape, device=self._device, dtype=self._dtype)
        return self._tensors[name]

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them by their names.

        Raises:
            CheckpointError: a matrix of an expert has not been given.
        """
        for experts, (count, filled) in self._filled.items():
            if len(filled) != PARTS * count:
                raise CheckpointError(
                    f"{experts} has {len(filled)} matrices in the files, expected {PARTS} for each of {count} experts",
                    "the checkpoint is incomplete; pull it again",
                )
        return self._tensors
