"""From what the user typed to a ``Pair`` of folders, bundled or local; what lies in them is checked at load."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_local.checkpoint_files.source import given_path, is_on_disk
from dflash_local.errors import CheckpointError, UnknownModelError, UsageError

if TYPE_CHECKING:
    from dflash_local.catalog.row import Row
    from dflash_local.request import SamplingParams
    from dflash_local.store.adaptations import Adaptation

BUNDLED: tuple[str, ...] = ("demo", "demo-hybrid")
FOLDER = Path(__file__).resolve().parent.parent / "demo"
EXAMPLES, HELD_OUT = FOLDER / "prompts.json", FOLDER / "heldout.json"  # prompts of the toys
# A mean acceptance length under this means a broken pair, not a prompt the toys were never taught.
TOY_BAND = 1.5


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its drafter, as folders or GGUF files on this machine.

    Attributes:
        drafter: None: the pair runs in mode ``ar`` only. bundled: both are the package's own, reached by name.
        acceptance_band: mean acceptance length under which an alarm is raised; None when unknown.
        generations: fingerprints of which the drafter must match one; none when the registry knows none.
        thinking: how the drafter was trained (``required``, ``off``, ``either``); None when not known.
        tuned_from: the known target whose drafter this target took for having its architecture.
        sampling: what the registry knows that the target's authors advise.
        counted: replies count as those of the name; not where another drafter than its own was named.
        row: the shipped row of the registry that figures of it are figures of.
        drafter_keys: what a check measured, as keys of the drafter's config.json; those that it has itself win.
        target_keys: the same of the target's own layer.
        adaptation: what the drafter has learnt of the user's texts, which is merged into it.
    """

    name: str
    target: Path
    drafter: Path | None
    bundled: bool
    acceptance_band: float | None = None
    generations: tuple[Mapping[str, object], ...] = ()
    thinking: str | None = None
    tuned_from: str | None = None
    sampling: SamplingParams | None = None
    counted: bool = True
    row: str | None = None
    drafter_keys: Mapping[str, object] | None = None
    target_keys: Mapping[str, object] | None = None
    adaptation: Adaptation | None = None

    @property
    def toy(self) -> bool:
        """Return whether the target is of this package or tuned from one that is: test material, no speed claim."""
        return self.tuned_from in BUNDLED or self.target.resolve().is_relative_to(FOLDER)

    @property
    def drafting_name(self) -> str:
        """Return what tells its drafter from all others: the name, or where target and drafter lie that have none."""
        named = self.bundled or self.row is not None
        name = self.name if named else str(self.target.resolve())
        return name if named and self.counted else f"{name} with {self.drafter and self.drafter.resolve()}"

    @property
    def label(self) -> str:
        """Return the name as screens show it: a toy is called one."""
        return f"{self.name} (toy pair)" if self.toy else self.name

    @property
    def target_label(self) -> str:
        """Return what a session says of its target: a bundled pair's name, else the folder."""
        return self.name if self.bundled else str(self.target)

    @property
    def drafter_label(self) -> str:
        return f"{self.name} (bundled)" if self.bundled else str(self.drafter)


def find(model: str, drafter: str | None = None) -> Pair:
    """Return the pair behind a bundled name, a folder or a GGUF file.

    Args:
        model: a name of ``BUNDLED``, or a target on disk.
        drafter: one on disk; overrides a bundled one.

    Raises:
        UnknownModelError: neither; suggests the nearest name.
        UsageError: there is no ``drafter``.
        CheckpointError: a bundled pair is missing from this installation.
    """
    if drafter is not None and not is_on_disk(drafter):
        raise UsageError(f"--drafter {drafter!r} does not exist", "give the folder or GGUF file of a DFlash drafter")
    chosen = given_path(drafter) if drafter is not None else None
    if model in BUNDLED:
        return _bundled(model, chosen)
    if is_on_disk(model):
        return Pair(model, given_path(model), chosen, bundled=False)
    raise _unknown(model)


def drafter_of(row: Row) -> Path | None:
    """Return the drafter that comes with the program for a row; None where there is none in this installation."""
    folder = FOLDER / row.bundled_drafter / "drafter" if row.bundled_drafter else None
    return folder if folder is not None and (folder / "config.json").is_file() else None


def _bundled(name: str, drafter: Path | None) -> Pair:
    folder = FOLDER / name
    for part in ("target", "drafter"):
        if not (folder / part / "config.json").is_file():
            raise CheckpointError(
                f"the bundled pair {name!r} is missing from this installation ({folder / part})",
                "install dflash-local again",
            )
    if drafter is not None:
        return Pair(name, folder / "target", drafter, bundled=False, counted=False)
    from dflash_local.catalog.registry import load  # most uses of this module need no registry

    row = load().find(name)
    generations, thinking = (row.generations, row.thinking) if row is not None else ((), None)
    return Pair(name, folder / "target", folder / "drafter", True, TOY_BAND, generations, thinking)


def _unknown(model: str) -> UnknownModelError:
    close = difflib.get_close_matches(model.lower(), BUNDLED, n=1, cutoff=0.5)
    other = f"give the folder or GGUF file of a model, or one of: {', '.join(BUNDLED)}"
    hint = f"did you mean {close[0]!r}?" if close else other
    return UnknownModelError(f"unknown model {model!r}: neither a bundled pair nor on disk", hint)
