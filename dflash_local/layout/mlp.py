"""Tensors of a dense gated feed-forward part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dflash_local.config.features import MLPConfig
from dflash_local.layout.buffer import Buffer
from dflash_local.layout.linear import LinearSpec, MatrixPart
from dflash_local.layout.part_layout import EngineSpec, PartLayout, WeightSpec


@dataclass(frozen=True, slots=True)
class MLPLayout(PartLayout):
    config: MLPConfig
    module: str = "mlp"
    title: str = "feed-forward"

    def projections(self, at: str, hidden_size: int) -> tuple[LinearSpec, LinearSpec]:
        size = self.config.intermediate_size
        parts = tuple(MatrixPart(f"{at}.{name}_proj", size) for name in ("gate", "up"))
        down = MatrixPart(f"{at}.down_proj", hidden_size)
        return LinearSpec(f"{at}.gate_up_proj", hidden_size, parts), LinearSpec(down.module, size, (down,))

    def weights(self, at: str, spec: WeightSpec) -> Iterator[Buffer]:
        yield from spec.linear(*self.projections(at, spec.hidden_size))

    def activations(self, owner: str, spec: EngineSpec) -> Iterator[Buffer]:
        """Return the rows between the products, for one layer after the other."""
        yield from block_buffers(owner, self.config, spec.rows, spec.dtype)

    def prefill_bytes(self, rows: int, hidden_size: int, item_bytes: int) -> int:
        """Sum both products and their result, which is there before them."""
        return rows * 3 * self.config.intermediate_size * item_bytes

    def scratch_bytes(self, rows: int, item_bytes: int) -> int:
        """Return both halves and their product, where the library multiplies."""
        return rows * 3 * self.config.intermediate_size * item_bytes


def block_buffers(owner: str, config: MLPConfig, rows: int, dtype: str) -> Iterator[Buffer]:
    size = config.intermediate_size
    yield Buffer(f"{owner}.intermediate.{size}", (rows, size), dtype, "buffers")
