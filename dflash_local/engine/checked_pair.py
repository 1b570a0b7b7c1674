"""A pair that passed its checks, which engines accept or refuse, and load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_local.drafters.mtp.layout import MTPConfig
from dflash_local.load_config import LoadConfig
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.load_target import Placement
from dflash_local.models.pair import PairFacts
from dflash_local.models.target_facts import TargetFacts


@dataclass(frozen=True, slots=True)
class CheckedPair:
    """Hold what is to be loaded. ``drafter_files``, ``contract``: None without a drafter. ``where``: no longer
    ``auto``. ``said``: ids that replies say, the most frequent one first, as far as that is known. ``own``: the
    target's own layer with its files, where it drafts beside the drafter.
    """

    target_files: Checkpoint
    drafter_files: Checkpoint | None
    facts: TargetFacts
    contract: PairFacts | None
    where: Placement
    context: int
    config: LoadConfig
    said: Sequence[int] = ()
    own: tuple[MTPConfig, Checkpoint] | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        """Return the target's layers that are read: the drafter's, then those of its own layer."""
        of_drafter = () if self.contract is None else self.contract.drafter.taps
        return of_drafter if self.own is None else (*of_drafter, *self.own[0].taps)
