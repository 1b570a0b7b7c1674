"""Describe what a DSpark drafter has beside a DFlash one: the anchor's row predicts, too, and a head that knows the id
before.

DeepSpec and SpecForge publish it with the same tensors (arXiv 2607.05147). Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dflash_local.checkpoint_files.config_values import ConfigFields, shown
from dflash_local.checkpoint_files.text_config import MAX_VOCAB
from dflash_local.drafters.dflash.layout import GROUP, OWNER, DFlashConfig
from dflash_local.drafters.drafter import MAX_BLOCK, MIN_BLOCK, Servers, Shapes
from dflash_local.errors import CheckpointError
from dflash_local.layout.buffer import Buffer
from dflash_local.layout.cycle import best_buffers
from dflash_local.layout.linear import UNQUANTIZED
from dflash_local.layout.traffic import ProductTraffic, weight_product

MAX_RANK = 4096
MODEL_TYPES = ("qwen3", "dspark")  # the second architecture is that of other layouts, too
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
PREVIOUS, FOLLOWING = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE = "confidence_head.proj"
HEAD_TYPE = "vanilla"
MARKOV_BLOCK = 64  # ids of one program of ``kernels.markov_walk``
# Options that change the forward pass, with the value at which they change nothing.
NOT_SUPPORTED = {
    "sample_from_anchor": True,
    "is_causal": False,
    "sliding_window_non_causal": True,
    "noise_embed_scale": 1,
    "output_multiplier": 1,
    "logit_scale": 1,
    "final_logit_softcapping": 0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """A Markov head adds to a row's logits what is likely behind the id before it; drafts are chosen one by one.

    Attributes:
        vocab_size: rows of its matrices, by id. markov_rank: their columns; 0: there is no such head.
        confidence_inputs: columns of a head that tells how sure a draft is, 0 for none.
    """

    kind: ClassVar[str] = "dspark"
    servers: ClassVar[Servers | None] = Servers("dspark", "DSPARK", "--speculative-dspark-block-size")
    first_draft: ClassVar[int] = 0
    not_supported: ClassVar[Mapping[str, object]] = NOT_SUPPORTED
    own_sizes: ClassVar[tuple[str, ...]] = (
        *("vocab_size", "markov_rank", "enable_confidence_head", "confidence_head_with_markov"),
    )

    vocab_size: int
    markov_rank: int
    confidence_inputs: int

    @classmethod
    def read_block(cls, fields: ConfigFields) -> int:
        """Read ``block_size``, which counts drafts in a DSpark configuration."""
        return fields.integer("block_size", MIN_BLOCK - 1, MAX_BLOCK - 1) + 1

    @classmethod
    def own_values(cls, fields: ConfigFields, known: Mapping[str, Any]) -> dict[str, Any]:
        _refuse_layouts(fields)
        vocab = fields.integer("vocab_size", 1, MAX_VOCAB)
        rank = fields.integer("markov_rank", 0, MAX_RANK)
        kind, drafted = fields.values.get("markov_head_type"), fields.values.get("draft_vocab_size")
        if rank and kind not in (None, HEAD_TYPE):
            raise CheckpointError(
                f"{fields.where}: markov_head_type {shown(kind)} is not supported; supported: {HEAD_TYPE}"
            )
        if drafted not in (None, vocab):
            raise CheckpointError(f"{fields.where}: draft_vocab_size {shown(drafted)} is not its vocab_size {vocab}")
        inputs = known["hidden_size"] + (rank if fields.optional_flag("confidence_head_with_markov") else 0)
        return {
            "vocab_size": vocab,
            "causal": (False,) * known["num_layers"],
            "markov_rank": rank,
            "confidence_inputs": inputs if fields.optional_flag("enable_confidence_head") else 0,
        }

    def own_tensors(self) -> Shapes:
        if not self.markov_rank:
            return {}
        return dict.fromkeys((PREVIOUS, FOLLOWING), (self.vocab_size, self.markov_rank))

    def optional_tensors(self) -> Shapes:
        """Return shapes of its tables, in whose place the target's serve, and of the confidence head."""
        shapes: Shapes = dict.fromkeys((EMBEDDING, HEAD), (self.vocab_size, self.hidden_size))
        if self.confidence_inputs:
            shapes |= {f"{CONFIDENCE}.weight": (1, self.confidence_inputs), f"{CONFIDENCE}.bias": (1,)}
        return shapes

    def id_tables(self) -> Mapping[str, int]:
        return {"Markov head has": self.vocab_size} if self.markov_rank else {}

    def own_weights(self, dtype: str) -> tuple[Buffer, ...]:
        """Return the Markov head's matrices: by the id before, and by the one behind it."""
        return tuple(Buffer(name, shape, dtype, GROUP) for name, shape in self.own_tensors().items())

    def own_buffers(self, vocab_size: int, dtype: str) -> tuple[Buffer, ...]:
        """Describe the room of ``kernels.markov_walk``: a row's best score and id of each block of the vocabulary."""
        if not self.markov_rank:
            return ()
        return best_buffers(f"{OWNER}.markov", -(-vocab_size // MARKOV_BLOCK))

    def own_traffic(self, ids: int, dtype: str) -> Mapping[ProductTraffic, int]:
        """Count a matrix for each draft: they are chosen one by one."""
        if not self.markov_rank:
            return {}
        return {weight_product(UNQUANTIZED, ids, self.markov_rank, dtype): self.block_size - 1}


def _refuse_layouts(fields: ConfigFields) -> None:
    """Refuse other drafters that have one of the names, too."""
    kind = fields.values.get("model_type")
    if kind not in (None, *MODEL_TYPES):
        raise CheckpointError(
            f"{fields.where}: a DSpark drafter of model_type {shown(kind)} is not supported;"
            f" supported: {' and '.join(MODEL_TYPES)}"
        )
    if fields.values.get("transformer_layer_config") is not None:
        raise CheckpointError(
            f"{fields.where}: a DSpark drafter in the layout of speculators is not supported",
            "take one that DeepSpec or SpecForge has written",
        )


CONFIG = DSparkConfig
