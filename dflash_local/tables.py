"""Columns, sections and amounts as text for any width; every cell is made harmless and one line."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dflash_local import terminal

GIB = 2**30
UNKNOWN = "unknown"
GAP = "  "
MIN_CELL = 8
LABEL = 14  # columns of a section's labels


@dataclass(frozen=True, slots=True)
class Column:
    """A column's title; numbers stand to the right; only a ``shrinks`` one is cut when space is short."""

    title: str
    right: bool = False
    shrinks: bool = False


def amount(size: float | None) -> str:
    """Return a number of bytes with a unit, or unknown."""
    return UNKNOWN if size is None else terminal.byte_size(size)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where it is not one."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def gib(size: float | None, computed: bool = False) -> str:
    """Return a size that is in GiB already: ``20.39 GiB`` as it is quoted, ``~20.39 GiB`` where it is computed."""
    return f"{'~' if computed else ''}{amount(None if size is None else size * GIB)}"


def in_gib(size: float | None) -> float | None:
    """Return a number of bytes as the GiB figure of a JSON field."""
    return None if size is None else round(size / GIB, 3)


def tokens(count: int | None) -> str:
    """Return a number of tokens, or unknown."""
    return UNKNOWN if count is None else f"{count:,}"


def cut(text: str, width: int, mark: str = "…") -> str:
    """Return the text in at most ``width`` columns; a cut one ends in the mark."""
    return text if len(text) <= width else text[: max(0, width - len(mark))] + mark


def natural_width(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> int:
    """Return how many columns of the screen a table takes when nothing is cut."""
    widths = _widths(columns, [[terminal.safe_line(cell) for cell in row] for row in rows])
    return sum(widths) + len(GAP) * (len(columns) - 1)


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, mark: str = "…") -> list[str]:
    """Return a line of titles and one per row, aligned, in ``width`` if columns may shrink; none for empty columns."""
    safe = [[terminal.safe_line(cell) for cell in row] for row in rows]
    kept = [at for at in range(len(columns)) if not safe or any(row[at] for row in safe)]
    columns = [columns[at] for at in kept]
    safe = [[row[at] for at in kept] for row in safe]
    widths = _widths(columns, safe)
    over = sum(widths) + len(GAP) * (len(columns) - 1) - width
    for at in sorted(range(len(columns)), key=lambda at: -widths[at]):
        if over > 0 and columns[at].shrinks:
            less = min(over, max(0, widths[at] - MIN_CELL))
            widths[at] -= less
            over -= less
    titles = [column.title for column in columns]
    return [_line(row, columns, widths, mark) for row in (titles, *safe)]


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(column.title), *(len(row[at]) for row in rows), 0) for at, column in enumerate(columns)]


def _line(row: Sequence[str], columns: Sequence[Column], widths: Sequence[int], mark: str) -> str:
    cells = []
    for cell, column, width in zip(row, columns, widths, strict=True):
        shown = cut(cell, width, mark)
        cells.append(shown.rjust(width) if column.right else shown.ljust(width))
    return GAP.join(cells).rstrip()


def field(label: str, text: str, width: int, indent: int = LABEL) -> list[str]:
    """Return ``label         text``, the text wrapped beside its label; words longer than a line stay whole."""
    first, *rest = wrapped(text, width - indent, hanging=0)
    return [f"{label:<{indent}}{first}".rstrip(), *(f"{'':<{indent}}{line}" for line in rest)]


def wrapped(text: str, width: int, hanging: int = 2) -> list[str]:
    """Return a sentence in lines of at most ``width``, those after the first a little further in."""
    whole = textwrap.TextWrapper(max(20, width), subsequent_indent=" " * hanging, break_long_words=False)
    whole.break_on_hyphens = False
    return whole.wrap(terminal.safe_line(text)) or [""]


def indented(lines: Iterable[str], by: int = 2) -> list[str]:
    """Return the lines, each a few columns in."""
    return [f"{' ' * by}{line}".rstrip() for line in lines]


def rate(value: float) -> str:
    """Return a rate in tokens per second: two digits, or whole ones."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.2g}"


def listing(names: Sequence[str], limit: int = 5) -> str:
    """Return ``a, b, c and 4 more``."""
    if len(names) <= limit:
        return ", ".join(names)
    return f"{', '.join(names[:limit])} and {len(names) - limit} more"
