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


def base_of(model: str, target: Repo | Path, user: Settings) -> tuple[Base | None, str]:
    """Find the known target that a folder or GGUF file, or a repository that is here, is alike to in architecture.

    Of several the one that the model's name or its files name; else the first whose drafter is here; else the first of
    the registry. Where there is none, the facts in which the nearest differs tell why; of a target that cannot be read
    nothing is said, which loading tells better.

    Raises:
        SettingsError: the registry cannot be read.
    """
    from dflash_local.config.architecture import differences, same_architecture

    store = model_store(user)
    source = _source_of(target, store)
    own = _features(source, model)
    if source is None or own is None:
        return None, ""
    known = [(row, of) for row in registry(user).rows if (of := _known(row, store)) is not None]
    alike = [row for row, of in known if same_architecture(own, of)]
    if not alike:
        found = [(differences(own, of), row) for row, of in known]
        facts, row = min(
            [each for each in found if each[1].family == own.family] or found, key=lambda each: len(each[0])
        )
        return None, (
            f"no drafter is known for {model}: it has the architecture of no target of the registry; the nearest is "
            f"{row.bundled or row.name}, but it has {listing(facts, NAMED_FACTS)}"
        )

    def plain(text: str) -> str:
        return SEPARATORS.sub("-", text.lower())

    words = plain(" ".join([model, *source.origins()]))
    named = [row for row in alike if row.target is not None and plain(row.key.partition("/")[2]) in words]
    here = [row for row in alike if _comes_along(row) or install_status(row, store).drafter is not None]
    row = max(named, key=lambda row: len(row.key)) if named else (here or alike)[0]
    return Base(row, tuple(other.bundled or other.name for other in alike if other is not row)), ""


def _comes_along(row: Row) -> bool:
    """Say whether a row's drafter comes with this installation."""
    return bool(row.bundled) or bundled.drafter_of(row) is not None


def _known(row: Row, store: ModelStore | None) -> ModelConfig | None:
    """Read the features of a row's target; None where its drafter does not run here, or its shape is unknown."""
    from dflash_local.catalog.shapes import shape

    if not row.runs_here:
        return None
    if row.bundled:
        return _features(open_source(bundled.FOLDER / row.bundled / "target"), row.name)
    if row.target is None or (row.drafter is None and not _comes_along(row)):
        return None
    return _features(shape(row.target.id) or _source_of(row.target, store), row.name)


def _source_of(target: Repo | Path, store: ModelStore | None) -> Source | None:
    """Open a target; None for what is not here, or a damaged download, which loading will tell."""
    if isinstance(target, Path):
        return open_source(target)
    try:
        here = store.find(target) if store is not None else None
    except DFlashError:
        return None
    return None if here is None else open_source(here.folder)


def _features(known: Source | Mapping[str, Any] | None, name: str) -> ModelConfig | None:
    """Read the features of a checkpoint, or of its configuration; None where that cannot be."""
    from dflash_local.config.read_model import read_model

    try:
        content = known if known is None or isinstance(known, Mapping) else known.config()
        return None if content is None else read_model(content, name)
    except (CheckpointError, UnknownValue):
        return None
