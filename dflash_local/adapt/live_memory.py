"""The most memory that torch's operations hold at once, on any device: by the storages that they return."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Counts storages that are made inside it. ``peak``: bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        given = {id_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and id_of(leaf) not in given | set(self._sizes):
                storage = leaf.untyped_storage()
                self._sizes[id_of(leaf)] = storage.nbytes()
                weakref.finalize(storage, self._sizes.pop, id_of(leaf))
        self.peak = max(self.peak, sum(self._sizes.values()))
        return out


def id_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
