"""What adapting a pair's drafter takes of the device and of the disk, found out before it begins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dflash_local.app.load_planning import fitted_for_task
from dflash_local.app.loading import named_when_missing
from dflash_local.app.notices import Notify
from dflash_local.catalog.bundled import Pair
from dflash_local.errors import DoesNotFitError, UsageError
from dflash_local.load_config import LoadConfig
from dflash_local.settings import Settings, quiet_libraries
from dflash_local.store.adaptations import path_of
from dflash_local.store.paths import adapting_folder
from dflash_local.tables import amount

CONTEXT = 16_384  # tokens at most: of the longest prompts that are read, and a reply


@dataclass(frozen=True, slots=True)
class AdaptationPlan:
    """What it takes, in bytes.

    Attributes:
        load: what loads the pair for it. device: its name. loaded, learning: the most that torch holds of it while the
            pair is loaded, and while the drafter learns. disk: the most that is written.
    """

    load: LoadConfig
    device: str
    loaded: int
    learning: int
    disk: int

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("device", "loaded", "learning", "disk")}

    @property
    def told(self) -> str:
        """Say it in words."""
        return (
            f"Memory of {self.device}: at most {amount(self.loaded)} while the target answers and "
            f"{amount(self.learning)} while the drafter learns. Disk: at most {amount(self.disk)}."
        )


def adaptation_folders(pair: Pair, user: Settings) -> tuple[Path, Path]:
    """Return the folder of unfinished runs, and the file of what a pair's drafter has learnt. UsageError: no home."""
    work, kept = adapting_folder(user), path_of(user, pair.drafting_name)
    if work is None or kept is None:
        raise UsageError("there is no folder to keep what is learnt in", "set HOME")
    return work, kept


def plan_adaptation(pair: Pair, load: LoadConfig, minutes: float, user: Settings, notify: Notify) -> AdaptationPlan:
    """Return what it takes. To be called in a process that may have torch.

    Raises:
        PairError: such a drafter is not trained. UsageError: not on such a device. DoesNotFitError: there is not enough
            memory or disk. Others as ``fitted``.
    """
    quiet_libraries()
    with named_when_missing():
        from dflash_local.adapt import rehearsal, run
    from dflash_local.planner import hardware, memory
    from dflash_local.planner.load import Load

    work, _ = adaptation_folders(pair, user)
    drafter = run.trained_drafter(pair)
    beside = partial(rehearsal.beside_target, drafter)
    load, target, found, taken = fitted_for_task(CONTEXT, beside, pair, replace(load, adaptation=False), user, notify)
    card = found.machine.cards[0] if found.machine.cards else found.machine
    if card.kind not in run.RECIPES:
        raise UsageError(f"no drafter is trained on {card.name}", "--device cpu")
    rehearsed = rehearsal.rehearse(drafter, target.vocab_size, found.dtype, run.RECIPES[card.kind])
    need = rehearsed.peak + (memory.reserve(Load.of(card.kind, load, CONTEXT, 1), rehearsed.peak).bytes or 0)
    if load.fit_check and need > card.free:
        what = f"a drafter that learns needs {amount(need)}, {card.name} has {amount(card.free)} {card.room}"
        raise DoesNotFitError(what, "--no-fit-check tries it all the same")
    disk = rehearsal.disk_bytes(drafter, target.vocab_size, found.dtype, run.kept_tokens(minutes), rehearsed)
    own = run.work_folder(pair, work)  # of an earlier run, which this one goes on with or takes away
    free = hardware.folder(work).free + sum(file.stat().st_size for file in own.rglob("*") if file.is_file())
    if disk > free:
        what = f"up to {amount(disk)} is written to {work}, {amount(free)} is free there"
        raise DoesNotFitError(what, "make room there; fewer --minutes write less")
    return AdaptationPlan(load, card.name, (found.ledger.peak or 0) + taken, rehearsed.peak, disk)
