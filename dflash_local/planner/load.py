"""What is to be loaded, as far as its memory depends on it. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

# A session keeps two snapshots of a recurrent state; a third lives while the oldest is being replaced.
SNAPSHOTS = 3


@dataclass(frozen=True, slots=True)
class Load:
    """What is loaded and how full it gets: dtype, weight format, tokens in the context, block size.

    ``device``: cuda, mps or cpu. ``snapshots`` of a recurrent state that are alive at once. ``exact``: the fused
    engine's mode. ``draft_side``: a word of that engine's for the drafter's weights and head; auto may try coarser ones
    where there is room, so it counts as full. ``narrow_kv``: keys and values of both models in eight bits.
    """

    dtype: str
    quantize: str | None
    context: int
    block: int
    device: str = "cuda"
    snapshots: int = SNAPSHOTS
    exact: bool = False
    draft_side: str = "auto"
    narrow_kv: bool = False
