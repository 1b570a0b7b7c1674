"""Describe what a target's checkpoint is, read from its config and tensor headers. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dflash_local.checkpoint_files.config_values import ConfigFields, shown
from dflash_local.checkpoint_files.text_config import check_rope, text_values
from dflash_local.config.families import family_of
from dflash_local.config.features import ModelConfig
from dflash_local.config.module_names import HEAD_MODULES, PREFIXES
from dflash_local.config.read_model import quantization_settings, read_model
from dflash_local.errors import CheckpointError, UsageError
from dflash_local.layout.quantized import quantize_refusal, quantized
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.stored_formats import FLOATS

MAX_KEPT = 100_000  # modules that a quantisation may name as left alone


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """A checkpoint of a target: its model, and what a loader must know beside it.

    Attributes:
        model_type: as its configuration calls the text model.
        wrapped: the config nests the text model in ``text_config`` (multimodal wrapper).
        prefix: of the text model's tensors; vision and mtp tensors are left alone.
        text_config: what ``text_values`` let through, all that transformers may know of the configuration.
        embedding_rows: rows of embed_tokens, padding included; the bound of every id.
        eos_ids: from config.json, its text_config and generation_config.json.
        kept_whole: names of modules that a quantised variant left in 16 bits.
    """

    model: ModelConfig
    model_type: str
    wrapped: bool
    prefix: str
    text_config: dict[str, Any]
    embedding_rows: int
    eos_ids: frozenset[int]
    kept_whole: tuple[str, ...] = ()

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> TargetFacts:
        """Read them. Raise PairError where the architecture is unsupported, CheckpointError where a value is wrong."""
        where = str(checkpoint.source.config_file)
        top = ConfigFields(checkpoint.config, where)
        family = family_of(checkpoint.config, where)
        nested = top.inner("text_config")
        fields = ConfigFields(nested or checkpoint.config, where)
        for each in (top, fields):  # code that came with a target is never run, and without it the target is another
            if named := each.values.get("auto_map"):
                raise CheckpointError(
                    f"{where}: auto_map names code of the checkpoint's own, {shown(named)}, which is never run",
                    "take a target that transformers knows by itself; where it does, remove auto_map from config.json",
                )
        # A checkpoint tells all of itself: likely values are the registry's.
        model = read_model({key: value for key, value in checkpoint.config.items() if key != "_inferred"}, where)
        text = text_values(fields.values, where)
        check_rope(text, where)
        kinds = (each.values["model_type"] for each in (fields, top) if each.present("model_type"))
        prefix, rows = _embedding(checkpoint, model.hidden_size)
        _check_head(checkpoint, rows, model)
        _check_layers(checkpoint, prefix, model.num_layers)
        if model.vocab_size > rows:
            raise CheckpointError(f"{where}: vocab_size {model.vocab_size} is larger than the embedding's {rows} rows")
        return cls(
            model=model,
            model_type=next(kinds, family.model_types[0]),
            wrapped=bool(nested),
            prefix=prefix,
            text_config={**text, "tie_word_embeddings": model.tie_word_embeddings},
            embedding_rows=rows,
            eos_ids=_eos_ids(checkpoint, fields.values),
            kept_whole=tuple(
                quantization_settings(top, fields).optional_names("modules_to_not_convert", MAX_KEPT) or ()
            ),
        )

    def quantized(self, quantize: str | None) -> TargetFacts:
        """Return facts under a ``LoadConfig.quantize``; bitsandbytes' is only checked. Raise UsageError if refused."""
        refused = quantize_refusal(self.model, quantize)
        if refused:
            raise UsageError(f"{self.model.source}: {refused}", "load it without --quantize")
        return replace(self, model=quantized(self.model, quantize))


def settings_of(checkpoint: Checkpoint) -> ConfigFields:
    """Return a checkpoint's ``quantization_config``, empty for a plain one. Raise CheckpointError where it is no
    object.
    """
    where = str(checkpoint.source.config_file)
    top = ConfigFields(checkpoint.config, where)
    return quantization_settings(top, ConfigFields(top.inner("text_config"), where))


def _embedding(checkpoint: Checkpoint, hidden: int) -> tuple[str, int]:
    """Return the text model's prefix and the rows of its embedding."""
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
    raise CheckpointError(f"{checkpoint.path} has no embedding; looked for {tried}")


def _check_head(checkpoint: Checkpoint, rows: int, model: ModelConfig) -> None:
    found = [info for name, info in checkpoint.tensors.items() if name.rpartition(".")[0] in HEAD_MODULES]
    if not found:
        if not model.tie_word_embeddings:
            raise CheckpointError(f"{checkpoint.path}: tensor lm_head.weight is missing and embeddings are not tied")
        return
    head = next((info for info in found if info.name.endswith(".weight")), None)
    if head is not None and head.dtype in FLOATS and head.shape != (rows, model.hidden_size):
        raise CheckpointError(
            f"{head.file}: tensor {head.name} has shape {list(head.shape)}, expected {[rows, model.hidden_size]}"
        )


def _check_layers(checkpoint: Checkpoint, prefix: str, layers: int) -> None:
    """Raise where the last layer has no tensors, before one is built that fills itself with random numbers."""
    if not any(name.startswith(f"{prefix}layers.{layers - 1}.") for name in checkpoint.tensors):
        raise CheckpointError(
            f"{checkpoint.path}: tensors of layer {layers - 1} are missing, its config.json counts {layers} layers",
            "config.json and weights do not belong together, or a file is missing: download the target again",
        )


def _eos_ids(checkpoint: Checkpoint, text: Mapping[str, Any]) -> frozenset[int]:
    sources: list[Mapping[str, Any]] = [checkpoint.config, text]
    sources.append(checkpoint.source.generation_config())
    found: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int) and not isinstance(item, bool):
                found.add(item)
    return frozenset(found)
