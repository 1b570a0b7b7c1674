"""What a target is, read from its config and tensor headers: family, sizes, where its tensors are named.

Knows the supported architectures; loads nothing. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_local.catalog.families import FAMILIES
from dflash_local.checkpoint_files.config_values import Fields, shown
from dflash_local.checkpoint_files.json_file import read_object
from dflash_local.errors import CheckpointError, PairError
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.drafter_config import MAX_TARGET_LAYERS, MAX_VOCAB, MAX_WIDTH
from dflash_local.models.rope_parameters import MAX_POSITION

# Text model's prefix, most specific first: "model." would also match inside a wrapper's names.
PREFIXES = ("model.language_model.", "language_model.model.", "model.")


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The target as far as a drafter and a loader must know it.

    Attributes:
        wrapped: the config nests the text model in ``text_config`` (multimodal wrapper).
        prefix: of the text model's tensors; vision and mtp tensors are left alone.
        embedding_rows: rows of embed_tokens, padding included; the bound of every id.
        quantization: ``quant_method`` of a quantised variant, None for plain weights.
        eos_ids: from config.json, its text_config and generation_config.json.
    """

    family: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    tied: bool
    wrapped: bool
    prefix: str
    text_config: dict[str, Any]
    embedding_rows: int
    max_position_embeddings: int | None
    quantization: str | None
    eos_ids: frozenset[int]

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> TargetFacts:
        """Read the facts.

        Raises:
            PairError: the architecture is not supported. CheckpointError: a value or tensor is wrong.
        """
        where = str(checkpoint.folder / "config.json")
        top = Fields(checkpoint.config, where)
        family = _family(checkpoint.config, where)
        nested = top.inner("text_config")
        text = nested or checkpoint.config
        fields = Fields(text, where)
        hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
        vocab = fields.integer("vocab_size", 1, MAX_VOCAB)
        tied = top.optional_flag("tie_word_embeddings")
        if tied is None:
            tied = fields.optional_flag("tie_word_embeddings")
        prefix, rows = _embedding(checkpoint, hidden)
        _check_head(checkpoint, rows, hidden, bool(tied))
        if vocab > rows:
            raise CheckpointError(f"{where}: vocab_size {vocab} is larger than the embedding's {rows} rows")
        return cls(
            family=family,
            model_type=str(text.get("model_type") or checkpoint.config.get("model_type")),
            num_layers=fields.integer("num_hidden_layers", 1, MAX_TARGET_LAYERS),
            hidden_size=hidden,
            vocab_size=vocab,
            tied=bool(tied),
            wrapped=bool(nested),
            prefix=prefix,
            text_config=dict(text),
            embedding_rows=rows,
            max_position_embeddings=fields.optional_integer("max_position_embeddings", 1, MAX_POSITION),
            quantization=_quantization(top, fields),
            eos_ids=_eos_ids(checkpoint, text),
        )


def _family(config: dict[str, Any], where: str) -> str:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    raise PairError(
        f"{where}: target architecture {shown(name)} is not supported",
        "supported: " + ", ".join(FAMILIES),
    )


def _embedding(checkpoint: Checkpoint, hidden: int) -> tuple[str, int]:
    """The text model's prefix and the rows of its embedding."""
    for prefix in PREFIXES:
        info = checkpoint.tensors.get(f"{prefix}embed_tokens.weight")
        if info is None:
            continue
        if len(info.shape) != 2 or info.shape[1] != hidden:
            raise CheckpointError(
                f"{info.file}: tensor {info.name} has shape {list(info.shape)}, expected [vocabulary, {hidden}]"
            )
        return prefix, info.shape[0]
    tried = ", ".join(f"{prefix}embed_tokens.weight" for prefix in PREFIXES)
    raise CheckpointError(f"{checkpoint.folder} has no embedding; looked for {tried}")


def _check_head(checkpoint: Checkpoint, rows: int, hidden: int, tied: bool) -> None:
    head = next(
        (i for n, i in checkpoint.tensors.items() if n in ("lm_head.weight", "language_model.lm_head.weight")), None
    )
    if head is None:
        if not tied:
            raise CheckpointError(f"{checkpoint.folder}: tensor lm_head.weight is missing and embeddings are not tied")
        return
    if head.dtype in ("F32", "F16", "BF16") and head.shape != (rows, hidden):
        raise CheckpointError(
            f"{head.file}: tensor {head.name} has shape {list(head.shape)}, expected {[rows, hidden]}"
        )


def _quantization(top: Fields, text: Fields) -> str | None:
    found = top.inner("quantization_config") or text.inner("quantization_config")
    return str(found.get("quant_method") or "unknown") if found else None


def _eos_ids(checkpoint: Checkpoint, text: dict[str, Any]) -> frozenset[int]:
    sources = [checkpoint.config, text]
    sources.append(read_object(checkpoint.folder / "generation_config.json", optional=True))
    found: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int) and not isinstance(item, bool):
                found.add(item)
    return frozenset(found)
