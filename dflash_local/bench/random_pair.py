"""A pair by its shapes alone, over random weights; values that no source quotes are assumed and named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from dflash_local.catalog.row import Fingerprint, Row
from dflash_local.catalog.shapes import shape as known_shape
from dflash_local.checkpoint_files.text_config import text_values
from dflash_local.config.features import ModelConfig
from dflash_local.config.fused_support import fused_refusal
from dflash_local.config.read_model import read_model
from dflash_local.drafters.drafter import Drafter
from dflash_local.drafters.engines import BlockWeights, FusedDrafter, blocks_of
from dflash_local.drafters.kinds import OWN, known_kind, read_drafter
from dflash_local.drafters.mtp.layout import MTPConfig
from dflash_local.engine.cpu_threads import settle_torch
from dflash_local.engine.drafter_precision import ChosenPrecision, choose_precision, follow_precision, precision_of
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.errors import PairError, UsageError
from dflash_local.kernels.kernel_trial import OnProgress
from dflash_local.kernels.timing import KernelTimer
from dflash_local.load_config import LoadConfig
from dflash_local.models.fused import weights as target_weights
from dflash_local.models.fused.kernel_choice import choose_configs, choose_experts, settle_rows
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.fused.weights import Front
from dflash_local.models.target_facts import TargetFacts

# Of drafters whose configuration is not public and not even inferred; none of them changes what is computed.
ASSUMED: dict[str, Any] = {"block_size": 16, "dflash_config.mask_token_id": 7, "rope_theta": 1e7}
HINT = "--weights random measures the fused engine; another target runs on the reference engine: dflash bench MODEL"
ROPE_OF_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, slots=True)
class RandomPair:
    """What is measured.

    Attributes:
        generation: of the drafter's shape, as the registry names it. toy: of a bundled pair.
        assumed: values that no source quotes, by ``target`` and ``drafter``; in the two configurations, which look like
            a config.json, they are filled in.
    """

    target: str
    drafter: str
    generation: str | None
    facts: TargetFacts
    model: ModelConfig
    config: Drafter
    target_config: dict[str, Any]
    drafter_config: dict[str, Any]
    assumed: dict[str, dict[str, Any]]
    toy: bool = False


def read_pair(
    target: tuple[str, Mapping[str, Any]],
    drafter: tuple[str, Mapping[str, Any]],
    generations: Sequence[Fingerprint] = (),
    toy: bool = False,
) -> RandomPair:
    """Names and configurations (or the registry's shapes) as a pair.

    Raises:
        UsageError: the fused engine does not know such a target or drafter.
        PairError: the two do not belong together. CheckpointError: a value is missing or impossible.
    """
    (target_name, given), (drafter_name, wanted) = target, drafter
    known, of_target = filled(given, {})
    _drop_unknown_scaling(known.get("text_config", known), of_target)
    facts = _facts(known, target_name)
    if why := fused_refusal(facts.model):
        raise UsageError(f"the fused engine cannot run {target_name}: {why}", HINT)
    filled_in, of_drafter = filled(wanted, {} if known_kind(wanted) == OWN else ASSUMED)
    config = read_drafter(filled_in, Path(drafter_name))
    if not config.stored:
        raise UsageError(f"a drafter of the kind {config.kind} has no weights to be random", "leave out --drafter")
    if why := config.fused_refusal():
        raise UsageError(f"the fused engine cannot run {target_name}: {why}", HINT)
    if config.hidden_size != facts.model.hidden_size or max(config.taps) >= facts.model.num_layers:
        raise PairError(f"{drafter_name} is no drafter of {target_name}: width or tapped layers differ")
    found = config.fingerprint()
    generation = next((known.generation for known in generations if known.matches(found)), None)
    assumed = {role: values for role, values in (("target", of_target), ("drafter", of_drafter)) if values}
    model = facts.model
    return RandomPair(target_name, drafter_name, generation, facts, model, config, known, filled_in, assumed, toy)


def of_row(row: Row) -> RandomPair:
    """A pair of the registry by its shapes there. UsageError: no pair of two repositories; else as ``read_pair``."""
    if row.target is None or row.drafter is None:
        raise UsageError(f"{row.name} is no pair of two repositories", "dflash models lists those that are")
    target, drafter = ((part.id, known_shape(part.id) or {}) for part in (row.target, row.drafter))
    return read_pair(target, drafter, row.fingerprints)


def filled(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A configuration without nulls and our own keys, and what was assumed of it: inferred, or by ``defaults``."""
    kept = {key: value for key, value in _known(config).items() if not key.startswith("_")}
    kept = {key: _known(value) if isinstance(value, Mapping) else value for key, value in kept.items()}
    inferred = config.get("_inferred")
    assumed: dict[str, Any] = {}
    for name, value in chain(inferred.items() if isinstance(inferred, Mapping) else (), defaults.items()):
        outer, _, inner = name.rpartition(".")
        if _is_present(kept, inner):
            continue
        place = kept.setdefault(outer, {}) if outer else kept
        place[inner] = assumed[name] = value
    return kept, assumed


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _is_present(config: Mapping[str, Any], key: str) -> bool:
    """True where a value stands, perhaps at the other schema's place."""
    nested = [config.get(part) for part in ("dflash_config", "text_config", "rope_parameters")]
    return any(key in place for place in (config, *(part for part in nested if isinstance(part, Mapping))))


def _drop_unknown_scaling(text: dict[str, Any], assumed: dict[str, Any]) -> None:
    """Assume plain positions where a factor of llama3's scaling is not public."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if rope.get("rope_type") == "llama3" and not all(key in rope for key in ROPE_OF_LLAMA3):
        text["rope_parameters"] = text["rope_scaling"] = assumed["rope_scaling"] = None


def _facts(config: dict[str, Any], name: str) -> TargetFacts:
    """What a checkpoint of this configuration would tell."""
    text = config.get("text_config", config)
    model = read_model(config, name)
    return TargetFacts(
        model=model,
        model_type=str(text.get("model_type") or config.get("model_type")),
        wrapped=False,
        prefix="model.",
        text_config=text_values(text, name),
        embedding_rows=model.vocab_size,
        eos_ids=frozenset(),
    )


def build(
    pair: RandomPair,
    context: int,
    device: torch.device,
    dtype: torch.dtype,
    load: LoadConfig,
    progress: OnProgress = lambda text, part: None,
    front: Front | None = None,
) -> tuple[FusedRunner, ChosenPrecision]:
    """A runner over random weights, and how it drafts; ``load``: what of it changes the engine. ``front``: layers on
    another GPU.

    Raises:
        UsageError: no such precision. torch.OutOfMemoryError.
    """
    precision, exact = load.drafter_precision, load.exact
    asked = precision_of(precision, pair.model.vocab_size)
    narrow = asked is not None and asked.weights == "8bit"

    def drafter_parts() -> BlockWeights:
        return blocks_of(pair.config).random_weights(pair.config, pair.model.hidden_size, device, dtype)

    # Both forms of its matrices lie on the device for a while, so before the target, as a load makes them.
    parts = drafter_parts().coded() if narrow else None
    weights = target_weights.random_weights(pair.model, device, dtype, front=front)
    settle_torch(sum(product.weight.shape.numel() for product in weights.products), device)
    block = pair.config.block_size
    layer = MTPConfig.of_model(pair.model) if load.mtp else None
    target = FusedTarget(
        weights,
        pair.model,
        pair.config.taps if layer is None else (*pair.config.taps, *layer.taps),
        context,
        block,
        exact=exact,
        kv_cache=load.kv_cache,
        prefill_chunk=load.prefill_chunk,
    )
    drafter = blocks_of(pair.config)(pair.config, parts or drafter_parts(), target)
    stored = () if narrow else drafter.products  # a coarser precision's products are chosen with it
    own: FusedDrafter | None = None
    if layer is not None:
        of_layer = blocks_of(layer).random_weights(layer, pair.model.hidden_size, device, dtype)
        own = blocks_of(layer)(layer, of_layer, target)
    del parts  # what a coarser precision replaces is free then
    timer = KernelTimer()
    choose_configs([*weights.measured, *stored], target.rows, progress, timer)
    mixtures = [*weights.parts, *drafter.mixtures, *(() if own is None else own.mixtures)]
    choose_experts(mixtures, target.rows, exact, progress, timer)
    if exact:
        settle_rows([*weights.products, weights.head], target.rows)
    chosen = choose_precision(drafter, precision, target.rows, timer=timer)
    if own is not None:
        follow_precision(own, drafter, chosen.name, target.rows, timer)
    runner = FusedRunner(target, drafter, context, own)
    runner.peak_before = chosen.peak_before
    return runner, chosen
