"""The registry: the packaged registry.yaml with the user's own file laid over it, and names found in it.

Knows no torch and no network; whether a row's repositories exist is found out by pulling.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from dflash_local.catalog import row_reader, yaml_reader
from dflash_local.catalog import yaml_values as read
from dflash_local.catalog.row import Row, Variant
from dflash_local.catalog.yaml_reader import Node
from dflash_local.errors import SettingsError, UnknownModelError

SCHEMA = 1
# The link inside the package, then what it leads to in a checkout without links.
PACKAGED = (
    Path(__file__).resolve().parent / "registry.yaml",
    Path(__file__).resolve().parent.parent.parent / "registry.yaml",
)
# What says nothing about a pair any more once its drafter is another one.
OF_THE_DRAFTER = ("fingerprints", "mirrors", "drafter_licence", "published", "acceptance_band", "server", "thinking")
MERGED = ("revisions", "sizes_gib", "server", "vllm", "sglang", "environment")
MAX_SUGGESTIONS = 3


@dataclass(frozen=True)
class Registry:
    """All known pairs, the shipped ones first."""

    rows: tuple[Row, ...]

    def find(self, model: str) -> Row | None:
        """The row a name stands for, in any case of letters: target, bare name, alias, drafter or mirror.

        Raises:
            UnknownModelError: a bare name fits several rows; lists them.
        """
        wanted = model.strip().lower()
        found = self._full.get(wanted) or self._bare.get(wanted) or ()
        if len(found) > 1:
            names = ", ".join(row.name for row in found)
            raise UnknownModelError(f"{model!r} is more than one model: {names}", "give the whole name, owner/name")
        return found[0] if found else None

    def find_variant(self, model: str) -> tuple[Row, Variant] | None:
        """The pre-quantised target of that repository, and the row that lists it."""
        wanted = model.strip().lower()
        listed = ((row, item) for row in self.rows for item in row.variants)
        return next(((row, item) for row, item in listed if item.repo.lower() == wanted), None)

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
        index: dict[str, tuple[Row, ...]] = {}
        for row in self.rows:
            for name in {name.lower() for name in row.names}:
                index[name] = (*index.get(name, ()), row)
        return index

    @cached_property
    def _bare(self) -> dict[str, tuple[Row, ...]]:
        index: dict[str, tuple[Row, ...]] = {}
        for row in self.rows:
            for name in {name.lower().partition("/")[2] for name in row.names if "/" in name}:
                index[name] = (*index.get(name, ()), row)
        return index


def load(overlay: Path | None = None) -> Registry:
    """Read the packaged registry and the user's file over it.

    Args:
        overlay: the user's own registry.yaml; one that does not exist changes nothing.

    Raises:
        SettingsError: one of the files is missing, unreadable or wrong; names file and line.
    """
    shipped = _shipped(*_packaged(PACKAGED))
    pairs = {key: pair for key, (pair, _) in shipped.items()}
    changed: set[str] = set()
    if overlay is not None:
        try:
            own = _pairs(yaml_reader.read(overlay))
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
def _shipped(data: bytes, file: str) -> Mapping[str, tuple[Node, Row]]:
    """The pairs of the packaged file and their rows, kept: screens and servers look at the registry time and again."""
    return {key: (pair, row_reader.row(pair)) for key, pair in _pairs(yaml_reader.parse(data, file)).items()}


def _packaged(paths: tuple[Path, ...]) -> tuple[bytes, str]:
    """What the first of the files that is there holds, and its name."""
    for path in paths:
        try:
            return yaml_reader.content(path), str(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
    looked = " nor ".join(map(str, paths))
    raise SettingsError(f"the registry is missing: neither {looked} exists", "install dflash-local again")


def _pairs(root: Node) -> dict[str, Node]:
    """The pairs of a file by the lower-case name of the target."""
    if read.is_null(root):
        root.fail("expected a mapping, got nothing", f"start with 'schema: {SCHEMA}' and 'pairs:'")
    fields = read.mapping(root, ("schema", "pairs"), "the registry")
    schema = fields.get("schema")
    if schema is None:
        root.fail("key 'schema' is missing", f"start with 'schema: {SCHEMA}'")
    if schema.value != str(SCHEMA):
        schema.fail(f"schema {schema.value!r} is not known", f"this version reads schema {SCHEMA}; update dflash-local")
    pairs: dict[str, Node] = {}
    for pair in read.items(fields.get("pairs"), "pairs"):
        read.mapping(pair, row_reader.ROW_KEYS, "a pair")
        key = row_reader.key_of(pair)
        if not key:
            pair.fail("a pair without target", "give 'target: owner/name'")
        if key in pairs:
            pair.fail(f"the pair {key!r} stands twice, first in line {pairs[key].line}", "keep one")
        pairs[key] = pair
    return pairs


def _merge(shipped: Node, own: Node) -> Node:
    """The shipped pair with the fields that the user gives; mappings field by field, lists as a whole."""
    old = _fields(shipped)
    # The names keep the shipped spelling.
    new = {key: value for key, value in _fields(own).items() if key not in ("target", "bundled")}
    drafter = new.get("drafter")
    if drafter is not None and "drafter" in old and drafter.value != old["drafter"].value:
        old = {key: value for key, value in old.items() if key not in OF_THE_DRAFTER}
        for key in ("revisions", "sizes_gib"):
            if key in old:
                kept = {role: value for role, value in _fields(old[key]).items() if role != "drafter"}
                old[key] = Node(kept, old[key].file, old[key].line)
    return Node(_merged(old, new), own.file, own.line)


def _merged(old: dict[str, Node], new: dict[str, Node]) -> dict[str, Node]:
    both = dict(old)
    for key, value in new.items():
        deep = key in MERGED and key in old and isinstance(value.value, dict) and isinstance(old[key].value, dict)
        both[key] = Node(_merged(_fields(old[key]), _fields(value)), value.file, value.line) if deep else value
    return both


def _fields(node: Node) -> dict[str, Node]:
    return node.value if isinstance(node.value, dict) else {}


def _check_aliases(rows: tuple[Row, ...], pairs: dict[str, Node]) -> None:
    """No alias or bundled name may be another row's name, or a name would silently mean something else."""
    owners = {row.name.lower(): row for row in rows}
    for row in rows:
        for alias in row.aliases:
            owner = owners.setdefault(alias.lower(), row)
            if owner is not row:
                first, second = pairs[owner.name.lower()], pairs[row.name.lower()]
                where = f"line {first.line}" if first.file == second.file else f"{first.file}, line {first.line}"
                second.fail(f"alias {alias!r} already names {owner.name} of {where}", "choose another")
