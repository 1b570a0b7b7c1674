"""Where code stands in a text as it was written, and what its parts are, for a screen that may change no character."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]
from pygments.token import Comment, Keyword, Name, Number, Operator, String  # type: ignore[import-untyped]
from pygments.util import ClassNotFound  # type: ignore[import-untyped]

Kind = Literal["fence", "code", "comment", "string", "number", "keyword", "name"]
BLOCK = re.compile(r"^ *(?P<ticks>`{3,}|~{3,})(?P<info>[^\n`]*)\n(?P<code>.*?)(?:^ *(?P=ticks)[ ]*$|\Z)", re.M | re.S)
KINDS: tuple[tuple[Kind, tuple[Any, ...]], ...] = (
    ("comment", (Comment, String.Doc)),
    ("string", (String,)),
    ("number", (Number, Keyword.Constant)),
    ("keyword", (Keyword, Operator.Word)),
    ("name", (Name.Function, Name.Class, Name.Decorator, Name.Builtin)),
)


@dataclass(frozen=True, slots=True)
class CodeRun:
    """Neighbouring characters of one kind; ``end`` is behind the last one."""

    start: int
    end: int
    kind: Kind


def code_runs(text: str) -> Iterator[CodeRun]:
    """Find the fenced code of a Markdown text, in order; between the runs stands prose."""
    for found in BLOCK.finditer(text):
        yield CodeRun(found.start(), found.start("code"), "fence")
        yield from _parts(found["code"], found["info"].strip().partition(" ")[0], found.start("code"))
        if found.end("code") < found.end():
            yield CodeRun(found.end("code"), found.end(), "fence")


def _parts(code: str, language: str, start: int) -> Iterator[CodeRun]:
    """Tell the parts of one block of code that begins at ``start``."""
    try:
        lexer = get_lexer_by_name(language or "text")
    except ClassNotFound:
        yield CodeRun(start, start + len(code), "code")
        return
    for at, token, value in lexer.get_tokens_unprocessed(code):
        kind: Kind = next((kind for kind, types in KINDS if any(token in each for each in types)), "code")
        yield CodeRun(start + at, start + at + len(value), kind)
