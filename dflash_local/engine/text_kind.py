"""Which kind of text a reply is in: thinking, an answer, a call of a tool, or code."""

from __future__ import annotations

from typing import get_args

from dflash_local.events import Channel, Piece

FENCE = "```"
CODE = "code"
KINDS: tuple[str, ...] = (*get_args(Channel), CODE)


class TextKind:
    """The kind of a reply's text where it ends now.

    Attributes:
        name: of ``KINDS``: its channel, or ``code`` between two fences of Markdown.
    """

    def __init__(self, channel: Channel = "final") -> None:
        self.name: str = channel
        self._channel, self._line = channel, ""

    def add(self, piece: Piece) -> None:
        """Go on with a piece of the text. A fence counts when its line has ended."""
        if piece.channel != self._channel:
            self.name = self._channel = piece.channel
            self._line = ""
        *lines, self._line = f"{self._line}{piece.text}".split("\n")
        if sum(line.lstrip().startswith(FENCE) for line in lines) % 2:
            self.name = self._channel if self.name == CODE else CODE
