"""What a DFlash 2 drafter has beside a DFlash one: convolutions over the block, and a selector of candidates."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_local.checkpoint_files.config_values import Fields
from dflash_local.checkpoint_files.text_config import MAX_VOCAB
from dflash_local.errors import CheckpointError

ARCHITECTURE = "DFlash2DraftModel"
CONVOLVED = ("attention_conv", "mlp_conv")  # modules of a layer
SELECTOR = "candidate_selector"
BASE, KERNELS = "base_kernel", "kernel_projection"  # tensor and module of a convolution
PREDECESSORS, SUCCESSORS, PROJECTION = "predecessor_codebook", "successor_codebook", "hidden_projection"
MAX_RANK, MAX_CANDIDATES = 4096, 1024
LEAST_FACTOR, MOST_FACTOR = 1e-6, 1e6

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class BlockConvolution:
    """A causal convolution over the rows of a block, on the input and on the output of a sublayer. Each channel has a
    kernel of its own, to which each row adds one for each group of channels.

    Attributes:
        kernel_size: rows it sees, the row itself included. group_size: neighbouring channels that share what a row
            adds.
    """

    kernel_size: int
    group_size: int

    @classmethod
    def from_fields(cls, fields: Fields, hidden: int, block: int) -> BlockConvolution:
        """Raises UnknownValue; CheckpointError: it is wider than the block, or a group does not divide the channels."""
        size = fields.integer("conv_kernel_size", 1, block)
        group = fields.integer("conv_group_size", 1, hidden)
        if hidden % group:
            raise CheckpointError(f"{fields.where}: hidden_size {hidden} is not a multiple of conv_group_size {group}")
        return cls(size, group)

    def kernels(self, hidden: int) -> int:
        """Numbers of a row's own kernels: two sides, each of so many rows for each group."""
        return 2 * self.kernel_size * (hidden // self.group_size)

    def tensor_shapes(self, at: str, hidden: int) -> Shapes:
        return {
            f"{at}.{BASE}": (2, self.kernel_size, hidden),
            f"{at}.{KERNELS}.weight": (self.kernels(hidden), hidden),
        }


@dataclass(frozen=True, slots=True)
class SelectorConfig:
    """Drafts are chosen one after the other among the likeliest ids of their row, by how well they follow the id
    before them.

    Attributes:
        rank: of the codebooks. top_k: candidates of a row. vocab_size: rows of each codebook, by id.
        output_multiplier, softcap: of the head's logits, in this order; a softcap of None is none.
    """

    rank: int
    top_k: int
    vocab_size: int
    output_multiplier: float = 1.0
    softcap: float | None = None

    @classmethod
    def from_fields(cls, fields: Fields) -> SelectorConfig:
        """Raises UnknownValue, CheckpointError."""
        vocab = fields.integer("vocab_size", 1, MAX_VOCAB)
        multiplier = fields.optional_number("output_multiplier", LEAST_FACTOR, MOST_FACTOR)
        return cls(
            rank=fields.integer("selector_rank", 1, MAX_RANK),
            top_k=fields.integer("selector_top_k", 1, min(vocab, MAX_CANDIDATES)),
            vocab_size=vocab,
            output_multiplier=1.0 if multiplier is None else multiplier,
            softcap=fields.optional_number("final_logit_softcapping", 0, MOST_FACTOR) or None,
        )

    def tensor_shapes(self, hidden: int) -> Shapes:
        """The codebooks are published as bare tensors."""
        return {
            f"{SELECTOR}.{PREDECESSORS}": (self.vocab_size, self.rank),
            f"{SELECTOR}.{SUCCESSORS}": (self.vocab_size, self.rank),
            f"{SELECTOR}.{PROJECTION}.weight": (self.rank, hidden),
        }


@dataclass(frozen=True, slots=True)
class DFlash2Config:
    """The parts together. ``embedding_scale``: of the target's embedding rows, as they are stored."""

    convolution: BlockConvolution
    selector: SelectorConfig
    embedding_scale: float = 1.0

    @classmethod
    def from_fields(cls, fields: Fields, hidden: int, block: int) -> DFlash2Config:
        """Raises UnknownValue, CheckpointError."""
        scale = fields.optional_number("input_embedding_scale", LEAST_FACTOR, MOST_FACTOR)
        return cls(
            BlockConvolution.from_fields(fields, hidden, block),
            SelectorConfig.from_fields(fields),
            1.0 if scale is None else scale,
        )

    def tensor_shapes(self, layers: int, hidden: int) -> Shapes:
        """3 tensors, and 4 per layer."""
        shapes = self.selector.tensor_shapes(hidden)
        for layer in range(layers):
            for module in CONVOLVED:
                shapes |= self.convolution.tensor_shapes(f"layers.{layer}.{module}", hidden)
        return shapes
