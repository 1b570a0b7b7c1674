"""Targets without a row that have the architecture of one that has a drafter: fine-tunes, merges, copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_local.app.models import ModelStore, install_status, model_store, registry
from dflash_local.catalog import bundled
from dflash_local.checkpoint_files.config_values import UnknownValue
from dflash_local.checkpoint_files.source import open_source
from dflash_local.errors import CheckpointError, DFlashError
from dflash_local.tables import listing

if TYPE_CHECKING:
    from dflash_local.catalog.row import Repo, Row
    from dflash_local.config.features import ModelConfig
    from dflash_local.settings import Settings

ORIGINS = ("_name_or_path", "base_model")  # keys of a config.json that may name what a fine-tune began as


@dataclass(frozen=True, slots=True)
class Base:
    """The known target whose architecture another one has.

    Attributes:
        row: the one whose drafter is taken. others: names of rows of the same architecture.
    """

    row: Row
    others: tuple[str, ...]

    @property
    def name(self) -> str:
        """As users type it."""
        return self.row.bundled or self.row.name

    @property
    def drafter(self) -> Repo | Path | None:
        """Of the row: a repository, or a bundled pair's folder."""
        return bundled.find(self.row.bundled).drafter if self.row.bundled else self.row.drafter

    def notice(self, model: str) -> str:
        """What the user is told."""
        several = f"; so have {listing(self.others)}, whose drafter --drafter takes instead" if self.others else ""
        return (
            f"{model} has the architecture of {self.name}{several}: the drafter of {self.name} is taken; "
            "dflash probe tells whether it serves this fine-tune"
        )


def base_of(model: str, target: Repo | Path, user: Settings) -> Base | None:
    """The known target that a folder, or a repository that is here, is alike to in architecture.

    Of several the one that the model's name or its config.json names; else the first whose drafter is here; else the
    first of the registry.

    Raises:
        SettingsError: the registry cannot be read.
    """
    from dflash_local.config.architecture import same_architecture

    store = model_store(user)
    content = _config_of(target, store)
    own = None if content is None else _features(content, model)
    if content is None or own is None:
        return None
    alike = [
        row
        for row in registry(user).rows
        if (known := _known(row, store)) is not None and same_architecture(own, known)
    ]
    if not alike:
        return None
    words = " ".join([model, *(str(content.get(key) or "") for key in ORIGINS)]).lower()
    named = [row for row in alike if row.name.partition("/")[2].lower() in words and "/" in row.name]
    here = [row for row in alike if row.bundled or install_status(row, store).drafter is not None]
    row = max(named, key=lambda row: len(row.name)) if named else (here or alike)[0]
    return Base(row, tuple(other.bundled or other.name for other in alike if other is not row))


def _known(row: Row, store: ModelStore | None) -> ModelConfig | None:
    """The features of a row's target; None where its drafter does not run here, or nothing is known of its shape."""
    from dflash_local.catalog.shapes import shape

    if not row.runs_here:
        return None
    if row.bundled:
        content = _read(bundled.FOLDER / row.bundled / "target")
    elif row.target is None or row.drafter is None:
        return None
    else:
        content = shape(row.target.id) or _config_of(row.target, store)
    return None if content is None else _features(content, row.name)


def _config_of(target: Repo | Path, store: ModelStore | None) -> Mapping[str, Any] | None:
    if isinstance(target, Path):
        return _read(target)
    try:
        here = store.find(target) if store is not None else None
    except DFlashError:  # a damaged download, which loading will tell
        return None
    return None if here is None else _read(here.folder)


def _read(path: Path) -> Mapping[str, Any] | None:
    """None where it cannot be read, which loading tells better."""
    try:
        return open_source(path).config()
    except CheckpointError:
        return None


def _features(content: Mapping[str, Any], source: str) -> ModelConfig | None:
    from dflash_local.config.read_model import read_model

    try:
        return read_model(content, source)
    except (CheckpointError, UnknownValue):
        return None
