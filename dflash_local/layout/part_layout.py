"""Describe what a kind of layer part (an attention, a feed-forward ...) says of its tensors. A new kind is one class
more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dflash_local.layout.buffer import Buffer, Group
from dflash_local.layout.linear import DECODED_SLICE, FormatOf, LinearSpec, linear_buffers
from dflash_local.load_config import DrafterPrecision, Offloaded


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Hold what the sizes of weights depend on beside their features.

    Attributes:
        dtype: of matrices and activations. norm_plus_one: norms count their weight from zero, and it is float32.
        format_of: the format of each module. host_embedding: an embedding that is not also the head lies in pinned
            host memory.
    """

    hidden_size: int
    dtype: str
    norm_plus_one: bool
    format_of: FormatOf
    group: Group = "target weights"
    host_embedding: bool = False

    def linear(self, *products: LinearSpec) -> Iterator[Buffer]:
        for product in products:
            yield from linear_buffers(product, self.format_of, self.dtype, self.group)

    def norm(self, name: str, size: int) -> Buffer:
        return Buffer(f"{name}.weight", (size,), "float32" if self.norm_plus_one else self.dtype, self.group)


class PartLayout:
    """Tensors of one part of a decoder layer. ``at``: its module's name; ``owner``: of what layers share in turn.
    ``module``: its name below a layer. ``title``: what the memory breakdown calls its work.
    """

    __slots__ = ()
    module: str
    title: str

    def projections(self, at: str, hidden_size: int) -> tuple[LinearSpec, ...]:
        """Return its products with large matrices."""
        raise NotImplementedError

    def weights(self, at: str, spec: WeightSpec) -> Iterator[Buffer]:
        """Return what it is loaded with."""
        raise NotImplementedError

    def state(self, at: str, spec: EngineSpec) -> Iterator[Buffer]:
        """Return what it keeps of the sequence: caches, recurrent states."""
        return iter(())

    def activations(self, owner: str, spec: EngineSpec) -> Iterator[Buffer]:
        """Return what a block's rows take on their way through it."""
        raise NotImplementedError

    def prefill_bytes(self, rows: int, hidden_size: int, item_bytes: int) -> int:
        """Return the most bytes that live at once for a prompt's rows beside the residual stream."""
        raise NotImplementedError

    def decoded_at_once(self, rows: int, hidden_size: int, item_bytes: int) -> int:
        """Count weights that kernels decode at a time for the products of a prompt's rows, where they are codes."""
        return DECODED_SLICE

    def snapshot_bytes(self, item_bytes: int) -> int:
        """Return bytes of a copy of the state that cannot be cut back; 0 for a cache."""
        return 0

    def ring_bytes(self, spec: EngineSpec) -> int:
        """Return what a snapshot has of a cache that does not hold every position; 0 where it does."""
        return 0

    def scratch_bytes(self, rows: int, item_bytes: int) -> int:
        """Return what its products take for a moment while a block of rows runs."""
        return 0


# Rows at least of every forward in exact mode, and of a block's buffers where there are drafts: copies of the text may
# be longer than a drafter's block.
LEAST_ROWS = 16


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Sizes that both models share.

    Attributes:
        dtype: of weights and activations. kv_cache: of both models, as ``LoadConfig`` has it.
        context: tokens the session may hold.
        block_size: the trained one, 1 without a drafter. num_taps: tapped layers.
        precision: of the drafter, see ``DrafterPrecision``. offloaded: what lies in host memory.
        prefill_chunk: tokens of a prompt processed at once; None for the target's own, see ``cycle.prompt_chunk``.
    """

    dtype: str
    context: int
    block_size: int = 1
    num_taps: int = 0
    kv_cache: str = "auto"
    exact: bool = False
    precision: DrafterPrecision = field(default_factory=DrafterPrecision)
    offloaded: tuple[Offloaded, ...] = ()
    prefill_chunk: int | None = None

    @property
    def cache_dtype(self) -> str:
        """Return the dtype of keys and values."""
        return self.dtype if self.kv_cache == "auto" else self.kv_cache

    @property
    def rows(self) -> int:
        """Count rows of the target's block buffers: of the longest cycle, drafted or copied."""
        return max(self.block_size, LEAST_ROWS) if self.exact or self.block_size > 1 else 1

    @property
    def capacity(self) -> int:
        """Count rows of the target's caches: cycles that are launched too early write behind the context."""
        return self.context + 2 * self.rows

    @property
    def drafter_capacity(self) -> int:
        """Count rows of the drafter's caches: its block stands behind the target's."""
        return self.capacity + self.block_size
