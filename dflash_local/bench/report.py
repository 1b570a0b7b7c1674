"""What all reports share: their head, tables, rows by kind of prompt. Says *toy* wherever a toy was measured."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any, TypeVar

from dflash_local import tables
from dflash_local.bench import provenance
from dflash_local.catalog.bundled import Pair
from dflash_local.loaded import SessionFacts

SCHEMA = 1
TOTAL = "total"
TOY = "toy pair: test material, never a speed claim"
Item = TypeVar("Item")
Figures = TypeVar("Figures")
Found = tuple[dict[str, Any], list[str]]  # a report as JSON has it, and its lines for a person
Progress = Callable[[str, float], None]  # what is done now, and how far it is (0..1)
_NUMBER = re.compile(r"-|-?\d+(\.\d*)?(e[+-]\d+)?[x%]?")


def opening(kind: str, name: str, toy: bool) -> dict[str, Any]:
    """Return what every report begins with."""
    return {
        "report": kind,
        "schema": SCHEMA,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "pair": name,
        "note": TOY if toy else None,
        "versions": provenance.versions(),
    }


def header(kind: str, pair: Pair, facts: SessionFacts) -> dict[str, Any]:
    """Return what a report on a loaded pair begins with."""
    target = provenance.checkpoint_identity(pair.target)
    return {
        **opening(kind, pair.name if pair.bundled else target.name, pair.toy),
        "row": pair.row,
        "machine": provenance.machine(),
        "target": asdict(target),
        "drafter": asdict(provenance.checkpoint_identity(pair.drafter)) if pair.drafter else None,
        "adapted": facts.adapted or None,
        "engine": facts.engine,
        "dtype": facts.dtype,
        "weights": facts.weights,
        "stored": facts.stored,
        "device": facts.device,
        "load": asdict(facts.load),
        "notices": list(facts.notices),
    }


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns of any width, numbers to the right."""
    columns = [tables.Column(title, all(_NUMBER.fullmatch(row[i]) for row in rows)) for i, title in enumerate(titles)]
    return tables.table(columns, rows, sys.maxsize)


def by_kind(
    items: Sequence[Item], kind_of: Callable[[Item], str], row: Callable[[str, Sequence[Item]], Figures]
) -> list[Figures]:
    """Make a row of the items of each kind in order of appearance, and one of all when there are several kinds."""
    kinds = list(dict.fromkeys(map(kind_of, items)))
    rows = [row(kind, [one for one in items if kind_of(one) == kind]) for kind in kinds]
    return [*rows, row(TOTAL, items)] if len(kinds) > 1 else rows


def number(value: float | None, digits: int) -> str:
    """Show the value with so many decimals, a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def finite(value: Any) -> Any:
    """Return the value with infinities and NaN as null, which is all that JSON has for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
