"""Describe what a block of drafts sees in the reference engine: the context's keys and values, and masks over them."""

from __future__ import annotations

from copy import copy

import torch


class BlockMasks:
    """Masks of one drafter, right-aligned: the last columns are the block, before them the context.

    Visibility depends only on the distance from key to block, so one mask per (window, causal, rows)
    serves every context length by taking its last columns.

    Args:
        group: query heads per key head; each of a block's rows is repeated so often.
    """

    def __init__(self, group: int, device: torch.device, dtype: torch.dtype) -> None:
        self._group = group
        self._device = device
        self._dtype = dtype
        self._masks: dict[tuple[int | None, bool, int], torch.Tensor] = {}

    def visible(
        self, window: int | None, causal: bool, context: int, rows: int, draft_window: int | None
    ) -> tuple[int, torch.Tensor | None]:
        """Return the first key any row sees, and an additive mask over the keys from there on.

        Args:
            window: keys a row sees including its own, None for all.
            context: committed rows n; the block stands at positions n .. n+rows-1.
            draft_window: only so many last context rows exist at all.

        Returns:
            first key index, and [rows x group, n + rows - first] with row-major rows, or None when
            every row sees every key from ``first`` on.
        """
        first = 0 if window is None else max(0, context - window + 1)
        if draft_window is not None:
            first = max(first, context - draft_window)
        keys = context + rows - first
        if not causal and (window is None or keys <= window):
            return first, None
        mask = self._masks.get((window, causal, rows))
        if mask is None or mask.shape[1] < keys:
            mask = self._masks[window, causal, rows] = self._make(window, causal, rows, keys)
        return first, mask[:, mask.shape[1] - keys :]

    def _make(self, window: int | None, causal: bool, rows: int, keys: int) -> torch.Tensor:
        width = max(256, 2 * keys) if window is None else max(window - 1 + rows, keys)
        query = torch.arange(rows, device=self._device).unsqueeze(1)
        key = torch.arange(rows - width, rows, device=self._device).unsqueeze(0)
        hidden = torch.zeros(rows, width, dtype=torch.bool, device=self._device)
        if window is not None:
            hidden |= (query - key).abs() >= window
        if causal:
            hidden |= key > query
        mask = torch.zeros(rows, width, dtype=self._dtype, device=self._device).masked_fill_(hidden, float("-inf"))
        return mask.repeat_interleave(self._group, dim=0)


class ContextCache:
    """Keys and values of positions ``0 .. length-1`` of all layers, grown by doubling.

    Row index = absolute position. Rows at ``length`` and beyond are scratch: they are never read before they are
    written, so a truncation is a number and nothing else.

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

    def copy(self) -> ContextCache:
        """Return another cache with the committed rows."""
        other = copy(self)
        other.keys, other.values = (part[:, :, : max(self.length, 1)].clone() for part in (self.keys, self.values))
        return other

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} rows to {length}")
        self.length = length
