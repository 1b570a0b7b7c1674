"""Markdown as lines, for a text that grows at its end: what is finished is laid out once. Knows no widget."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from markdown_it.token import Token
from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]
from pygments.util import ClassNotFound  # type: ignore[import-untyped]
from textual.content import Content, Span
from textual.highlight import highlight
from textual.style import Style

from dflash_local.ui.safety import parser
from dflash_local.ui.tui.lines import EMPTY, Item, Rule, TextLine, TextTable

CODE_LINES = 40  # of a long code block that stay open at least: each addition colours them anew
BULLETS = "•▪‣◦"
CODE = "on $panel"
HEADINGS = {"h1": "bold underline $text-primary", "h2": "bold underline $text-primary"}
HEADING = "bold $text-primary"
SPANS = {
    "strong": "bold",
    "em": "italic",
    "s": "strike",
    "code": "$text-warning on $panel",
    "link": "underline $text-accent",
}


class MarkdownLayout:
    """Lays Markdown out as it comes.

    Attributes:
        closed: what later text cannot change any more. open: the rest; made anew by each addition.
    """

    def __init__(self) -> None:
        self.closed: list[Item] = []
        self.open: list[Item] = []
        self._parser = parser()
        self._source = ""  # of what is open
        self._due = False  # an empty line, before what is open

    @property
    def open_size(self) -> int:
        """Counts the characters that are laid out anew by each addition."""
        return len(self._source)

    def add(self, text: str) -> None:
        """Take the next bit."""
        self._source += text
        tokens = self._parser.parse(self._source)
        last = _last_part(tokens)
        writer = _Writer(self._due)
        writer.write(tokens[:last])
        done, due = len(writer.items), writer.due
        writer.write(tokens[last:])
        self.closed += writer.items[:done]
        self.open = writer.items[done:]
        lines = self._source.split("\n")
        begin = _first_line(tokens[last]) if last < len(tokens) else 0
        self._source, self._due = "\n".join(lines[begin:]), due
        if last < len(tokens) and tokens[last].type == "fence" and tokens[last].level == 0:
            self._close_code(tokens[last], lines)

    def _close_code(self, fence: Token, lines: list[str]) -> None:
        """Let go of the earlier lines of a long code block, best where something begins at the margin."""
        code = fence.content.split("\n")
        if len(code) < 3 * CODE_LINES:
            return
        cut = len(code) - CODE_LINES
        margins = (at for at in range(cut, CODE_LINES, -1) if code[at][:1].strip() and not code[at - 1].strip())
        cut = next(margins, cut)
        blank = len(self.open) - len(fence.content.rstrip("\n").split("\n"))
        self.closed += self.open[: blank + cut]
        self.open = self.open[blank + cut :]
        begin = _first_line(fence)
        self._source = "\n".join([lines[begin], *lines[begin + 1 + cut :]])
        self._due = False


def _last_part(tokens: Sequence[Token]) -> int:
    """Find where the block begins that later text may change: the last one; of a list, its last item."""
    blocks = [place for place, token in enumerate(tokens) if token.level == 0 and token.nesting >= 0]
    if not blocks:
        return 0
    block = blocks[-1]
    if tokens[block].type in ("bullet_list_open", "ordered_list_open"):
        opened = range(block, len(tokens))
        items = [at for at in opened if tokens[at].type == "list_item_open" and tokens[at].level == 1]
        return items[-1] if len(items) > 1 else block
    return block


def _first_line(token: Token) -> int:
    return token.map[0] if token.map else 0


@dataclass(slots=True)
class _Prefix:
    """Stands before the lines of a quote or of a list's item."""

    first: Content
    rest: Content
    used: bool = False


