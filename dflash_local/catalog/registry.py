"""The registry: the packaged registry.yaml with the user's own file laid over it, and names found in it. Torch-free."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from dflash_local.catalog import row_reader, yaml_file
from dflash_local.catalog.row import Row, Variant
from dflash_local.catalog.typed_fields import At, keys_of, read_keys, shown
from dflash_local.catalog.yaml_file import Section, kind_of
from dflash_local.errors import SettingsError, UnknownModelError

SCHEMA = "1"
# The link inside the package, then what it leads to in a checkout without links, where git writes a text in its place.
LINK = b"../../registry.yaml"
PACKAGED = (
    Path(__file__).resolve().parent / "registry.yaml",
    Path(__file__).resolve().parent.parent.parent / "registry.yaml",
)
# What says nothing about a pair any more once its drafter is another one.
OF_THE_DRAFTER = (
    *("kind", "fingerprints", "mirrors", "drafter_licence"),
    *("published", "acceptance_band", "server", "thinking", "bundled_drafter"),
)
MERGED = ("revisions", "sizes_gib", "server", "vllm", "sglang", "environment")
MAX_SUGGESTIONS = 3


@dataclass(frozen=True, slots=True)
class RegistryKeys:
    schema: Any
    pairs: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Registry:
    """All known pairs, the shipped ones first."""

    rows: tuple[Row, ...]

    def find(self, model: str) -> Row | None:
        """The row that a target, bare name, alias, drafter or mirror is, in any case. UnknownModelError: several."""
        wanted = model.strip().lower()
        found = self._full.get(wanted) or self._bare.get(wanted) or ()
        if len(found) > 1:
            names = ", ".join(row.name for row in found)
            raise UnknownModelError(f"{model!r} is more than one model: {names}", "give the whole name, owner/name")
        return found[0] if found else None

    def find_variant(self, model: str) -> tuple[Row, Variant] | None:
        """The pre-quantised target of that repository, or file of one, and the row that lists it."""
        wanted = model.strip().lower()
        listed = ((row, item) for row in self.rows for item in row.variants)
        return next((found for found in listed if found[1].model.lower() == wanted), None)

    def nearest(self, model: str) -> tuple[str, ...]:
        """At most three names of rows that ``model`` may have meant, best first."""
        wanted = model.strip().lower()[:200]
        matcher = difflib.SequenceMatcher(b=wanted, autojunk=False)
        scores: dict[str, float] = {}
        for name, rows in [*self._full.items(), *self._bare.items()]:
            matcher.set_seq1(name)
            contained = len(wanted) >= 3 and wanted in name
            if not contained and (matcher.real_quick_ratio() < 0.6 or matcher.quick_ratio() < 0.6):
                continue
            score = matcher.ratio()
            if contained or score >= 0.6:
                for row in rows:
                    scores[row.name] = max(scores.get(row.name, 0.0), score + contained)
        return tuple(sorted(scores, key=lambda name: -scores[name])[:MAX_SUGGESTIONS])

    @cached_property
    def _full(self) -> dict[str, tuple[Row, ...]]:
        return _index((name.lower(), row) for row in self.rows for name in row.names)

    @cached_property
    def _bare(self) -> dict[str, tuple[Row, ...]]:
        return _index((name.lower().partition("/")[2], row) for row in self.rows for name in row.names if "/" in name)


def _index(named: Iterable[tuple[str, Row]]) -> dict[str, tuple[Row, ...]]:
    """Rows by name, each once."""
    index: dict[str, tuple[Row, ...]] = {}
    for name, row in named:
        if row not in index.get(name, ()):
            index[name] = (*index.get(name, ()), row)
    return index


def load(overlay: Path | None = None) -> Registry:
    """Read the packaged registry and the user's file over it, if there is one. SettingsError names file and line."""
    shipped = _shipped(*_packaged(PACKAGED))
    pairs = {key: pair for key, (pair, _) in shipped.items()}
    changed: set[str] = set()
    if overlay is not None:
        try:
            own = _pairs(yaml_file.content(overlay), str(overlay))
        except (FileNotFoundError, NotADirectoryError):
            own = {}
        for key, pair in own.items():
            pairs[key] = _merge(pairs[key], pair) if key in pairs else pair
        changed = set(own)
    rows = tuple(
        row_reader.row(pair, overridden=True) if key in changed else shipped[key][1] for key, pair in pairs.items()
    )
    _check_aliases(rows, pairs)
    return Registry(rows)


