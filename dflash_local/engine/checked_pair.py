"""A pair that passed its checks, which engines accept or refuse, and load."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dflash_local.load_config import LoadConfig
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.load_target import Placement
from dflash_local.models.pair import PairFacts
from dflash_local.models.target_facts import TargetFacts


@dataclass(frozen=True, slots=True)
class CheckedPair:
    """Hold what is to be loaded. ``drafter_files``, ``contract``: None without a drafter. ``where``: no longer
    ``auto``.
    """

    target_files: Checkpoint
    drafter_files: Checkpoint | None
    facts: TargetFacts
    contract: PairFacts | None
    where: Placement
    context: int
    config: LoadConfig

    @property
    def needs_fused(self) -> str:
        """Return ``LoadConfig.needs_fused``; under ``auto`` a chunk of a prompt is none: a plan may have chosen it."""
        auto = self.config.engine == "auto"
        return (replace(self.config, prefill_chunk=None) if auto else self.config).needs_fused
