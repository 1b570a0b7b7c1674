"""Regular expressions over names of modules, matched in a time that is bounded by the lengths of pattern and name.

``re`` backtracks, and a hostile pattern can keep it busy for years. Here a set of positions in the name, one bit each,
passes through the pattern once. Not supported is what no published configuration uses: groups that repeat, look-ahead
after the beginning, look-behind, back references, flags.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache

MAX_DEPTH = 20
Step = Callable[[str, int], int]  # the name and the positions where a part may begin, to those where it may end

# A run of literal characters that no quantifier follows; an escape; a class of characters; the start of a group; a
# quantifier; any other character.
_TOKEN = re.compile(
    r"(?:(?:[\w-]|\\\W)(?![*+?{]))+|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?[:=!])?|[*+?]\??|\{\d(?:,\d?)?\}\??|.",
    re.S,
)
_RUN = re.compile(r"(?:[\w-]|\\\W)+")
_ESCAPES = (r"\d", r"\D", r"\w", r"\W", r"\s", r"\S")
_LOOK_AHEAD = ("(?=", "(?!")


class PatternError(ValueError):
    """The pattern is malformed or uses what is not supported; the text says what."""


def parts(pattern: str) -> int:
    """Count the parts, which a match takes time in proportion to."""
    return len(_TOKEN.findall(pattern))


@cache
def compiled(pattern: str) -> Step:
    """Return the pattern as one step; it matches a name from its beginning where ``step(name, 1)`` is not 0.

    Raises:
        PatternError: see there.
    """
    return _Parser(pattern).whole()


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._tokens = _TOKEN.findall(pattern)[::-1]  # the next one last
        self._begun = False  # something that may take a character was read, or a look-ahead is open

    def whole(self) -> Step:
        step = self._choice(0)
        if self._tokens:
            raise PatternError("a parenthesis that was not opened")
        return step

    def _choice(self, depth: int) -> Step:
        branches = [self._sequence(depth)]
        while self._next("|"):
            self._tokens.pop()
            branches.append(self._sequence(depth))
        return branches[0] if len(branches) == 1 else _any_of(branches)

    def _sequence(self, depth: int) -> Step:
        steps = []
        while self._tokens and not self._next("|", ")"):
            steps.append(self._item(self._tokens.pop(), depth))
        return _in_order(steps)

    def _item(self, token: str, depth: int) -> Step:
        if token == "^":
            return lambda name, starts: starts & 1
        if token == "$":
            return lambda name, starts: starts & 1 << len(name)
        if token.startswith("("):
            return self._group(token, depth + 1)
        if token[0] in "*+?{":
            raise PatternError(f"{token!r} where nothing can repeat")
        self._begun = True
        if _RUN.fullmatch(token) and not self._quantified():
            return _literal(re.sub(r"\\(.)", r"\1", token))
        return _repeated(_positions(token), *_limits(self._tokens.pop() if self._quantified() else "{1}"))

    def _group(self, token: str, depth: int) -> Step:
        if token == "(" and self._tokens and self._tokens[-1][0] == "?":
            raise PatternError("a group other than (, (?:, (?= and (?!")
        if depth > MAX_DEPTH:
            raise PatternError(f"groups nested more than {MAX_DEPTH} deep")
        ahead = token in _LOOK_AHEAD
        if ahead and self._begun:
            raise PatternError("a look-ahead that is not at its beginning")
        self._begun |= ahead
        inside = self._choice(depth)
        if not self._tokens:
            raise PatternError("a group that is not closed")
        self._tokens.pop()
        if ahead:
            self._begun, inside = False, _looking_ahead(inside, token == "(?=")
        elif self._next("?", "??"):
            self._tokens.pop()
            inside = _any_of([inside, lambda name, starts: starts])
        if self._quantified():
            raise PatternError("a group that repeats")
        return inside

    def _next(self, *tokens: str) -> bool:
        return bool(self._tokens) and self._tokens[-1] in tokens

    def _quantified(self) -> bool:
        return bool(self._tokens) and self._tokens[-1][0] in "*+?{"


def _limits(quantifier: str) -> tuple[int, int | None]:
    """Return least and most repetitions; None for no limit."""
    if quantifier[0] in "*+?":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[quantifier[0]]
    found = re.match(r"\{(\d+)(,?)(\d*)\}", quantifier)
    if found is None:
        raise PatternError("'{' that is no quantifier")
    least = int(found[1])
    return least, int(found[3]) if found[3] else None if found[2] else least


def _positions(token: str) -> Callable[[str], int]:
    """Return what finds, as bits, where in a name a character stands that the token stands for."""
    if token == ".":
        return lambda name: (1 << len(name)) - 1
    if token[0] == "\\" and token not in _ESCAPES and (token[1:].isalnum() or len(token) == 1):
        raise PatternError(f"the escape {token!r}")
    try:
        character = re.compile(token if token[0] in "\\[" else re.escape(token))
    except re.error as error:
        raise PatternError(f"{token[:20]!r}, of which re says: {error}") from None
    return lambda name: sum(1 << found.start() for found in character.finditer(name))


def _literal(text: str) -> Step:
    def step(name: str, starts: int) -> int:
        ends, at = 0, name.find(text)
        while at >= 0:
            ends |= (starts >> at & 1) << at + len(text)
            at = name.find(text, at + 1)
        return ends

    return step


def _repeated(positions: Callable[[str], int], least: int, most: int | None) -> Step:
    def step(name: str, starts: int) -> int:
        here = positions(name)
        for _ in range(least):
            starts = (starts & here) << 1
        if most is None:  # an addition carries each start through the run of positions that it stands in
            return (((starts & here) + here) ^ here) | starts
        for _ in range(most - least):
            starts |= (starts & here) << 1
        return starts

    return step


def _in_order(steps: Sequence[Step]) -> Step:
    def step(name: str, starts: int) -> int:
        for each in steps:
            starts = each(name, starts)
            if not starts:
                break
        return starts

    return step


def _any_of(branches: Sequence[Step]) -> Step:
    def step(name: str, starts: int) -> int:
        ends = 0
        for branch in branches:
            ends |= branch(name, starts)
        return ends

    return step


def _looking_ahead(inside: Step, wanted: bool) -> Step:
    """Return the step of a look-ahead at the beginning: there is one start at most."""

    def step(name: str, starts: int) -> int:
        return starts if starts and bool(inside(name, starts)) is wanted else 0

    return step
