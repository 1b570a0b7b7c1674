"""Describe what a DFlash 2 drafter has beside a DFlash one: convolutions over the block, and a selector of candidates.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dflash_local.checkpoint_files.config_values import ConfigFields
from dflash_local.checkpoint_files.text_config import MAX_VOCAB
from dflash_local.drafters.dflash.layout import GROUP, NOT_SUPPORTED, OWNER, DFlashConfig
from dflash_local.drafters.drafter import Shapes
from dflash_local.errors import CheckpointError
from dflash_local.layout.buffer import Buffer
from dflash_local.layout.cycle import CHOICE_BLOCK
from dflash_local.layout.linear import LinearSpec, MatrixPart

MOST_CANDIDATES = 64  # of the selector's kernels, which take them out one by one
CONVOLVED = ("attention_conv", "mlp_conv")  # modules of a layer
SELECTOR = "candidate_selector"
BASE, KERNELS = "base_kernel", "kernel_projection"  # tensor and module of a convolution
PREDECESSORS, SUCCESSORS, PROJECTION = "predecessor_codebook", "successor_codebook", "hidden_projection"
MAX_RANK, MAX_CANDIDATES = 4096, 1024
LEAST_FACTOR, MOST_FACTOR = 1e-6, 1e6


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
    def from_fields(cls, fields: ConfigFields, hidden: int, block: int) -> BlockConvolution:
        """Read the settings. Raise CheckpointError where it is wider than the block, or a group does not divide."""
        size = fields.integer("conv_kernel_size", 1, block)
        group = fields.integer("conv_group_size", 1, hidden)
        if hidden % group:
            raise CheckpointError(f"{fields.where}: hidden_size {hidden} is not a multiple of conv_group_size {group}")
        return cls(size, group)

    def kernels(self, hidden: int) -> int:
        """Count numbers of a row's own kernels: two sides, each of so many rows for each group."""
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
    def from_fields(cls, fields: ConfigFields) -> SelectorConfig:
        """Read the settings. Raises UnknownValue, CheckpointError."""
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
        """Return shapes by name; the codebooks are published as bare tensors."""
        return {
            f"{SELECTOR}.{PREDECESSORS}": (self.vocab_size, self.rank),
            f"{SELECTOR}.{SUCCESSORS}": (self.vocab_size, self.rank),
            f"{SELECTOR}.{PROJECTION}.weight": (self.rank, hidden),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlash2Config(DFlashConfig):
    """A DFlash 2 drafter. ``embedding_scale``: of the target's embedding rows, as they are stored."""

    kind: ClassVar[str] = "dflash2"
    not_supported: ClassVar[Mapping[str, object]] = NOT_SUPPORTED
    own_sizes: ClassVar[tuple[str, ...]] = ("vocab_size", "conv_kernel_size", "conv_group_size", "selector_rank")

    convolution: BlockConvolution
    selector: SelectorConfig
    embedding_scale: float

    @classmethod
    def own_values(cls, fields: ConfigFields, known: Mapping[str, Any]) -> dict[str, Any]:
        scale = fields.optional_number("input_embedding_scale", LEAST_FACTOR, MOST_FACTOR)
        return {
            "convolution": BlockConvolution.from_fields(fields, known["hidden_size"], known["block_size"]),
            "selector": SelectorConfig.from_fields(fields),
            "embedding_scale": 1.0 if scale is None else scale,
        }

    def own_tensors(self) -> Shapes:
        """Return 3 tensors, and 4 per layer."""
        shapes = self.selector.tensor_shapes(self.hidden_size)
        for at in self.convolved():
            shapes |= self.convolution.tensor_shapes(at, self.hidden_size)
        return shapes

    def convolved(self) -> list[str]:
        """Name the modules of all convolutions: of each layer that around attention, and that around the MLP."""
        return [f"layers.{index}.{module}" for index in range(self.num_layers) for module in CONVOLVED]

    def id_tables(self) -> Mapping[str, int]:
        return {"codebooks have": self.selector.vocab_size}

    def fused_refusal(self) -> str:
        top_k = self.selector.top_k
        fits = top_k <= MOST_CANDIDATES
        return "" if fits else f"its drafter chooses among {top_k} candidates, {MOST_CANDIDATES} fit"

    def own_products(self) -> tuple[LinearSpec, ...]:
        """Return what rows add to the kernels of each convolution, and the selector's projection of hidden rows."""
        rows = dict.fromkeys((f"{at}.{KERNELS}" for at in self.convolved()), self.convolution.kernels(self.hidden_size))
        rows[f"{SELECTOR}.{PROJECTION}"] = self.selector.rank
        return tuple(LinearSpec(name, self.hidden_size, (MatrixPart(name, count),)) for name, count in rows.items())

    def own_weights(self, dtype: str) -> tuple[Buffer, ...]:
        names = [f"{SELECTOR}.{PREDECESSORS}", f"{SELECTOR}.{SUCCESSORS}", *(f"{at}.{BASE}" for at in self.convolved())]
        shapes = self.own_tensors()
        return tuple(Buffer(name, shapes[name], dtype, GROUP) for name in names)

    def own_buffers(self, vocab_size: int, dtype: str) -> tuple[Buffer, ...]:
        """Return what rows add to a convolution's kernels, what they contribute to the choice, and the candidates."""
        rows = self.draft_rows - self.first_draft
        kernels = (self.draft_rows, self.convolution.kernels(self.hidden_size))
        return (
            Buffer(f"{OWNER}.kernels", kernels, dtype, "buffers"),
            Buffer(f"{OWNER}.projected", (rows, self.selector.rank), dtype, "buffers"),
            *candidate_buffers(self.selector, rows, vocab_size),
        )


def candidate_buffers(selector: SelectorConfig, rows: int, vocab_size: int) -> tuple[Buffer, ...]:
    """Describe the room of ``kernels.candidate_walk``: candidates' scores and ids of each block of the vocabulary, and
    of all of it their scores, ids and codebook rows.
    """
    blocks, wide = -(-vocab_size // CHOICE_BLOCK), 1 << (selector.top_k - 1).bit_length()

    def buffer(name: str, dtype: str, *shape: int) -> Buffer:
        return Buffer(f"{OWNER}.candidate_{name}", shape, dtype, "buffers")

    return (
        buffer("block_scores", "float32", rows, blocks, wide),
        buffer("block_ids", "int32", rows, blocks, wide),
        buffer("scores", "float32", rows, wide),
        buffer("ids", "int32", rows, wide),
        buffer("followers", "float32", rows, wide, selector.rank),
    )


CONFIG = DFlash2Config
