"""Model text for widgets: harmless characters, and Markdown only while it stays cheap to lay out."""

from __future__ import annotations

from collections.abc import Iterable

from markdown_it import MarkdownIt

from dflash_local.events import Channel, Origin, Piece
from dflash_local.terminal import TerminalFilter

MAX_CHARS = 100_000  # of one reply as Markdown
MAX_LINE = 4_000
MAX_BLOCK_LINES = 400  # lines without an empty one between: each append lays out the last block anew
MAX_QUOTES = 12


class SafePieces:
    """Makes the pieces of one reply safe; each channel is a text of its own."""

    def __init__(self) -> None:
        self._filters: dict[Channel, TerminalFilter] = {}
        self._last: dict[Channel, Origin] = {}

    def feed(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return the safe pieces, neighbours of one kind as one."""
        joined: list[Piece] = []
        for piece in pieces:
            self._last[piece.channel] = piece.origin
            text = self._filters.setdefault(piece.channel, TerminalFilter()).feed(piece.text)
            _join(joined, Piece(text, piece.channel, piece.origin))
        return joined

    def finish(self) -> list[Piece]:
        """Return what was held back."""
        joined: list[Piece] = []
        for channel, held in self._filters.items():
            _join(joined, Piece(held.finish(), channel, self._last[channel]))
        return joined


def _join(pieces: list[Piece], new: Piece) -> None:
    last = pieces[-1] if pieces else None
    if last is not None and (last.channel, last.origin) == (new.channel, new.origin):
        pieces[-1] = Piece(last.text + new.text, new.channel, new.origin)
    elif new.text:
        pieces.append(new)


class MarkdownGuard:
    """Watches a text as it comes and says when it is too much to be laid out as Markdown."""

    def __init__(self) -> None:
        self._chars = self._block = 0
        self._line = ""
        self._length = 0
        self.tripped = False

    def accepts(self, text: str) -> bool:
        """Take the next bit; False from the first one on that should be shown as it is."""
        self._chars += len(text)
        lines = text.split("\n")
        for index, part in enumerate(lines):
            if index:
                self._block = 0 if not self._length else self._block + 1
                self._line, self._length = "", 0
            self._line = (self._line + part)[:200]
            self._length += len(part)
            quotes = len(self._line) - len(self._line.lstrip("> \t"))
            deep = self._line[:quotes].count(">") > MAX_QUOTES or quotes > 100
            self.tripped |= deep or self._length > MAX_LINE or self._block > MAX_BLOCK_LINES
        self.tripped |= self._chars > MAX_CHARS
        return not self.tripped


def parser() -> MarkdownIt:
    """Make a parser with tables, where HTML is text: it is shown, never obeyed and never swallowed."""
    return MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
