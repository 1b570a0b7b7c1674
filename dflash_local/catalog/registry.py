"""The registry: the packaged registry.yaml with the user's own file laid over it, and names found in it. Torch-free."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta
from msgspec.structs import replace

from dflash_local.catalog import yaml_file
from dflash_local.catalog.row import (
    MAX_BLOCK,
    Block,
    Gib,
    Name,
    Published,
    Repo,
    RepoId,
    Revision,
    Row,
    RowFacts,
    Task,
    Variant,
)
from dflash_local.catalog.yaml_file import FIX
from dflash_local.errors import SettingsError, UnknownModelError
from dflash_local.schema import InvalidValue, Record, convert, keys_of
from dflash_local.terminal import safe_line

PAIR_PATH = re.compile(r"pairs\[(\d+)\](.*)", re.DOTALL)
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


Speed = Annotated[float, Meta(ge=0, le=1e7)]
Speeds = dict[Annotated[int, Meta(ge=1, le=65536)], Speed]  # by number of concurrent requests


class Revisions(Record, frozen=True):
    """Commits or branches to pull."""

    target: Revision | None = None
    drafter: Revision | None = None


class Sizes(Record, frozen=True):
    """GiB of the files that are pulled."""

    target: Gib | None = None
    drafter: Gib | None = None


class Cell(Record, frozen=True):
    """One task at one block size of a published table."""

    acceptance_length: Annotated[float, Meta(ge=1, le=MAX_BLOCK)] | None = None
    speedup: Speeds = {}
    tokens_per_s: Speeds = {}
    plain_tokens_per_s: Speeds = {}


class Table(Record, frozen=True):
    """One published table. ``concurrency``: requests at once of its cells without speeds; None is not known."""

    source: str
    generation: str
    tasks: dict[Task, dict[Block, Cell]]
    concurrency: Annotated[int, Meta(ge=1, le=65536)] | None = None


class PairEntry(RowFacts, frozen=True, kw_only=True):
    """A pair as it stands in a file, with what its ``Row`` has in another form."""

    target: RepoId | None = None
    drafter: RepoId | None = None
    name: Name | None = None
    revisions: Revisions = Revisions()
    sizes_gib: Sizes = Sizes()
    published: tuple[Table, ...] = ()

    def __post_init__(self) -> None:
        if (self.target is None) == (self.bundled is None):
            raise ValueError("has either a target or the name of a bundled pair: give 'target: owner/name'")
        if self.bundled_drafter is not None and (self.drafter is not None or self.target is None):
            raise ValueError("has 'bundled_drafter' as the drafter of a 'target', in place of 'drafter': leave one out")
        if self.target is not None and self.status != "announced" and not (self.drafter or self.bundled_drafter):
            raise ValueError("has no drafter: give 'drafter: owner/name', or 'status: announced'")
        if self.target is None and (self.name or self.package):
            raise ValueError("is bundled and has no 'name' and no 'package': leave them out")
        names = [(one.name or one.format).lower() for one in self.variants]
        if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):
            raise ValueError(f"has two variants that are called {twice!r}: give one of them another 'name'")


class RegistryFile(Record, frozen=True):
    """A whole file; pairs are read one by one, after the user's were laid over the shipped ones."""

    schema: Literal[1]
    pairs: tuple[dict[str, Any], ...] = ()


class RawPair(NamedTuple):
    """A pair before it is read, and the file and line of each path in it; of the pair itself under ``""``."""

    values: dict[str, Any]
    places: Mapping[str, str]

    @property
    def key(self) -> str:
        """Return what it is known by, in lower case: its target or bundled name; "" when it has neither."""
        names = (self.values.get("target"), self.values.get("bundled"))
        return next((name.lower() for name in names if isinstance(name, str)), "")

    def fail(self, path: str, problem: str, hint: str = "") -> SettingsError:
        """Return the error of what stands at a path, at the line of the nearest thing whose line is known."""
        while path not in self.places:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return SettingsError(
            safe_line(f"{self.places[path]}: {self.key or 'a pair'}: {problem}"), safe_line(hint or FIX)
        )


@dataclass(frozen=True)
class Registry:
    """All known pairs, the shipped ones first."""

    rows: tuple[Row, ...]

    def find(self, model: str) -> Row | None:
        """Return the row that any of its names means, in any case. UnknownModelError: there are several."""
        wanted = model.strip().lower()
        found = self._full.get(wanted) or self._bare.get(wanted) or ()
        if len(found) > 1:
            names = ", ".join(row.name for row in found)
            raise UnknownModelError(f"{model!r} is more than one model: {names}", "give the whole name, owner/name")
        return found[0] if found else None

    def find_variant(self, model: str) -> tuple[Row, Variant] | None:
        """Return the pre-quantised target of that repository, or file of one, and the row that lists it."""
        wanted = model.strip().lower()
        listed = ((row, item) for row in self.rows for item in row.variants)
        return next((found for found in listed if found[1].model.lower() == wanted), None)

    def nearest(self, model: str) -> tuple[str, ...]:
        """Return at most three names of rows that ``model`` may have meant, best first."""
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
    """Return the rows by name, each once."""
    index: dict[str, tuple[Row, ...]] = {}
    for name, row in named:
        if row not in index.get(name, ()):
            index[name] = (*index.get(name, ()), row)
    return index


