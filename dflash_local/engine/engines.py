"""The engines: what each of them refuses and how it loads a pair, in the order in which ``auto`` asks them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from dflash_local.catalog import engine_rule
from dflash_local.catalog.engine_rule import Candidate
from dflash_local.engine import load_fused, load_reference
from dflash_local.engine.checked_pair import CheckedPair
from dflash_local.engine.runner import Runner
from dflash_local.errors import DoesNotFitError, EngineUnableError
from dflash_local.kernels.kernel_trial import Say
from dflash_local.load_config import FUSED, REFERENCE


@dataclass(frozen=True, slots=True)
class Engine:
    """One row of the table.

    Attributes:
        candidate: whether it takes a pair, and whether ``auto`` takes it for that.
        load: a runner ready for requests, and notices of the load. Raises CheckpointError where a tensor is not what
            it must be, torch.OutOfMemoryError where it does not fit, EngineUnableError where it finds only then that
            it cannot run the pair on this machine.
    """

    candidate: Callable[[CheckedPair], Candidate]
    load: Callable[[CheckedPair, Say], tuple[Runner, tuple[str, ...]]]


ENGINES: Mapping[str, Engine] = {
    FUSED: Engine(load_fused.candidate, load_fused.load),
    REFERENCE: Engine(load_reference.candidate, load_reference.load),
}


def load_runner(pair: CheckedPair, say: Say) -> tuple[Runner, tuple[str, ...]]:
    """A runner of the engine that was asked for, and notices of the load.

    Where ``auto``'s choice finds only while it loads that it cannot run the pair here, the reference engine does, and a
    notice says why.

    Raises:
        UsageError: none of the engines that were asked takes the pair. EngineUnableError: the one that was asked for
            cannot run it here. DoesNotFitError: the reference engine takes its place and does not fit.
        CheckpointError, torch.OutOfMemoryError: see ``Engine``.
    """
    name = chosen_engine(pair)
    try:
        runner, notices = ENGINES[name].load(pair, say)
    except EngineUnableError as error:
        if pair.config.engine != "auto" or name == REFERENCE or load_reference.candidate(pair).refusal is not None:
            raise
        why = f"the reference engine takes the {name} engine's place: {error.message}"
    else:
        missing = load_fused.missing_compiler(pair) if pair.config.engine == "auto" and name == REFERENCE else ""
        told = f"the reference engine takes the fused engine's place: {missing}"
        return runner, (told, *notices) if missing else notices
    gc.collect()  # the weights that the other engine had read
    if torch.device(pair.where.device).type == "cuda":
        torch.cuda.empty_cache()
    try:
        runner, notices = ENGINES[REFERENCE].load(pair, say)
    except torch.OutOfMemoryError as error:
        raise DoesNotFitError(
            f"{why}; and the device has no memory for it", "dflash plan MODEL tells what fits, and which variants"
        ) from error
    return runner, (why, *notices)


def chosen_engine(pair: CheckedPair) -> str:
    """The name of the engine that was asked for, or of the one that ``auto`` takes.

    Raises:
        UsageError: none of those that were asked takes the pair; says why.
    """
    return engine_rule.choose(pair.config.engine, [engine.candidate(pair) for engine in ENGINES.values()])
