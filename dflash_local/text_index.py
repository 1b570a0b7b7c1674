"""Find what stood behind the longest earlier match of a text's last ids (prompt lookup). Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

SHORTEST, LONGEST = 3, 32  # ids of a match that are compared
NEWEST = 64  # earlier places that are compared, from the newest on


class Copies(NamedTuple):
    """Hold ids that may follow the first ``behind`` ids of a text, and the binary logarithm of how many matched."""

    behind: int
    ids: tuple[int, ...]
    confidence: float


class TextIndex:
    """Holds where each run of three ids ends in the text, so that a match is found without reading all of it."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # places behind a run, oldest first

    def truncate(self, length: int) -> None:
        """Forget what stands at ``length`` or behind it."""
        for end in range(len(self._text), max(length, SHORTEST - 1), -1):
            run = self._run(end)
            self._ends[run].pop()
            if not self._ends[run]:
                del self._ends[run]
        del self._text[length:]

    def find(self, ids: Sequence[int], count: int) -> Copies:
        """Copy at most ``count`` ids, and not more than matched.

        Args:
            ids: the whole text. It begins with what there was before, but for what was truncated.
        """
        for token in ids[len(self._text) :]:
            self._text.append(token)
            if len(self._text) >= SHORTEST:
                self._ends.setdefault(self._run(len(self._text)), []).append(len(self._text))
        text = self._text
        if len(text) < SHORTEST:
            return Copies(len(text), (), 0.0)
        earlier = self._ends[self._run(len(text))][-1 - NEWEST : -1]
        best, matched = 0, 0
        for end in reversed(earlier):
            length = SHORTEST
            while length < min(LONGEST, end) and text[end - length - 1] == text[-length - 1]:
                length += 1
            if length > matched:
                best, matched = end, length
        copied: list[int] = []
        for place in range(best, best + min(count, matched)):
            # A match may end within the last few ids: what repeats goes on repeating.
            copied.append(text[place] if place < len(text) else copied[place - len(text)])
        return Copies(len(text), tuple(copied), math.log2(max(matched, 1)))

    def _run(self, end: int) -> tuple[int, ...]:
        return tuple(self._text[end - SHORTEST : end])