def load(overlay: Path | None = None) -> Registry:
    """Read the packaged registry and the user's file over it, if there is one. SettingsError names file and line."""
    shipped = _shipped(*_packaged(PACKAGED))
    pairs = {key: pair for key, (pair, _) in shipped.items()}
    own: dict[str, RawPair] = {}
    if overlay is not None:
        with suppress(FileNotFoundError, NotADirectoryError):
            own = _pairs(yaml_file.content(overlay), str(overlay))
    pairs |= {key: _merge(pairs[key], pair) if key in pairs else pair for key, pair in own.items()}
    rows = tuple(_row(pair, overridden=True) if key in own else shipped[key][1] for key, pair in pairs.items())
    _check_names(rows, pairs)
    return Registry(rows)


@lru_cache(maxsize=1)
def _shipped(data: bytes, file: str) -> Mapping[str, tuple[RawPair, Row]]:
    """Return the packaged pairs and their rows, kept: screens and servers look at the registry time and again."""
    return {key: (pair, _row(pair)) for key, pair in _pairs(data, file).items()}


def _packaged(paths: tuple[Path, ...]) -> tuple[bytes, str]:
    """Return what the first of the files that is there holds, and its name."""
    for path in paths:
        try:
            data = yaml_file.content(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        if data.strip() != LINK:
            return data, str(path)
    looked = " nor ".join(map(str, paths))
    raise SettingsError(f"the registry is missing: neither {looked} exists", "install dflash-local again")


def _pairs(data: bytes, file: str) -> dict[str, RawPair]:
    """Return the pairs of a file by their keys."""
    document = yaml_file.parse(data, file)
    places: list[dict[str, str]] = []
    for path, line in document.lines.items():
        found = PAIR_PATH.match(path)
        if found and not found[2]:
            places.append({"": f"{file}, line {line}"})
        elif found:
            places[-1][found[2].lstrip(".")] = f"{file}, line {line}"
    whole = RawPair({"target": "the registry"}, {path: f"{file}, line {line}" for path, line in document.lines.items()})
    try:
        entries = convert(document.values, RegistryFile).pairs
    except InvalidValue as error:
        hint = "this version reads schema 1; update dflash-local" if error.path == "schema" else error.hint
        raise whole.fail(error.path, str(error), hint) from None
    pairs: dict[str, RawPair] = {}
    for pair in map(RawPair, entries, places):
        if pair.key in pairs:
            raise pair.fail("", f"the pair stands twice, first in {pairs[pair.key].places['']}", "keep one")
        pairs[pair.key] = pair
    return pairs


def _merge(shipped: RawPair, own: RawPair) -> RawPair:
    """Return the shipped pair with the fields that the user gives; mappings field by field, lists as a whole."""
    old = dict(shipped.values)
    known = old.get("drafter") or old.get("bundled_drafter")
    if "drafter" in own.values and known is not None and own.values["drafter"] != known:
        old = {name: value for name, value in old.items() if name not in OF_THE_DRAFTER}
        for key in {"revisions", "sizes_gib"} & set(old):
            old[key] = {name: value for name, value in old[key].items() if name != "drafter"}
    # The names keep the shipped spelling.
    new = {name: value for name, value in own.values.items() if name not in ("target", "bundled")}
    return RawPair(_merged(old, new), {**shipped.places, **own.places})


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    both = {**old, **new}
    for key in MERGED:
        if isinstance(old.get(key), dict) and isinstance(new.get(key), dict):
            both[key] = _merged(old[key], new[key])
    return both


def _row(pair: RawPair, *, overridden: bool = False) -> Row:
    """Return the row of a pair. SettingsError names file, line, pair, key and what is allowed."""
    try:
        entry = convert(_without_nulls(pair.values), PairEntry)
    except InvalidValue as error:
        raise pair.fail(error.path, str(error), error.hint) from None
    facts = {name: getattr(entry, name) for name in keys_of(RowFacts)}
    facts["variants"] = tuple(replace(one, name=one.name or one.format) for one in entry.variants)
    return Row(
        name=str(entry.name or entry.target or entry.bundled),
        target=Repo(entry.target, entry.revisions.target) if entry.target else None,
        drafter=Repo(entry.drafter, entry.revisions.drafter) if entry.drafter else None,
        target_gib=entry.sizes_gib.target,
        drafter_gib=entry.sizes_gib.drafter,
        published=tuple(chain.from_iterable(map(_cells, entry.published))),
        overridden=overridden,
        **facts,
    )


def _without_nulls(value: Any) -> Any:
    """Return a value without the keys that are null: they are as if they did not stand there."""
    if isinstance(value, dict):
        return {name: _without_nulls(inside) for name, inside in value.items() if inside is not None}
    return [_without_nulls(inside) for inside in value] if isinstance(value, list) else value


def _cells(table: Table) -> Iterator[Published]:
    """Yield the figures of a table, one by one for each task, block and concurrency."""
    for task, blocks in table.tasks.items():
        for block, cell in blocks.items():
            columns = (cell.speedup, cell.tokens_per_s, cell.plain_tokens_per_s)
            for number in sorted(set[int]().union(*columns)) or [0]:
                speedup, speed, plain = (column.get(number) for column in columns)
                # A cell has one length, whatever number of requests runs beside: that hardly changes it.
                length, requests = cell.acceptance_length, number or table.concurrency
                yield Published(task, block, table.generation, requests, length, speedup, speed, table.source, plain)


def _check_names(rows: tuple[Row, ...], pairs: dict[str, RawPair]) -> None:
    """Refuse an alias or own name that is another row's name: it would silently mean something else."""
    owners = {row.key: row for row in rows}
    for row in rows:
        for alias in (*row.aliases, row.name):
            owner = owners.setdefault(alias.lower(), row)
            if owner is not row:
                message = f"alias {alias!r} already names {owner.name} of {pairs[owner.key].places['']}"
                raise pairs[row.key].fail("", message, "choose another")
