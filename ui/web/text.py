"""Text of models and users for the page's Markdown: it stays readable, and nothing of it is obeyed as HTML.

The browser's Markdown and ours may disagree in odd corners. So no ``<`` that could open a tag is left anywhere
but in code fences which are written anew here, and nothing before a fence can swallow its first line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from markdown_it import MarkdownIt
from markdown_it.token import Token

from dflash_local.events import Piece
from dflash_local.service.pieces import marked
from dflash_local.ui.safety import MarkdownGuard

LANGUAGES = {"py": "python", "js": "javascript", "ts": "typescript", "sh": "bash", "shell": "bash", "mermaid": "text"}
ESCAPED = re.compile(r"[!-/:-@\[-`{-~]")  # every ASCII sign that Markdown may read
# Formulas stand between signs of the private area, which no text keeps: the browser's script, which sees no difference
# between prose and code, finds these alone. A dollar sign opens one by Pandoc's rule, so that prices stay prices.
MATH: list[dict[str, str | bool]] = [
    {"left": "\ue000", "right": "\ue001", "display": False},
    {"left": "\ue002", "right": "\ue003", "display": True},
]
UNMARKED = dict.fromkeys(map(ord, "\ue000\ue001\ue002\ue003"), "\ufffd")
FORMULA = (
    r"\$\$(?P<dollars>[^$]{1,2000}?)\$\$|\\\[(?P<square>.{1,2000}?)\\\]|\\\((?P<round>.{1,2000}?)\\\)"
    r"|(?<![\w$])\$(?P<dollar>(?![\s$])[^$\n]{0,500}?(?<![\s\\]))\$(?![\w$])"
)
# What is looked at in prose: formulas, escapes, backticks, what may open a tag, images, link targets, link definitions.
NOTED = re.compile(FORMULA + r"|\\[!-/:-@\[-`{-~]|`+|<(?=[A-Za-z/!?])|!\[|\]\(|\]:", re.DOTALL)
TARGET = re.compile(r"\s*(?:https?://|mailto:)", re.IGNORECASE)
ITEM = re.compile(r" {0,3}(?:[-*+]|\d{1,9}[.)])[ \t]")
FENCE = re.compile(r"^((?:[\s>*+\-]|\d{1,9}[.)])*?)(?=```|~~~)")


def _parser() -> MarkdownIt:
    """Parse blocks alone: where code begins and ends is all that is asked."""
    return MarkdownIt("commonmark", {"html": False}).enable(["table"]).disable(["inline", "reference"])


PARSER = _parser()


def markdown(text: str) -> str:
    """Make Markdown that the page may show, of a text without control characters."""
    lines = text.replace("\r\n", "\n").split("\n")
    done: list[str] = []
    at = 0
    for start, end, code in _blocks("\n".join(lines)):
        done += _prose(lines[at:start])
        _add_block(done, lines[start:end], start, code)
        at = end
    return "\n".join(done + _prose(lines[at:]))


def verbatim(text: str, language: str = "text") -> list[str]:
    """Make one block of code of the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    ticks = "`" * max(3, longest + 1)
    return [ticks + language, *text.removesuffix("\n").split("\n"), ticks]


def by_origin(pieces: Iterable[Piece]) -> str:
    """Show where tokens came from: the target's own underlined and in marks. One block of HTML."""
    runs: list[str] = []
    for piece in pieces:
        tag = "u" if piece.origin == "bonus" else "span"
        runs.append(f"<{tag}>{_entities(marked(piece))}</{tag}>")
    return f'<div class="df-origins">{"".join(runs)}</div>' if runs else ""


class SafeMarkdown:
    """One growing text as safe Markdown; what is finished is not looked at again.

    A text too long or too deeply nested to be laid out goes on as it is, in a block of code.
    """

    def __init__(self) -> None:
        self._guard = MarkdownGuard()
        self._done: list[str] = []
        self._tail = ""
        self._rest: list[str] = []  # since the guard gave up

    def feed(self, text: str) -> None:
        """Take the next bit."""
        text = text.translate(UNMARKED)
        if not self._guard.accepts(text):
            self._rest.append(text)
            return
        self._tail += text
        if "\n" in text:
            self._settle()

    @property
    def text(self) -> str:
        """Is the whole, as Markdown."""
        parts = [*self._done, markdown(self._tail)]
        if self._rest:
            parts += ["", *verbatim("".join(self._rest))]
        return "\n".join(parts)

    def _settle(self) -> None:
        """Put away the blocks that no further line can change: all before the last one that has begun."""
        whole = self._tail[: self._tail.rfind("\n")]
        starts = [start for start, _, _ in _blocks(whole)]
        if len(starts) > 1:
            lines = self._tail.split("\n")
            self._done.append(markdown("\n".join(lines[: starts[-1]])))
            self._tail = "\n".join(lines[starts[-1] :])


