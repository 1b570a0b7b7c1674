"""A pair as the fused engine lays it out: rows, capacities, widths. Knows no bytes of a whole."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_local.config.drafter_config import DrafterConfig
from dflash_local.config.features import AttentionConfig, GatedDeltaNetConfig, ModelConfig
from dflash_local.load_config import FREQUENT
from dflash_local.planner.formats import DTYPE_BYTES
from dflash_local.planner.load import Load

EXACT_ROWS = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """A pair as the fused engine lays it out; every number known."""

    target: ModelConfig
    drafter: DrafterConfig | None
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
        vocab = self.target.vocab_size
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
    def attention(self) -> AttentionConfig:
        """That of the first layer that has it: all are alike here."""
        return next(layer.mixer for layer in self.target.layers if isinstance(layer.mixer, AttentionConfig))

    @property
    def linear(self) -> GatedDeltaNetConfig:
        """The same of the Gated-DeltaNet layers."""
        return next(layer.mixer for layer in self.target.layers if isinstance(layer.mixer, GatedDeltaNetConfig))

    @property
    def recurrent_layers(self) -> int:
        """How many of these there are."""
        return sum(isinstance(layer.mixer, GatedDeltaNetConfig) for layer in self.target.layers)

    @property
    def width(self) -> int:
        """Of the feed-forward part."""
        return self.target.layers[0].mlp.intermediate_size

    @property
    def gated(self) -> bool:
        """True where queries come with gates."""
        return self.attention.gated

    @property
    def queries(self) -> int:
        """Width of all query heads."""
        return self.attention.output_size

    @property
    def columns(self) -> int:
        """Width of attention's fused projection."""
        return self.attention.qkv_size

    @property
    def turned(self) -> int:
        """Dimensions of a head that rotate."""
        return self.attention.rotary_dim

    @property
    def taps(self) -> int:
        """Tapped layers."""
        return len(self.drafter.taps) if self.drafter is not None else 0
