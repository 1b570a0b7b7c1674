"""What a target is, read from its config and tensor headers: family, sizes, where its tensors are named.

Knows the supported architectures; loads nothing. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_local.catalog.families import FAMILIES, LAYER_TYPES, MODEL_TYPES
from dflash_local.checkpoint_files.config_values import Fields, shown
from dflash_local.checkpoint_files.json_file import read_object
from dflash_local.checkpoint_files.text_config import INTEGERS, check_rope, text_values
from dflash_local.errors import CheckpointError, PairError
from dflash_local.models.checkpoint import Checkpoint

# Text model's prefix, most specific first: "model." would also match inside a wrapper's names.
PREFIXES = ("model.language_model.", "language_model.model.", "model.")
MAX_KEPT = 100_000  # modules that a quantisation may name as left alone


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The target as far as a drafter and a loader must know it.

    Attributes:
        wrapped: the config nests the text model in ``text_config`` (multimodal wrapper).
        prefix: of the text model's tensors; vision and mtp tensors are left alone.
        text_config: what ``text_values`` let through, all that an engine may know of the configuration.
        embedding_rows: rows of embed_tokens, padding included; the bound of every id.
        quantization: ``quant_method`` of a quantised variant, None for plain weights. kept_whole: names of
            modules that it left in 16 bits.
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
    kept_whole: tuple[str, ...] = ()

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
        fields = Fields(nested or checkpoint.config, where)
        for each in (top, fields):
            _refuse_own_code(each)
        kinds = [each.word("model_type", MODEL_TYPES[family]) for each in (fields, top) if each.present("model_type")]
        text = Fields(text_values(fields.values, where), where)
        check_rope(text.values, where)
        for kind in text.values.get("layer_types", ()):
            Fields({"layer_types": kind}, where).word("layer_types", LAYER_TYPES[family])
        hidden = text.integer("hidden_size", *INTEGERS["hidden_size"])
        vocab = text.integer("vocab_size", *INTEGERS["vocab_size"])
        layers = text.integer("num_hidden_layers", *INTEGERS["num_hidden_layers"])
        tied = top.optional_flag("tie_word_embeddings")
        tied = bool(text.optional_flag("tie_word_embeddings") if tied is None else tied)
        prefix, rows = _embedding(checkpoint, hidden)
        _check_head(checkpoint, rows, hidden, tied)
        _check_layers(checkpoint, prefix, layers)
        if vocab > rows:
            raise CheckpointError(f"{where}: vocab_size {vocab} is larger than the embedding's {rows} rows")
        quantization = Fields(top.inner("quantization_config") or fields.inner("quantization_config"), where)
        return cls(
            family=family,
            model_type=next(iter(kinds), MODEL_TYPES[family][0]),
            num_layers=layers,
            hidden_size=hidden,
            vocab_size=vocab,
            tied=tied,
            wrapped=bool(nested),
            prefix=prefix,
            text_config={**text.values, "tie_word_embeddings": tied},
            embedding_rows=rows,
            max_position_embeddings=text.values.get("max_position_embeddings"),
            quantization=_quantization(quantization),
            eos_ids=_eos_ids(checkpoint, fields.values),
            kept_whole=_kept_whole(quantization),
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


def _refuse_own_code(fields: Fields) -> None:
    """Code that came with a target is never run; without it the target would not be what it says it is."""
    named = fields.values.get("auto_map")
    if named:
        raise CheckpointError(
            f"{fields.where}: auto_map names code of the checkpoint's own, {shown(named)}, which is never run",
            "take a target that transformers knows by itself; where it does, remove auto_map from config.json",
        )


def _check_layers(checkpoint: Checkpoint, prefix: str, layers: int) -> None:
    """The last layer must have tensors, before one is built that fills itself with random numbers."""
    if not any(name.startswith(f"{prefix}layers.{layers - 1}.") for name in checkpoint.tensors):
        raise CheckpointError(
            f"{checkpoint.folder}: tensors of layer {layers - 1} are missing, its config.json counts {layers} layers",
            "config.json and weights do not belong together, or a file is missing: download the target again",
        )


def _quantization(fields: Fields) -> str | None:
    if not fields.values:
        return None
    method = fields.values.get("quant_method") or "unknown"
    if not isinstance(method, str):
        raise CheckpointError(f"{fields.where}: quant_method must be a word, got {shown(method)}")
    return shown(method)[1:-1]


def _kept_whole(fields: Fields) -> tuple[str, ...]:
    names = fields.optional_list("modules_to_not_convert", MAX_KEPT) or []
    if not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{fields.where}: modules_to_not_convert must list names, got {shown(names)}")
    return tuple(names)


def _eos_ids(checkpoint: Checkpoint, text: Mapping[str, Any]) -> frozenset[int]:
    sources: list[Mapping[str, Any]] = [checkpoint.config, text]
    sources.append(read_object(checkpoint.folder / "generation_config.json", optional=True))
    found: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int) and not isinstance(item, bool):
                found.add(item)
    return frozenset(found)
