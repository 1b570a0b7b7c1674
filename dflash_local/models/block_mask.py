"""Which keys a block's rows see: windows, causality inside the block, the draft window.

Owns the additive masks, made once per kind; a layer that sees everything gets none.
"""

from __future__ import annotations

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
        """The first key any row sees, and an additive mask over the keys from there on.

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
