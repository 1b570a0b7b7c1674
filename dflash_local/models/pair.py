"""The pair's contract: a drafter and a target that belong together, by configs and headers alone. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_local.checkpoint_files.source import open_source
from dflash_local.config.architecture import padding_only
from dflash_local.config.features import ModelConfig
from dflash_local.drafters.drafter import MAX_BLOCK, Drafter
from dflash_local.drafters.kinds import config_of, kind_of, read_drafter
from dflash_local.errors import CheckpointError, PairError
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.drafter_tensors import check_tensors, fc_columns
from dflash_local.models.target_facts import TargetFacts

OVERRIDE = "--allow-mismatch runs it anyway; acceptance may be near 1"


@dataclass(frozen=True, slots=True)
class PairFacts:
    """A pair that passed. ``block_size`` is the one to run (1 is autoregressive); ``context`` the
    largest both were made for, None if neither says."""

    drafter: Drafter
    target: TargetFacts
    notices: tuple[str, ...]
    block_size: int
    context: int | None


class _Doubts:
    """Mismatches that could run: errors, or notices when the user allows them."""

    def __init__(self, allowed: bool) -> None:
        self._allowed = allowed
        self.notices: list[str] = []

    def raise_or_note(self, message: str) -> None:
        if not self._allowed:
            raise PairError(message, OVERRIDE)
        self.notices.append(f"{message}; allowed, acceptance may be near 1")


def open_drafter(path: Path) -> Checkpoint:
    """Open a drafter's folder or GGUF file. CheckpointError: it is damaged, or no drafter's."""
    source = open_source(path)
    config = source.config()
    if config is None:
        return Checkpoint.open(path)
    kind = config_of(kind_of(config, str(source.config_file)))
    if not kind.stored:
        return Checkpoint(source, config, {})
    if kind.prefix and path.is_file():
        raise CheckpointError(
            f"{path}: a drafter of the kind {kind.kind} is not read out of a GGUF file",
            "name the original checkpoint, in safetensors files, with --drafter",
        )
    whole = Checkpoint.open(path)
    own = {name: info for name, info in whole.tensors.items() if name.startswith(kind.prefix)}
    if not own:
        raise CheckpointError(
            f"{path} has no tensors {kind.prefix}*, which a drafter of the kind {kind.kind} is made of",
            "its maker left them out: name the original checkpoint, which has them, or another drafter with --drafter",
        )
    return replace(whole, tensors=own)


def check_pair(
    target: Checkpoint,
    drafter: Checkpoint,
    *,
    block_size: int | None = None,
    allow_mismatch: bool = False,
    generations: Sequence[Mapping[str, object]] = (),
) -> PairFacts:
    """Check the whole contract.

    Args:
        block_size: wanted block; None is the trained one, 1 drafts nothing.
        allow_mismatch: what could run at all becomes a notice instead of an error.
        generations: known fingerprints of this drafter, one must match; null matches anything.

    Raises:
        PairError: the two do not belong together. CheckpointError: one of them is damaged.
    """
    facts = TargetFacts.from_checkpoint(target)
    model = facts.model
    config = read_drafter(drafter.config, drafter.source.config_file)
    doubts = _Doubts(allow_mismatch)
    _check_taps(config, model, doubts)
    _check_widths(config, model, drafter)
    check_tensors(drafter, config, model.hidden_size)
    if config.quantization is not None:  # with torch, which plain pairs are checked without
        from dflash_local.models.drafter_codes import check_codes

        check_codes(drafter, config, model.hidden_size)
    _check_vocabulary(config, facts, doubts)
    own = config.fingerprint()
    if generations and not any(
        all(value is None or own.get(key) == value for key, value in known.items()) for known in generations
    ):
        doubts.raise_or_note(f"the drafter {own} is none of the generations the registry knows")
    block = _block_size(config, block_size, doubts)
    context = _context(config, model, doubts.notices)
    return PairFacts(config, facts, tuple(doubts.notices), block, context)


def check_tokenizer_size(facts: TargetFacts, size: int) -> None:
    """Refuse a tokenizer with ids beyond the target's embedding; fewer ids are padding."""
    if size > facts.embedding_rows:
        raise PairError(
            f"the tokenizer has {size} ids, the target's embedding {facts.embedding_rows} rows",
            "the tokenizer belongs to another model",
        )


