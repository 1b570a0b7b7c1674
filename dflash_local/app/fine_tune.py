"""Targets without a row that have the architecture of one that has a drafter: fine-tunes, merges, copies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_local.app.models import ModelStore, install_status, model_store, registry
from dflash_local.catalog import bundled
from dflash_local.checkpoint_files.config_values import UnknownValue
from dflash_local.checkpoint_files.source import Source, open_source
from dflash_local.errors import CheckpointError, DFlashError
from dflash_local.tables import listing

if TYPE_CHECKING:
    from dflash_local.catalog.row import Repo, Row
    from dflash_local.config.features import ModelConfig
    from dflash_local.settings import Settings

SEPARATORS = re.compile(r"[^a-z0-9.]+")
NAMED_FACTS = 3


@dataclass(frozen=True, slots=True)
class Base:
    """Names the known target whose architecture another one has.

    Attributes:
        row: the one whose drafter is taken. others: names of rows of the same architecture.
    """

    row: Row
    others: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.row.bundled or self.row.name

    @property
    def drafter(self) -> Repo | Path | None:
        """Return the row's: a repository, or a folder of this package."""
        if self.row.bundled:
            return bundled.find(self.row.bundled).drafter
        return self.row.drafter or bundled.drafter_of(self.row)

    def notice(self, model: str) -> str:
        several = f"; so have {listing(self.others)}, whose drafter --drafter takes instead" if self.others else ""
        return (
            f"{model} has the architecture of {self.name}{several}: the drafter of {self.name} is taken; "
            f"dflash check {model} --only drafter tells whether it serves this fine-tune"
        )


def base_of(model: str, target: Repo | Path, user: Settings) -> Base | None:
    """Find the known target that a folder or GGUF file, or a repository that is here, is alike to in architecture.

    Of several the one that the model's name or its files name; else the first whose drafter is here; else the first of
    the registry.

    Raises:
        SettingsError: the registry cannot be read.
    """
    from dflash_local.config.architecture import same_architecture

    store = model_store(user)
    own = _target(model, target, store)
    if own is None:
        return None
    alike = [row for row, known in _known_targets(user, store) if same_architecture(own.features, known)]
    if not alike:
        return None
    words = _plain(" ".join([model, *own.origins]))
    named = [row for row in alike if row.target is not None and _plain(row.key.partition("/")[2]) in words]
    here = [row for row in alike if _own_drafter(row) or install_status(row, store).drafter is not None]
    row = max(named, key=lambda row: len(row.key)) if named else (here or alike)[0]
    return Base(row, tuple(other.bundled or other.name for other in alike if other is not row))


def unlike_all(model: str, target: Path, user: Settings) -> str:
    """Say why no known target is one that ``base_of`` finds, by the facts of the nearest; empty where a target cannot
    be
    read, which loading tells better.

    Raises:
        SettingsError: the registry cannot be read.
    """
    from dflash_local.config.architecture import differences

    store = model_store(user)
    own = _target(model, target, store)
    if own is None:
        return ""
    found = [(differences(own.features, known), row) for row, known in _known_targets(user, store)]
    family = [each for each in found if each[1].family == own.features.family] or found
    facts, row = min(family, key=lambda each: len(each[0]))
    return (
        f"no drafter is known for {model}: it has the architecture of no target of the registry; the nearest is "
        f"{row.bundled or row.name}, but it has {listing(facts, NAMED_FACTS)}"
    )


@dataclass(frozen=True, slots=True)
class _Target:
    """Holds a target on this machine, and what its files say of where it comes from."""

    features: ModelConfig
    origins: tuple[str, ...]


def _target(model: str, target: Repo | Path, store: ModelStore | None) -> _Target | None:
    source = _source_of(target, store)
    content = None if source is None else _read(source)
    own = None if content is None else _features(content, model)
    return None if source is None or own is None else _Target(own, source.origins())


def _plain(text: str) -> str:
    """Write one sign for all that names write differently."""
    return SEPARATORS.sub("-", text.lower())


def _known_targets(user: Settings, store: ModelStore | None) -> list[tuple[Row, ModelConfig]]:
    """List rows with a drafter that runs here, and the features of their targets."""
    rows = registry(user).rows
    return [(row, known) for row in rows if (known := _known(row, store)) is not None]


def _own_drafter(row: Row) -> bool:
    """Say whether a row's drafter comes with this installation."""
    return bool(row.bundled) or bundled.drafter_of(row) is not None


def _known(row: Row, store: ModelStore | None) -> ModelConfig | None:
    """Read the features of a row's target; None where its drafter does not run here, or its shape is unknown."""
    from dflash_local.catalog.shapes import shape

    if not row.runs_here:
        return None
    if row.bundled:
        content = _read(open_source(bundled.FOLDER / row.bundled / "target"))
    elif row.target is None or (row.drafter is None and not _own_drafter(row)):
        return None
    else:
        content = shape(row.target.id) or _read(_source_of(row.target, store))
    return None if content is None else _features(content, row.name)


def _source_of(target: Repo | Path, store: ModelStore | None) -> Source | None:
    """Open a target; None for what is not here, or a damaged download, which loading will tell."""
    if isinstance(target, Path):
        return open_source(target)
    try:
        here = store.find(target) if store is not None else None
    except DFlashError:
        return None
    return None if here is None else open_source(here.folder)


def _read(source: Source | None) -> Mapping[str, Any] | None:
    """Read a configuration; None where it cannot be read, which loading tells better."""
    try:
        return None if source is None else source.config()
    except CheckpointError:
        return None


def _features(content: Mapping[str, Any], source: str) -> ModelConfig | None:
    from dflash_local.config.read_model import read_model

    try:
        return read_model(content, source)
    except (CheckpointError, UnknownValue):
        return None
