"""How a pair is run, as far as the sizes of buffers depend on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from dflash_local.load_config import DrafterPrecision, Offloaded

KV_DTYPES = {"fp8": "float8_e4m3fn"}  # what ``kv_cache`` names; other words are the dtype of the weights
EXACT_ROWS = 16  # of every forward in exact mode, at least: of one row as of a block


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Sizes that both models share.

    Attributes:
        dtype: of weights and activations. kv_dtype: of both models' caches. context: tokens the session may hold.
        block_size: the trained one, 1 without a drafter. num_taps: tapped layers.
        precision: of the drafter, see ``DrafterPrecision``. offloaded: what lies in host memory.
    """

    dtype: str
    context: int
    block_size: int = 1
    num_taps: int = 0
    kv_dtype: str = ""
    exact: bool = False
    precision: DrafterPrecision = field(default_factory=DrafterPrecision)
    offloaded: tuple[Offloaded, ...] = ()

    @property
    def cache_dtype(self) -> str:
        """Of keys and values: ``kv_dtype``, or the weights' own."""
        return self.kv_dtype or self.dtype

    @property
    def rows(self) -> int:
        """Rows of the target's block buffers."""
        return max(self.block_size, EXACT_ROWS) if self.exact else self.block_size

    @property
    def capacity(self) -> int:
        """Rows of the target's caches: cycles that are launched too early write behind the context."""
        return self.context + 2 * self.rows

    @property
    def drafter_capacity(self) -> int:
        """Rows of the drafter's caches: its block stands behind the target's."""
        return self.capacity + self.block_size
