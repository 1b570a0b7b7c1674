"""Long pasted texts, and the tokens such as ``[200 lines pasted]`` that stand for them in a field."""

from __future__ import annotations

import re

FOLD_LINES = 5  # more of them, or of characters, fold
FOLD_CHARACTERS = 1_000
_TOKEN = re.compile(r"\[[\d,]+ (?:lines|characters) pasted(?:, \d+)?\]")


class Pastes:
    """The texts behind the tokens of one field; none is forgotten, since undo and history bring tokens back."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def fold(self, text: str) -> str:
        """What stands for a pasted text: itself, or a token where it is long or quotes a token."""
        lines = text.count("\n") + (not text.endswith("\n"))
        if lines <= FOLD_LINES and len(text) <= FOLD_CHARACTERS and not self.spans(text):
            return text
        what = f"{lines:,} lines" if lines > 1 else f"{len(text):,} characters"
        token, number = f"[{what} pasted]", 1
        while self._texts.setdefault(token, text) != text:
            number += 1
            token = f"[{what} pasted, {number}]"
        return token

    def whole(self, text: str) -> str:
        """A field's text with what its tokens stand for."""
        return _TOKEN.sub(lambda found: self._texts.get(found.group(), found.group()), text)

    def folded(self, text: str) -> str:
        """The reverse of ``whole``: tokens in place of what was pasted before."""
        behind = {pasted: token for token, pasted in self._texts.items()}
        longest = sorted(behind, key=len, reverse=True)
        if not longest:
            return text
        return re.sub("|".join(map(re.escape, longest)), lambda found: behind[found.group()], text)

    def spans(self, line: str) -> list[tuple[int, int]]:
        """Where the tokens of a text begin and end."""
        return [found.span() for found in _TOKEN.finditer(line) if found.group() in self._texts]
