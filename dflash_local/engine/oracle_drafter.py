"""A drafter that knows the text, for certificates: every acceptance length occurs, whatever the real one is worth."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash_local.models.fused.target import FusedTarget

WRONG = (5, 13)


class OracleDrafter:
    """Drafts what stands in a text, and another token wherever a position is a multiple of one of ``WRONG``.

    Its launches can be recorded, so that the text of a whole run is made by replayed cycles with acceptance lengths
    that change all the time.

    Args:
        text: ids of prompt and reply.
    """

    selector = head_ids = None
    chained = False
    caches = ()

    def __init__(self, target: FusedTarget, text: Sequence[int]) -> None:
        self.target, self.length = target, 0
        count = target.rows - 1
        device = target.device
        ids = torch.tensor([*text, *[0] * (2 * target.rows)], dtype=torch.int64, device=device)
        place = torch.arange(len(ids), device=device)
        missed = torch.zeros_like(place, dtype=torch.bool)
        for number in WRONG:
            missed |= place % number == 0
        self._ids = torch.where(missed, (ids + 1) % target.vocab_size, ids)
        self._ahead = torch.arange(1, count + 1, device=device)
        self.drafts = torch.zeros(count, target.vocab_size, device=device)

    def block(self, _max_seq_len: int) -> None:
        """Fill ``drafts`` [rows - 1, V] behind the target's ``start``."""
        place = (self._ahead + self.target.start.long()).clamp(max=len(self._ids) - 1)
        ids = self._ids[place].unsqueeze(1)
        self.drafts.zero_().scatter_(1, ids, 1e6)  # no noise outweighs it

    def reusable(self, length: int) -> int:
        return length

    def snapshot(self) -> None:
        """Return nothing: there is no context."""

    def inject(self, taps: torch.Tensor) -> None:
        """Read no taps."""

    def write_context(self, taps: torch.Tensor, ids: torch.Tensor, start: int) -> None:
        self.length = start + len(taps)
