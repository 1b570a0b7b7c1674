"""A pair as the fused engine lays it out: rows, capacities, widths. Knows no bytes of a whole.

A property whose number is not known raises ``Unknown``.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_local.load_config import FREQUENT
from dflash_local.planner.formats import DTYPE_BYTES
from dflash_local.planner.load import Load
from dflash_local.planner.parameters import Unknown, known
from dflash_local.planner.shape import GATED_ATTENTION, DrafterShape, Linear, TargetShape

EXACT_ROWS = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """A pair as the fused engine lays it out; every number known."""

    target: TargetShape
    drafter: DrafterShape | None
    load: Load

    @property
    def size(self) -> int:
        """Bytes of an activation."""
        return DTYPE_BYTES[self.load.dtype]

    @property
    def narrow_drafter(self) -> bool:
        """True when the drafter's matrices are in eight bits."""
        return self.load.drafter_precision.weights == "8bit"

    @property
    def narrow_head(self) -> bool:
        """True when a copy of the head in eight bits stands beside the head."""
        return self.drafter is not None and self.load.drafter_precision.head == "8bit"

    @property
    def drafted(self) -> int:
        """Ids that may be drafted."""
        vocab = known(self.target.vocab)
        return min(vocab, FREQUENT) if self.load.drafter_precision.head == "frequent" else vocab

    @property
    def kv_size(self) -> int:
        """Bytes of a number of the caches."""
        return 1 if self.load.kv_cache == "fp8" else self.size

    @property
    def rows(self) -> int:
        """Rows of a block's buffers."""
        block = self.load.block if self.drafter is not None else 1
        return max(block, EXACT_ROWS) if self.load.exact else block

    @property
    def capacity(self) -> int:
        """Rows of the target's cache: cycles that are launched too early write behind the context."""
        return self.load.context + 2 * self.rows

    @property
    def drafter_capacity(self) -> int:
        """Rows of the drafter's cache, its block behind the target's."""
        return self.capacity + self.load.block

    @property
    def gated(self) -> bool:
        """True for a family whose queries come with gates."""
        return self.target.family in GATED_ATTENTION

    @property
    def queries(self) -> int:
        """Width of all query heads."""
        return known(self.target.heads) * known(self.target.head_dim)

    @property
    def columns(self) -> int:
        """Width of attention's fused projection."""
        return self.queries * (2 if self.gated else 1) + 2 * known(self.target.kv_heads) * known(self.target.head_dim)

    @property
    def turned(self) -> int:
        """Dimensions of a head that rotate."""
        return known(self.target.turned)

    @property
    def taps(self) -> int:
        """Tapped layers."""
        return known(self.drafter.taps) if self.drafter is not None else 0

    @property
    def linear(self) -> Linear:
        """The Gated-DeltaNet layers' sizes."""
        if self.target.linear is None:
            raise Unknown
        return self.target.linear
