"""Laid-out text before it is painted: lines, what they become at a width, and tables. Knows no widget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from textual.content import Content

EMPTY = Content("")
BETWEEN = " │ "  # the columns of a table
LONGEST = 4_000  # characters of a line of plain text
LEAST = 4  # cells for text, however much stands before it


@dataclass(frozen=True, slots=True)
class TextLine:
    """A line that is wrapped where it is too long.

    Attributes:
        text: what it says, without line ends. lead: stands before its first row. hang: before the rows after it.
        paint: a style under the whole of each row. verbatim: cut where the row ends, not between words.
    """

    text: Content
    lead: Content = EMPTY
    hang: Content = EMPTY
    paint: str = ""
    verbatim: bool = False

    @property
    def plain(self) -> str:
        """Is what is copied of it."""
        return self.lead.plain + self.text.plain

    def at(self, _width: int) -> list[TextLine]:
        """The line itself: it has the same words at every width."""
        return [self]


@dataclass(frozen=True, slots=True)
class Rule:
    lead: Content = EMPTY
    style: str = "$text 60%"

    def at(self, width: int) -> list[TextLine]:
        """As a line of that width."""
        return [TextLine(Content.styled("─" * max(1, width - self.lead.cell_length), self.style), self.lead)]


@dataclass(frozen=True, slots=True)
class TextTable:
    """Rows of cells, the first one the head.

    Attributes:
        aligns: "left", "center" or "right" for each column.
    """

    rows: tuple[tuple[Content, ...], ...]
    aligns: tuple[str, ...]
    lead: Content = EMPTY
    hang: Content = EMPTY

    def at(self, width: int) -> list[TextLine]:
        """As lines; cells are wrapped where the columns do not fit side by side."""
        room = max(LEAST, width - self.lead.cell_length) - len(BETWEEN) * (len(self.aligns) - 1)
        widths = shares([max(row[slot].cell_length for row in self.rows) for slot in range(len(self.aligns))], room)
        lines: list[TextLine] = []
        for number, row in enumerate(self.rows):
            lines += [TextLine(text, hang=self.hang, verbatim=True) for text in self._beside(row, widths)]
            if number == 0:
                cross = "─" * (len(BETWEEN) // 2)
                across = f"{cross}┼{cross}".join("─" * cells for cells in widths)
                lines.append(TextLine(Content.styled(across, "$text 60%"), hang=self.hang, verbatim=True))
        return [replace(line, lead=self.hang if number else self.lead) for number, line in enumerate(lines)]

    def _beside(self, row: Sequence[Content], widths: Sequence[int]) -> list[Content]:
        cells = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
        lines = []
        for number in range(max(map(len, cells))):
            beside = (
                _aligned(cell[number] if number < len(cell) else EMPTY, width, align)
                for cell, width, align in zip(cells, widths, self.aligns, strict=True)
            )
            lines.append(Content.styled(BETWEEN, "$text 60%").join(beside).rstrip())
        return lines


Item = TextLine | Rule | TextTable


@dataclass(frozen=True, slots=True)
class TextRow:
    """What fits on one row of the screen.

    Attributes:
        line: the number of its line. start: where ``text`` begins in the line. hang: before it, not part of the line.
    """

    line: int
    start: int
    text: Content
    hang: Content
    paint: str

    def is_same(self, other: TextRow) -> bool:
        return (
            (self.line, self.start, self.paint) == (other.line, other.start, other.paint)
            and self.text.is_same(other.text)
            and self.hang.is_same(other.hang)
        )


def rows_of(line: TextLine, number: int, width: int) -> list[TextRow]:
    """Wrap the line with that number."""
    room = max(LEAST, width - max(line.lead.cell_length, line.hang.cell_length))
    if line.text.cell_length <= room:
        return [TextRow(number, 0, line.lead + line.text if line.lead else line.text, EMPTY, line.paint)]
    rows: list[TextRow] = []
    at, plain = 0, line.text.plain
    for piece in line.text.fold(room) if line.verbatim else line.text.wrap(room):
        at = max(at, plain.find(piece.plain, at))
        if rows:
            rows.append(TextRow(number, len(line.lead) + at, piece, line.hang, line.paint))
        else:
            rows.append(TextRow(number, 0, line.lead + piece, EMPTY, line.paint))
        at += len(piece)
    return rows


def shares(wanted: Sequence[int], room: int) -> list[int]:
    """Give each column the width it wants while there is room; else the wide ones share what is left."""
    widths = [max(1, cells) for cells in wanted]
    left, rest = room, sorted(range(len(widths)), key=lambda slot: widths[slot])
    for place, slot in enumerate(rest):
        widths[slot] = max(1, min(widths[slot], left // (len(rest) - place)))
        left -= widths[slot]
    return widths


def _wrapped(cell: Content, width: int) -> list[Content]:
    return [cell] if cell.cell_length <= width else cell.wrap(width)


def _aligned(text: Content, width: int, align: str) -> Content:
    spare = max(0, width - text.cell_length)
    before = {"left": 0, "center": spare // 2, "right": spare}[align]
    return text.pad(before, spare - before)


class PlainLayout:
    """Text as it is; the same face as Markdown's layout.

    Attributes:
        closed: finished lines. open: the last one.
    """

    def __init__(self, before: Sequence[Item] = ()) -> None:
        self.closed: list[Item] = list(before)
        self.open: list[Item] = []
        self._rest = EMPTY

    def add(self, text: str, style: str = "") -> None:
        """Take the next bit; a line too long to be laid out anew each time is cut."""
        *whole, self._rest = (self._rest + Content.styled(text, style)).split("\n", allow_blank=True)
        for line in whole:
            self.closed += map(TextLine, _bits(line))
        *parts, self._rest = _bits(self._rest)
        self.closed += map(TextLine, parts)
        self.open = [TextLine(self._rest)] if self._rest else []


def _bits(line: Content) -> list[Content]:
    return [line[at : at + LONGEST] for at in range(0, len(line), LONGEST)] or [EMPTY]
