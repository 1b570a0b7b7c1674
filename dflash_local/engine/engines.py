"""The engines: what each of them refuses and how it loads a pair, in the order in which ``auto`` tries them."""

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
from dflash_local.errors import DoesNotFitError, KernelError
from dflash_local.kernels.kernel_trial import OnProgress
from dflash_local.load_config import FUSED, REFERENCE

SLOWER = "the fused engine's kernels do not run here, so the reference engine does, which is slower"


@dataclass(frozen=True, slots=True)
class Engine:
    """One row of the table.

    Attributes:
        candidate: whether it takes a pair, and whether ``auto`` takes it for that.
        load: a runner ready for requests, and notices of the load. Raises CheckpointError where a tensor is not what
            it must be, torch.OutOfMemoryError where it does not fit, KernelError where its kernels fail here.
    """

    candidate: Callable[[CheckedPair], Candidate]
    load: Callable[[CheckedPair, OnProgress], tuple[Runner, tuple[str, ...]]]


ENGINES: Mapping[str, Engine] = {
    FUSED: Engine(load_fused.candidate, load_fused.load),
    REFERENCE: Engine(load_reference.candidate, load_reference.load),
}


def load_runner(pair: CheckedPair, progress: OnProgress) -> tuple[Runner, tuple[str, ...]]:
    """Return the runner of the chosen engine. Where the fused one's kernels fail, ``auto`` takes the reference engine.

    Returns:
        the runner, and notices of the load; one says why ``auto`` did not take the fused engine on a GPU.

    Raises:
        UsageError: no engine takes the pair. KernelError: its kernels fail and no other engine may be taken.
        DoesNotFitError: the reference engine takes the fused one's place and does not fit.
        CheckpointError: a tensor is not what it must be. torch.OutOfMemoryError: it does not fit.
    """
    name = chosen_engine(pair)
    on_gpu = pair.where.home.startswith("cuda")
    passed_over = _passed_over(pair) if name == REFERENCE and pair.config.engine == "auto" else ()
    try:
        runner, notices = ENGINES[name].load(pair, progress)
    except KernelError as error:
        if name != FUSED or pair.config.engine != "auto" or pair.config.needs_fused:
            raise
        why = str(error)
    else:
        return runner, (*notices, *passed_over)
    gc.collect()  # what the fused engine had put on the device, once the error with its frames is gone
    if on_gpu:
        torch.cuda.empty_cache()
    try:
        runner, notices = ENGINES[REFERENCE].load(pair, progress)
    except torch.OutOfMemoryError as error:
        raise DoesNotFitError(
            f"{SLOWER}: {why}; and the device has no memory for it",
            "dflash plan MODEL tells what fits, and which variants",
        ) from error
    return runner, (*notices, f"{SLOWER}: {why}")


def _passed_over(pair: CheckedPair) -> tuple[str, ...]:
    """Say why ``auto`` does not take the fused engine on a GPU, or where only the drafter is not for it."""
    refused = ENGINES[FUSED].candidate(pair).refusal is not None
    drafter = load_fused.refused_drafter(pair)
    slow = load_fused.why_slow(pair) if drafter or not refused else ""
    if drafter and not slow:
        return (f"the fused engine cannot run this: {drafter}; so the reference engine does, which is slower",)
    return (f"{SLOWER}: {slow}",) if slow and not refused and pair.where.home.startswith("cuda") else ()


def chosen_engine(pair: CheckedPair) -> str:
    """Return the requested engine, or the one ``auto`` takes. Raises UsageError: none takes the pair; says why."""
    return engine_rule.choose(pair.config.engine, [engine.candidate(pair) for engine in ENGINES.values()])