class _Writer:
    """Makes lines of tokens, in order.

    Attributes:
        due: an empty line belongs before the next block.
    """

    def __init__(self, due: bool) -> None:
        self.items: list[Item] = []
        self.due = due
        self._prefixes: list[_Prefix] = []
        self._lists = 0
        self._style = ""
        self._cells: list[list[Content]] | None = None
        self._aligns: list[str] = []

    def write(self, tokens: Sequence[Token]) -> None:
        for token in tokens:
            kind = token.type
            if kind == "inline":
                self._inline(token)
            elif kind in ("fence", "code_block"):
                self._code(token)
            elif kind == "hr":
                self._begin()
                self.items.append(Rule(self._lead()))
                self.due = True
            elif kind in ("paragraph_close", "heading_close"):
                self.due, self._style = not token.hidden, ""
            elif kind == "heading_open":
                self._style = HEADINGS.get(token.tag, HEADING)
            elif kind.startswith(("table", "tr", "th_", "td_")):
                self._table(token)
            else:
                self._nest(token)

    def _nest(self, token: Token) -> None:
        kind = token.type
        if kind == "blockquote_open":
            bar = Content.styled("▌ ", "$text 60%")
            self._prefixes.append(_Prefix(bar, bar))
        elif kind == "list_item_open":
            bullet = f"{token.info}{token.markup}" if token.info else BULLETS[(self._lists - 1) % len(BULLETS)]
            first = Content.styled(f"{bullet} ", "$text-primary")
            self._prefixes.append(_Prefix(first, Content(" " * first.cell_length)))
        elif kind in ("blockquote_close", "list_item_close"):
            if not self._prefixes[-1].used:  # nothing in it
                self._begin()
                self.items.append(TextLine(EMPTY, self._lead()))
            self._prefixes.pop()
            self.due = self.due or kind == "blockquote_close"
        elif kind.endswith("_list_open"):
            self._lists += 1
        elif kind.endswith("_list_close"):
            self._lists -= 1
            self.due = self.due or not self._lists

    def _begin(self) -> None:
        """Put an empty line between blocks, with the marks of the quote that it is in."""
        if self.due:
            marks = [prefix.rest for prefix in takewhile(lambda prefix: prefix.used, self._prefixes)]
            self.items.append(TextLine(EMPTY, _joined(marks).rstrip()))
            self.due = False

    def _lead(self) -> Content:
        lead = _joined([prefix.rest if prefix.used else prefix.first for prefix in self._prefixes])
        for prefix in self._prefixes:
            prefix.used = True
        return lead

    @property
    def _hang(self) -> Content:
        return _joined([prefix.rest for prefix in self._prefixes])

    def _inline(self, token: Token) -> None:
        text = inline(token)
        if self._cells is not None:
            self._cells[-1].append(text)
            return
        self._begin()
        for part in text.split("\n", allow_blank=True):
            styled = part.stylize_before(self._style) if self._style else part
            self.items.append(TextLine(styled, self._lead(), self._hang))

    def _code(self, token: Token) -> None:
        self._begin()
        words = token.info.split()
        code = coloured(token.content.rstrip("\n"), words[0] if words else "")
        margin = Content(" ")
        for part in code.split("\n", allow_blank=True):
            lead = self._lead() + margin
            self.items.append(TextLine(part, lead, self._hang + margin, CODE, verbatim=True))
        self.due = True

    def _table(self, token: Token) -> None:
        if token.type == "table_open":
            self._begin()
            self._cells, self._aligns = [], []
        elif token.type == "tr_open" and self._cells is not None:
            self._cells.append([])
        elif token.type == "th_open":
            align = re.search(r"text-align:(\w+)", str(token.attrs.get("style", "")))
            self._aligns.append(align[1] if align else "left")
        elif token.type == "table_close" and self._cells is not None:
            columns = len(self._aligns)
            head = tuple(cell.stylize_before("bold") for cell in self._cells[0])
            body = [tuple([*row, *[EMPTY] * columns][:columns]) for row in self._cells[1:]]
            lead, self._cells = self._lead(), None
            self.items.append(TextTable((head, *body), tuple(self._aligns), lead, self._hang))
            self.due = True


def _joined(parts: Sequence[Content]) -> Content:
    return EMPTY.join(parts) if parts else EMPTY


def inline(token: Token) -> Content:
    """Style words by their emphasis; a link keeps its address in the style, as ``href``."""
    words: list[str] = []
    spans: list[Span] = []
    begun: list[tuple[int, str | Style]] = []
    at = 0
    for child in token.children or ():
        text, kind = "", child.type
        if kind == "text":
            text = re.sub(r"\s+", " ", child.content)
        elif kind in ("softbreak", "hardbreak"):
            text = " " if kind == "softbreak" else "\n"
        elif kind == "code_inline":
            text = child.content
            spans.append(Span(at, at + len(text), SPANS["code"]))
        elif kind == "image":
            text = f"[image: {child.content}]"
            spans.append(Span(at, at + len(text), _linked(child.attrs.get("src", ""))))
        elif child.nesting > 0:
            name = kind.removesuffix("_open")
            begun.append((at, _linked(child.attrs.get("href", "")) if name == "link" else ""))
        elif child.nesting < 0:
            begin, link = begun.pop()
            spans.append(Span(begin, at, SPANS.get(kind.removesuffix("_close"), "")))
            spans += [Span(begin, at, link)] if link else []
        else:
            text = child.content
        words.append(text)
        at += len(text)
    return Content("".join(words), spans)


def _linked(address: object) -> Style:
    return Style.from_meta({"href": str(address)})


def coloured(code: str, language: str) -> Content:
    """Colour code as its language has it; as it is where the language is not known."""
    code = code.expandtabs(4)
    return highlight(code, language=language) if _known(language) else Content(code)


@lru_cache(maxsize=64)
def _known(language: str) -> bool:
    """Tell whether a language can be coloured; asking each time would look through every package."""
    if not language:
        return False
    try:
        get_lexer_by_name(language)
    except ClassNotFound:
        return False
    return True
