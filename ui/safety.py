"""Markdown only while it stays cheap to lay out, and HTML in it as the text that it is."""

from __future__ import annotations

from markdown_it import MarkdownIt

MAX_CHARS = 100_000  # of one reply as Markdown
MAX_LINE = 4_000
MAX_BLOCK_LINES = 400  # lines without an empty one between: each append lays out the last block anew
MAX_QUOTES = 12


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
