"""What a kind of layer part (an attention, a feed-forward ...) says of its tensors. A new kind is one class more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dflash_local.layout.buffer import Buffer, Group
from dflash_local.layout.linear import FormatOf, LinearSpec, linear_buffers
from dflash_local.layout.spec import EngineSpec


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """What the sizes of weights depend on beside their features.

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
    ``module``: its name below a layer. ``title``: what the ledger calls its work.
    """

    __slots__ = ()
    module: str
    title: str

    def projections(self, at: str, hidden_size: int) -> tuple[LinearSpec, ...]:
        """Its products with large matrices."""
        raise NotImplementedError

    def weights(self, at: str, spec: WeightSpec) -> Iterator[Buffer]:
        """What it is loaded with."""
        raise NotImplementedError

    def state(self, at: str, spec: EngineSpec) -> Iterator[Buffer]:
        """What it keeps of the sequence: caches, recurrent states."""
        return iter(())

    def activations(self, owner: str, spec: EngineSpec) -> Iterator[Buffer]:
        """What a block's rows take on their way through it."""
        raise NotImplementedError

    def prefill_bytes(self, rows: int, hidden_size: int, item_bytes: int) -> int:
        """Of a prompt's rows, the most that lives at once beside the residual stream."""
        raise NotImplementedError

    def snapshot_bytes(self, item_bytes: int) -> int:
        """A copy of the state that cannot be cut back; 0 for a cache."""
        return 0

    def scratch_bytes(self, rows: int, item_bytes: int) -> int:
        """What its products take for a moment while a block of rows runs."""
        return 0