def _check_taps(config: Drafter, target: ModelConfig, doubts: _Doubts) -> None:
    bound = target.num_layers - config.untapped
    for tap in config.taps:
        if tap >= bound:
            raise PairError(
                f"target_layer_ids names layer {tap}, but the target has {target.num_layers} layers"
                f" and taps must be below {bound}",
                "the drafter was made for another target",
            )
    taps = list(config.taps)
    if len(set(taps)) != len(taps):
        doubts.raise_or_note(f"target_layer_ids {taps} holds a layer twice (target layers: {target.num_layers})")
    elif taps != sorted(taps):
        doubts.raise_or_note(f"target_layer_ids {taps} is not in order (target layers: {target.num_layers})")
    if config.num_target_layers not in (None, target.num_layers):
        doubts.raise_or_note(
            f"the drafter was made for a target of {config.num_target_layers} layers, this one has {target.num_layers}"
        )


def _check_widths(config: Drafter, target: ModelConfig, drafter: Checkpoint) -> None:
    hint = "the drafter was made for another target"
    if config.target_hidden_size not in (None, target.hidden_size):
        raise PairError(
            f"the drafter expects target hidden size {config.target_hidden_size}, the target has {target.hidden_size}",
            hint,
        )
    # The block is embedded by the target, so its rows are as wide as the target whatever fc maps.
    if config.hidden_size not in (None, target.hidden_size):
        raise PairError(f"drafter hidden size {config.hidden_size}, target hidden size {target.hidden_size}", hint)
    taken = fc_columns(drafter, config)
    wanted = len(config.taps) * target.hidden_size
    if taken not in (None, wanted):
        raise PairError(
            f"fc.weight takes {taken} features, {len(config.taps)} taps of a target"
            f" with hidden size {target.hidden_size} give {wanted}",
            hint,
        )


def _check_vocabulary(config: Drafter, facts: TargetFacts, doubts: _Doubts) -> None:
    """Refuse a mask id that is no row of the embedding, and vocabularies that differ beyond padding. A drafter has no
    table of its own: its vocab_size only says which vocabulary it was trained on.
    """
    mask, rows, held = config.mask_token_id, facts.embedding_rows, facts.model.vocab_size
    if mask is not None and mask >= rows:
        raise PairError(f"mask_token_id {mask} is outside the target's embedding of {rows} rows", "wrong target")
    if mask in facts.eos_ids:
        doubts.raise_or_note(f"mask_token_id {mask} is the target's end-of-sequence id")
    if config.vocab_size is not None and not padding_only(config.vocab_size, held):
        doubts.raise_or_note(f"drafter vocab_size {config.vocab_size}, target vocab_size {held}")
    for table, known in config.id_tables().items():
        if known < held:
            raise PairError(
                f"the drafter's {table} {known} rows, the target's vocabulary {held} ids",
                "the drafter was made for another target",
            )


def _block_size(config: Drafter, wanted: int | None, doubts: _Doubts) -> int:
    trained = config.block_size
    if wanted is None:
        return trained
    if not 1 <= wanted <= MAX_BLOCK:
        raise PairError(f"block size {wanted} is outside 1..{MAX_BLOCK}", f"the drafter was trained with {trained}")
    if wanted > trained:
        doubts.raise_or_note(f"block size {wanted} is larger than the trained {trained}")
    return wanted


def _context(config: Drafter, target: ModelConfig, notices: list[str]) -> int | None:
    drafted, held = config.max_position_embeddings, target.max_position_embeddings
    if drafted is not None and held is not None and drafted < held:
        notices.append(f"the drafter was made for {drafted} positions, the target for {held}: context is {drafted}")
    limits = [limit for limit in (drafted, held) if limit is not None]
    return min(limits) if limits else None
