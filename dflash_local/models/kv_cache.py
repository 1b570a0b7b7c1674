"""The target's keys and values: static rows per layer, rolled back by a length, for sliding layers too.

Has the one method that transformers' attention layers call, ``update``.
"""

from __future__ import annotations

from typing import Any

import torch


class KVCache:
    """Keys and values of every attention layer at absolute positions. A forward over M tokens writes rows ``length ..
    length+M-1``; they stay uncommitted until ``length`` moves, and the next forward writes over them.
    """

    def __init__(self, capacity: int = 256) -> None:
        self.length = 0
        self.capacity = capacity
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` rows in all; grows by doubling so that copies stay rare."""
        if rows <= self.capacity:
            return
        while self.capacity < rows:
            self.capacity *= 2
        for layer, (keys, values) in self._rows.items():
            self._rows[layer] = (self._grown(keys), self._grown(values))

    def _grown(self, rows: torch.Tensor) -> torch.Tensor:
        larger = rows.new_empty(*rows.shape[:2], self.capacity, rows.shape[3])
        larger[:, :, : rows.shape[2]] = rows
        return larger

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new rows [1, kv_heads, M, head_dim], perhaps of two head_dims; views of all it may see."""
        end = self.length + keys.shape[2]
        if layer not in self._rows:
            self.reserve(end)
            self._rows[layer] = tuple(  # type: ignore[assignment]
                x.new_empty(1, x.shape[1], self.capacity, x.shape[3]) for x in (keys, values)
            )
        elif end > self.capacity:
            self.reserve(end)
        stored_keys, stored_values = self._rows[layer]
        stored_keys[:, :, self.length : end] = keys
        stored_values[:, :, self.length : end] = values
        return stored_keys[:, :, :end], stored_values[:, :, :end]

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Committed keys and values of a layer, for tests and checksums."""
        keys, values = self._rows[layer]
        return keys[:, :, : self.length], values[:, :, : self.length]

    def clear(self) -> None:
        """Forget every row; the memory is kept."""
        self.length = 0
