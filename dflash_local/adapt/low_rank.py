"""Frozen matrices, and pairs of a low rank that are learnt beside them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

RANK = 16


class LowRank(nn.Module):
    """A frozen matrix and a pair that is added to it, at first nothing."""

    def __init__(self, frozen: nn.Linear | nn.Embedding) -> None:
        super().__init__()
        rows, columns = frozen.weight.shape
        self.frozen = frozen
        self.down = nn.Parameter(torch.randn(RANK, columns) * columns**-0.5)
        self.up = nn.Parameter(torch.zeros(rows, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = (x @ self.down.to(x.dtype).t()) @ self.up.to(x.dtype).t()
        return self.frozen(x) + added


class LowRankTable(LowRank):
    """A matrix with a row for each id."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.frozen(ids) + functional.embedding(ids, self.up) @ self.down  # type: ignore[no-any-return]

    @property
    def weight(self) -> torch.Tensor:
        """Return the matrix with what was learnt."""
        return self.frozen.weight + self.up @ self.down


def learn_pairs(part: nn.Module) -> None:
    """Put pairs in the place of the matrices of a module."""
    for name, matrix in list(part.named_modules()):
        if isinstance(matrix, (nn.Linear, nn.Embedding)):
            above, _, own = name.rpartition(".")
            pair = (LowRankTable if isinstance(matrix, nn.Embedding) else LowRank)(matrix)
            setattr(part.get_submodule(above), own, pair)


def tables_by_id(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters with a row for each id, of which few have a gradient at a time."""
    parts = list(module.modules())
    tables: list[Any] = [part.up for part in parts if isinstance(part, LowRankTable)]
    return tables + [part.weight for part in parts if isinstance(part, nn.Embedding)]
