"""The registry's pairs as the screens list them: state on this machine, whether they fit, size of the download."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_local.app.fitting import Loaded, machine
from dflash_local.app.models import ModelStore, install_status, model_store, registry
from dflash_local.app.recommending import row_summary
from dflash_local.app.resolve import choose
from dflash_local.errors import UsageError
from dflash_local.settings import Settings
from dflash_local.tables import gib

if TYPE_CHECKING:
    from dflash_local.catalog.row import Row
    from dflash_local.planner.machine import Machine


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """Describes a pair that can be chosen.

    Attributes:
        state: see ``InstallStatus``.
        fits: the memory plan's word on this machine. size: of its download, as text. slow: as ``Summary.slow``.
        good_at: as in the registry, else empty. licence: of the target, else empty.
        plain, drafted: predicted tokens per second here; None where no speed is.
    """

    name: str
    state: str
    fits: str
    size: str
    slow: str = ""
    good_at: str = ""
    licence: str = ""
    plain: float | None = None
    drafted: tuple[float, float] | None = None

    @property
    def here(self) -> bool:
        """Say whether nothing has to be downloaded."""
        return self.state in ("bundled", "local")

    @property
    def fine(self) -> bool:
        """Say whether nothing known speaks against downloading it."""
        return self.fits.startswith(("fits", "unknown")) and not self.slow

    @property
    def question(self) -> str:
        """Tell what a download takes, and whether and how fast it runs here afterwards, in two lines."""
        part = "; a part of it is here already" if self.state == "partial" else ""
        return f"It takes {self.size or 'unknown'} of disk{part}.\n{self._verdict}{self.slow and f'; it {self.slow}'}."

    @property
    def _verdict(self) -> str:
        words = {
            "unknown": "Whether it fits this machine is not known before its configuration is here",
            "server": "It runs on a server only",
            "target alone": "It fits this machine without its drafter only",
        }
        if self.fits.startswith("fits"):
            return f"It fits this machine{self.fits.removeprefix('fits')}"
        return words.get(self.fits) or f"It {self.fits}, more than this machine has"


def in_order(entries: Iterable[ModelEntry]) -> list[ModelEntry]:
    """Put what is here first, else as they come: memory that others take or give back moves no row."""
    return sorted(entries, key=lambda entry: entry.state in ("absent", "partial"))


def model_entries(user: Settings, loaded: Loaded | None = None) -> Sequence[ModelEntry]:
    """List all of them, in the registry's order; may take a second.

    Args:
        loaded: what this process has loaded: its memory counts as free.

    Raises:
        SettingsError: the registry cannot be read.
    """
    store, where = model_store(user), machine(user, loaded=loaded)
    return [_entry(row, store, where, user) for row in registry(user).rows]


def model_entry(name: str, user: Settings, loaded: Loaded | None = None) -> ModelEntry:
    """Find the pair that a name or an alias means; see ``model_entries``.

    Raises:
        UnknownModelError: none of the registry does. UsageError: a folder, which needs no download.
    """
    choice = choose(name, None, user)
    if choice.row is None:
        raise UsageError(f"{choice.name} is not in the registry", "/model takes folders as they are")
    return _entry(choice.row, model_store(user), machine(user, loaded=loaded), user)


def _entry(row: Row, store: ModelStore | None, where: Machine, user: Settings) -> ModelEntry:
    found = row_summary(row, where, user)
    size = "" if row.bundled else gib(found.download_gib, found.computed)
    return ModelEntry(
        row.bundled or row.name,
        install_status(row, store).state,
        found.fits,
        size,
        found.slow,
        row.good_at,
        row.licence or "",
        found.plain_tokens_per_s,
        found.drafted_tokens_per_s,
    )
