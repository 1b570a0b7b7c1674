"""From what the user typed to a ``Pair`` of folders: bundled toys and local folders.

Looks only at names and whether folders exist; what lies in them is checked at load.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_local.errors import CheckpointError, UnknownModelError, UsageError

if TYPE_CHECKING:
    from dflash_local.catalog.row import Row

BUNDLED: tuple[str, ...] = ("demo", "demo-hybrid")
FOLDER = Path(__file__).resolve().parent.parent / "demo"
# A mean acceptance length under this means a broken pair, not a prompt the toys were never taught.
TOY_BAND = 1.5


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its drafter, as folders on this machine.

    Attributes:
        drafter: None when no drafter was named: the pair then runs in mode ``ar`` only.
        bundled: True when both are the package's own, reached by name.
        acceptance_band: mean acceptance length under which an alarm is raised; None when unknown.
        generations: fingerprints of which the drafter must match one; none when the registry knows none.
        thinking: how the drafter was trained (``required``, ``off``, ``either``); None when not known.
        tuned_from: of a target that took the drafter of a known one for having its architecture: that one's name.
    """

    name: str
    target: Path
    drafter: Path | None
    bundled: bool
    acceptance_band: float | None = None
    generations: tuple[Mapping[str, object], ...] = ()
    thinking: str | None = None
    tuned_from: str | None = None

    @property
    def toy(self) -> bool:
        """True for a target of this package or a fine-tune of one: first-run and test material, no speed claim."""
        return self.tuned_from in BUNDLED or self.target.resolve().is_relative_to(FOLDER)

    @property
    def label(self) -> str:
        """The name as screens show it: a toy is called one."""
        return f"{self.name} (toy pair)" if self.toy else self.name

    @property
    def target_label(self) -> str:
        """What a session says of its target: a bundled pair's name, else the folder."""
        return self.name if self.bundled else str(self.target)

    @property
    def drafter_label(self) -> str:
        return f"{self.name} (bundled)" if self.bundled else str(self.drafter)


def find(model: str, drafter: str | None = None) -> Pair:
    """The pair behind a bundled name or a local folder.

    Args:
        model: a name of ``BUNDLED`` or the folder of a target.
        drafter: the folder of a drafter; overrides a bundled one.

    Raises:
        UnknownModelError: neither a name nor a folder; suggests the nearest name.
        UsageError: ``drafter`` is not a folder.
        CheckpointError: a bundled pair is missing from this installation.
    """
    chosen = _drafter_folder(drafter) if drafter is not None else None
    if model in BUNDLED:
        return _bundled(model, chosen)
    folder = os.path.expanduser(model)  # os.path: a name that no path can be is simply not a folder
    if os.path.isdir(folder):
        return Pair(model, Path(folder), chosen, bundled=False)
    raise _unknown(model, folder)


def _bundled(name: str, drafter: Path | None) -> Pair:
    folder = FOLDER / name
    for part in ("target", "drafter"):
        if not (folder / part / "config.json").is_file():
            raise CheckpointError(
                f"the bundled pair {name!r} is missing from this installation ({folder / part})",
                "install dflash-local again, or train it in a checkout: python -m tools.train.demo",
            )
    if drafter is not None:
        return Pair(name, folder / "target", drafter, bundled=False)
    row = _row(name)
    generations, thinking = (row.generations, row.thinking) if row is not None else ((), None)
    return Pair(name, folder / "target", folder / "drafter", True, TOY_BAND, generations, thinking)


def _row(name: str) -> Row | None:
    """The registry's row; imported here, since most uses of this module need no registry."""
    from dflash_local.catalog.registry import load

    return load().find(name)


def _drafter_folder(drafter: str) -> Path:
    folder = os.path.expanduser(drafter)
    if not os.path.isdir(folder):
        raise UsageError(f"--drafter {drafter!r} is not a folder", "give the folder of a DFlash drafter checkpoint")
    return Path(folder)


def _unknown(model: str, folder: str) -> UnknownModelError:
    if os.path.isfile(folder):
        return UnknownModelError(f"{model!r} is a file, not a model folder", "give the folder that holds config.json")
    close = difflib.get_close_matches(model.lower(), BUNDLED, n=1, cutoff=0.5)
    if close:
        hint = f"did you mean {close[0]!r}?"
    else:
        hint = f"give the folder of a model, or one of: {', '.join(BUNDLED)}"
    return UnknownModelError(f"unknown model {model!r}: neither a bundled pair nor a folder", hint)
