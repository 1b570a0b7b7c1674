"""What a DSpark drafter has beside a DFlash one: the anchor's row predicts, too, and a head that knows the id before.

DeepSpec and SpecForge publish it with the same tensors (arXiv 2607.05147).
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_local.checkpoint_files.config_values import Fields, shown
from dflash_local.checkpoint_files.text_config import MAX_VOCAB
from dflash_local.config.dflash2 import MAX_RANK, Shapes
from dflash_local.errors import CheckpointError

ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")  # DeepSpec's name, and SpecForge's
MODEL_TYPES = ("qwen3", "dspark")  # the second architecture is that of other layouts, too
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
PREVIOUS, FOLLOWING = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE = "confidence_head.proj"
HEAD_TYPE = "vanilla"
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


@dataclass(frozen=True, slots=True)
class DSparkConfig:
    """A Markov head adds to a row's logits what is likely behind the id before it; drafts are chosen one by one.

    Attributes:
        vocab_size: rows of its matrices, by id. markov_rank: their columns; 0: there is no such head.
        confidence_inputs: columns of a head that tells how sure a draft is, 0 for none. It is not read: how many rows
            are verified follows here from what was accepted.
    """

    vocab_size: int
    markov_rank: int
    confidence_inputs: int = 0

    @classmethod
    def from_fields(cls, fields: Fields, hidden: int) -> DSparkConfig:
        """Raises UnknownValue; CheckpointError: it is of another layout."""
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
        inputs = hidden + (rank if fields.optional_flag("confidence_head_with_markov") else 0)
        return cls(vocab, rank, inputs if fields.optional_flag("enable_confidence_head") else 0)

    def tensor_shapes(self) -> Shapes:
        if not self.markov_rank:
            return {}
        return dict.fromkeys((PREVIOUS, FOLLOWING), (self.vocab_size, self.markov_rank))

    def optional_shapes(self, hidden: int) -> Shapes:
        """What a file may have, and drafting does without: where it lacks a table, the target's is meant."""
        shapes: Shapes = dict.fromkeys((EMBEDDING, HEAD), (self.vocab_size, hidden))
        if self.confidence_inputs:
            shapes |= {f"{CONFIDENCE}.weight": (1, self.confidence_inputs), f"{CONFIDENCE}.bias": (1,)}
        return shapes


def _refuse_layouts(fields: Fields) -> None:
    """Other drafters have one of the names, too."""
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
