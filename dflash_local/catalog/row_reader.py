"""The keys of a pair in a registry file, and the ``Row`` they make."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Annotated, Any

from dflash_local.catalog.row import Block, Gib, Name, Published, Repo, RepoId, Revision, Row, Task
from dflash_local.catalog.typed_fields import At, Between, Key, keys_of, read_keys
from dflash_local.catalog.yaml_file import Section

Speed = Annotated[float, Between(0, 1e7)]
Concurrency = Annotated[int, Between(1, 65536)]


@dataclass(frozen=True, slots=True)
class Revisions:
    """Commits or branches to pull."""

    target: Revision | None = None
    drafter: Revision | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the files that are pulled."""

    target: Gib | None = None
    drafter: Gib | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One task at one block size; speeds by number of concurrent requests."""

    acceptance_length: Annotated[float, Between(1, 64)] | None = None
    speedup: dict[Concurrency, Speed | None] = field(default_factory=dict)
    tokens_per_s: dict[Concurrency, Speed | None] = field(default_factory=dict)
    plain_tokens_per_s: dict[Concurrency, Speed | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Table:
    """One published table. ``concurrency``: requests at once of its cells without speeds; None is not known."""

    source: str
    generation: str
    tasks: dict[Task, dict[Block, Cell]]
    concurrency: Concurrency | None = None


@dataclass(frozen=True, slots=True)
class PairKeys:
    """The keys of a pair that a ``Row`` holds in another form."""

    target: RepoId | None = None
    drafter: RepoId | None = None
    bundled: Name | None = None
    name: Name | None = None
    revisions: Revisions = Revisions()
    sizes_gib: Sizes = Sizes()
    published: tuple[Table, ...] = ()


@lru_cache(maxsize=1)
def row_keys() -> dict[str, Key]:
    other_form = {"name", "target_gib", "drafter_gib", "overridden"}
    pair = keys_of(PairKeys)
    return {**pair, **{name: key for name, key in keys_of(Row).items() if name not in {*other_form, *pair}}}


def row(section: Section, *, overridden: bool = False) -> Row:
    """One row. SettingsError names file, line, pair, key and what is allowed."""
    at = At(section.place, next((str(section[key]) for key in ("target", "bundled") if section.get(key)), "a pair"))
    found = read_keys(row_keys(), section, at)
    pair = PairKeys(**{name: found.pop(name) for name in keys_of(PairKeys) if name in found})
    if (pair.target is None) == (pair.bundled is None):
        at.fail("a pair has either a target or the name of a bundled pair", "give 'target: owner/name'")
    own = found.get("bundled_drafter")
    if pair.target is not None and pair.drafter is None and own is None and found.get("status") != "announced":
        at.fail("there is no drafter", "give 'drafter: owner/name', or 'status: announced'")
    if own is not None and (pair.drafter is not None or pair.target is None):
        at.fail("'bundled_drafter' is the drafter of a 'target', in place of 'drafter'", "leave one of them out")
    if pair.target is None and (pair.name or "package" in found):
        at.fail("a bundled pair has no 'name' and no 'package'", "leave them out")
    if "variants" in found:
        found["variants"] = tuple(replace(one, name=one.name or one.format) for one in found["variants"])
        seen: set[str] = set()
        for variant in found["variants"]:
            if variant.name.lower() in seen:
                at.fail(f"two variants are called {variant.name!r}", "give one of them another 'name'")
            seen.add(variant.name.lower())
    return Row(
        name=str(pair.name or pair.target or pair.bundled),
        target=Repo(pair.target, pair.revisions.target) if pair.target else None,
        drafter=Repo(pair.drafter, pair.revisions.drafter) if pair.drafter else None,
        bundled=pair.bundled,
        target_gib=pair.sizes_gib.target,
        drafter_gib=pair.sizes_gib.drafter,
        published=tuple(chain.from_iterable(map(_cells, pair.published))),
        overridden=overridden,
        **found,
    )


def key_of(section: Section) -> str:
    """What a pair is known by, in lower case: its target or bundled name; "" when it has neither."""
    names = (section.get("target"), section.get("bundled"))
    return next((name.lower() for name in names if isinstance(name, str) and name), "")


def _cells(table: Table) -> list[Published]:
    """The figures of a table, one by one for each task, block and concurrency."""
    found = []
    for task, blocks in table.tasks.items():
        for block, cell in blocks.items():
            names = ("speedup", "tokens_per_s", "plain_tokens_per_s")
            columns: dict[str, dict[int, float | None]] = {name: getattr(cell, name) for name in names}
            figures_of = (item for column in columns.values() for item in column.items())
            measured = {concurrency for concurrency, one in figures_of if one is not None}
            numbers: list[int | None] = [*sorted(measured)] or [None]
            for number in numbers:
                figures: dict[str, Any] = {name: column.get(number or 0) for name, column in columns.items()}
                # A cell has one length, whatever number of requests runs beside: that hardly changes it.
                length, origin, requests = cell.acceptance_length, table.source, number or table.concurrency
                found.append(Published(task, block, table.generation, requests, length, source=origin, **figures))
    return found
