"""The engines: what each of them refuses and how it loads a pair, in the order in which ``auto`` asks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dflash_local.catalog import engine_rule
from dflash_local.catalog.engine_rule import Candidate
from dflash_local.engine import load_fused, load_reference
from dflash_local.engine.checked_pair import CheckedPair
from dflash_local.engine.runner import Runner
from dflash_local.kernels.kernel_trial import Say
from dflash_local.load_config import FUSED, REFERENCE


@dataclass(frozen=True, slots=True)
class Engine:
    """One row of the table.

    Attributes:
        candidate: whether it takes a pair, and whether ``auto`` takes it for that.
        load: a runner ready for requests, and notices of the load. Raises CheckpointError where a tensor is not what
            it must be, torch.OutOfMemoryError where it does not fit.
    """

    candidate: Callable[[CheckedPair], Candidate]
    load: Callable[[CheckedPair, Say], tuple[Runner, tuple[str, ...]]]


ENGINES: Mapping[str, Engine] = {
    FUSED: Engine(load_fused.candidate, load_fused.load),
    REFERENCE: Engine(load_reference.candidate, load_reference.load),
}


def chosen_engine(pair: CheckedPair) -> str:
    """The name of the engine that was asked for, or of the one that ``auto`` takes.

    Raises:
        UsageError: none of those that were asked takes the pair; says why.
    """
    return engine_rule.choose(pair.config.engine, [engine.candidate(pair) for engine in ENGINES.values()])