@lru_cache(maxsize=1)
def _shipped(data: bytes, file: str) -> Mapping[str, tuple[Section, Row]]:
    """The pairs of the packaged file and their rows, kept: screens and servers look at the registry time and again."""
    return {key: (pair, row_reader.row(pair)) for key, pair in _pairs(data, file).items()}


def _packaged(paths: tuple[Path, ...]) -> tuple[bytes, str]:
    """What the first of the files that is there holds, and its name."""
    for path in paths:
        try:
            data = yaml_file.content(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        if data.strip() != LINK:
            return data, str(path)
    looked = " nor ".join(map(str, paths))
    raise SettingsError(f"the registry is missing: neither {looked} exists", "install dflash-local again")


def _pairs(data: bytes, file: str) -> dict[str, Section]:
    """The pairs of a file by the lower-case name of the target."""
    root = yaml_file.parse(data, file)
    at = At(root.place, "the registry")
    found = RegistryKeys(**read_keys(keys_of(RegistryKeys), root, at))
    if str(found.schema) != SCHEMA:
        known = f"this version reads schema {SCHEMA}; update dflash-local"
        at.key(root, "schema").fail(f"{shown(found.schema)} is not known", known)
    pairs: dict[str, Section] = {}
    for pair in found.pairs:
        if not isinstance(pair, Section):
            at.key(root, "pairs").fail(f"expected a mapping, got {kind_of(pair)}")
        key = row_reader.key_of(pair)
        if not key:
            row_reader.row(pair)  # which says what is wrong with it
        if key in pairs:
            At(pair.place, repr(key)).fail(f"the pair stands twice, first in {pairs[key].place}", "keep one")
        pairs[key] = pair
    return pairs


def _merge(shipped: Section, own: Section) -> Section:
    """The shipped pair with the fields that the user gives; mappings field by field, lists as a whole."""
    old = _without(shipped)
    known = shipped.get("drafter") or shipped.get("bundled_drafter")
    if "drafter" in own and known is not None and own["drafter"] != known:
        old = _without(shipped, *OF_THE_DRAFTER)
        for key in ("revisions", "sizes_gib"):
            if isinstance(old.get(key), Section):
                old[key] = _without(old[key], "drafter")
    # The names keep the shipped spelling.
    return _merged(old, _without(own, "target", "bundled"), own.place)


def _merged(old: Section, new: Section, place: str) -> Section:
    both = Section(place)
    both.update({**old, **new})
    both.places = {**old.places, **new.places}
    for key in MERGED:
        if isinstance(old.get(key), Section) and isinstance(new.get(key), Section):
            both[key] = _merged(old[key], new[key], new[key].place)
    return both


def _without(section: Section, *keys: str) -> Section:
    left = Section(section.place)
    left.update({key: value for key, value in section.items() if key not in keys})
    left.places = section.places
    return left


def _check_aliases(rows: tuple[Row, ...], pairs: dict[str, Section]) -> None:
    """No alias or bundled name may be another row's name, or a name would silently mean something else."""
    owners = {row.key: row for row in rows}
    for row in rows:
        for alias in (*row.aliases, row.name):
            owner = owners.setdefault(alias.lower(), row)
            if owner is not row:
                first, second = pairs[owner.key], pairs[row.key]
                message = f"alias {alias!r} already names {owner.name} of {first.place}"
                At(second.place, row.name).fail(message, "choose another")