def _blocks(text: str) -> Iterator[tuple[int, int, list[Token]]]:
    """Find the blocks of the top level: first line, line after the last, and the code in each."""
    start, end = 0, 0
    code: list[Token] = []
    for token in PARSER.parse(text):
        if token.level == 0 and token.map and token.nesting >= 0:
            if end > start:
                yield start, end, code
            start, end = token.map
            code = []
        if token.type in ("fence", "code_block") and token.map:
            code.append(token)
    if end > start:
        yield start, end, code


def _add_block(done: list[str], lines: list[str], first: int, code: list[Token]) -> None:
    """Add one block; code that stands inside a list or a quotation and could hold a tag is moved out of it."""
    at, indent = 0, 0
    for token in code:
        start, end = (line - first for line in token.map or (first, first))
        info = (token.info.split() or [""])[0].lower()
        done += _prose(_dedented(lines[at:start], indent))
        if token.level and "<" not in "".join(lines[start:end]) and info != "mermaid":
            done += _dedented(lines[start:end], indent)
        else:
            done += [] if done and not done[-1].strip() else [""]  # no paragraph goes on over an empty line
            done += verbatim(token.content, _language(info))
            indent = max(indent, len(lines[start]) - len(lines[start].lstrip(" "))) if token.level else 0
        at = end
    done += _prose(_dedented(lines[at:], indent))


def _dedented(lines: list[str], indent: int) -> list[str]:
    """Take lines out of the list that code before them was moved out of."""
    if not indent:
        return lines
    moved: list[str] = []
    for line in lines:
        line = line[min(indent, len(line) - len(line.lstrip(" "))) :]
        if ITEM.match(line) and moved and moved[-1].strip():
            moved.append("")  # or its number would be part of the paragraph
        moved.append(line)
    return moved


def _language(info: str) -> str:
    name = LANGUAGES.get(info, info)
    return name if re.fullmatch(r"[a-z0-9+#._-]{1,20}", name) else "text"


def _prose(lines: list[str]) -> list[str]:
    if not lines:
        return []
    text = "\n".join(FENCE.sub(r"\1\\", line) for line in lines)
    return [_inline(part) for part in re.split(r"\n(?=[ \t]*(?:\n|$))", text)]


def _inline(text: str) -> str:
    parts: list[str] = []
    lonely: set[int] = set()  # lengths of backtick runs that have no partner further on
    at = 0
    while (found := NOTED.search(text, at)) is not None:
        parts.append(text[at : found.start()])
        sign, at = found.group(), found.end()
        if (kind := found.lastgroup) is not None:
            parts.append(_formula(found[kind], kind in ("dollars", "square")))
        elif sign.startswith("`"):
            close = _partner(text, sign, at, lonely)
            if close is None:
                parts.append(sign)
            else:
                parts.append(_code(sign, text[at:close]))
                at = close + len(sign)
        elif sign in ("<", "\\<"):
            parts.append("&lt;")
        elif sign == "![":
            parts.append("!\\[")
        elif sign == "](":
            parts.append(sign if TARGET.match(text, at) else "]\\(")
        else:
            parts.append("]\\:" if sign == "]:" else sign)
    return "".join((*parts, text[at:]))


def _formula(tex: str, display: bool) -> str:
    mark = MATH[display]
    return f"{mark['left']}{tex.replace('<', chr(92) + 'lt ')}{mark['right']}"


def _partner(text: str, ticks: str, at: int, lonely: set[int]) -> int | None:
    """Find where the run of as many backticks begins that ends the code."""
    if len(ticks) in lonely:
        return None
    found = re.compile(rf"(?<!`)`{{{len(ticks)}}}(?!`)").search(text, at)
    if found is None:
        lonely.add(len(ticks))
        return None
    return found.start()


def _code(ticks: str, content: str) -> str:
    """Write code in a line. Where it has a ``<``, as HTML of our own: that reads the same to every parser."""
    if "<" not in content:
        return f"{ticks}{content}{ticks}"
    return f"<code>{_entities(content.replace(chr(10), ' ').strip(' '))}</code>"


def _entities(text: str) -> str:
    """Make text, on one line, in which nothing is Markdown or HTML."""
    quoted = ESCAPED.sub(lambda sign: f"&#{ord(sign.group())};", text.translate(UNMARKED))
    return quoted.replace("\n", "&#10;")
