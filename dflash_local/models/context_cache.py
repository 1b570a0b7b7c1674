"""The drafter's memory of committed tokens: one K and one V row per layer and position.

Row index = absolute position. Rows at ``length`` and beyond are scratch: they are never read before
they are written, so a truncation is a number and nothing else.
"""

from __future__ import annotations

import torch


class ContextCache:
    """Keys and values of positions ``0 .. length-1`` of all layers, grown by doubling.

    Attributes:
        length: committed rows. keys, values: [layers, kv_heads, capacity, head_dim].
        draft_window: attend only to this many last context rows (positions stay absolute); None is all.
    """

    __slots__ = ("draft_window", "keys", "length", "values")

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        capacity: int,
        draft_window: int | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        if draft_window is not None and draft_window < 1:
            raise ValueError(f"draft_window {draft_window} must be at least 1")
        shape = (layers, kv_heads, max(capacity, 1), head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.length = 0
        self.draft_window = draft_window

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` rows in all; committed rows are kept."""
        if rows <= self.capacity:
            return
        capacity = max(2 * self.capacity, rows)
        self.keys = self._grown(self.keys, capacity)
        self.values = self._grown(self.values, capacity)

    def _grown(self, old: torch.Tensor, capacity: int) -> torch.Tensor:
        layers, heads, _, width = old.shape
        new = torch.zeros((layers, heads, capacity, width), device=old.device, dtype=old.dtype)
        new[:, :, : self.length] = old[:, :, : self.length]
        return new

    def truncate(self, length: int) -> None:
        """Forget the rows from ``length`` on; they may be written again."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} rows to {length}")
        self.length = length
