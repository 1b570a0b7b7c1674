"""Finding any of many stop strings in text that arrives in bits (Aho and Corasick, CACM 18(6), 1975)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StopStrings:
    """One automaton over all stop strings, fed one character at a time.

    The earliest completed stop string wins, whatever tokens or blocks the text came in; of those
    completed by the same character the longest, so text ends before all of them.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._match = [0]
        for stop in stops:
            self._insert(stop)
        self._link()
        self._state = 0

    def _insert(self, stop: str) -> None:
        node = 0
        for character in stop:
            if character not in self._next[node]:
                self._next[node][character] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[node] + 1)
                self._match.append(0)
            node = self._next[node][character]
        self._match[node] = len(stop)

    def _link(self) -> None:
        """Failure links breadth first; a node also matches what the node it fails to matches."""
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._next[node].items():
                self._fail[child] = self._step(self._fail[node], character)
                self._match[child] = self._match[child] or self._match[self._fail[child]]
                queue.append(child)

    def _step(self, node: int, character: str) -> int:
        while node and character not in self._next[node]:
            node = self._fail[node]
        return self._next[node].get(character, 0)

    @property
    def held(self) -> int:
        """Characters at the end of the text that may still become a stop string."""
        return self._depth[self._state]

    def feed(self, character: str) -> int:
        """Length of the longest stop string this character completes, 0 for none."""
        self._state = self._step(self._state, character)
        return self._match[self._state]

    def reset(self) -> None:
        self._state = 0
