"""A reply's text as what the model thought, what it said and what it called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from dflash_local.chat.tool_calls import CallFormat, CallParser, Part, call_parser
from dflash_local.events import Channel, Piece


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the thinking channel."""

    text: str


ReplyPart = Thought | Part


class PartReader:
    """Takes pieces as they come, cut anywhere.

    Args:
        form: how the model writes calls. tools: that it was offered; without any no call is looked for.
        notices: gets a line where a call was broken.
    """

    def __init__(self, form: CallFormat, tools: Sequence[Mapping[str, Any]], notices: list[str]) -> None:
        self._form, self._tools, self._notices = form, tools, notices
        self._parser: CallParser | None = None

    def feed(self, pieces: Iterable[Piece]) -> Iterator[ReplyPart]:
        for channel, group in groupby(pieces, key=lambda piece: piece.channel):
            text = "".join(piece.text for piece in group)
            if channel == "thinking":
                yield Thought(text)
            elif self._reads(channel):
                if self._parser is None:
                    self._parser = call_parser(self._form, self._tools)
                yield from self._parser.feed(text)
            else:
                yield text

    def finish(self) -> list[Part]:
        """Return what was held back until the end."""
        if self._parser is None:
            return []
        parts = self._parser.finish()
        if self._parser.broken:
            self._notices.append(f"broken or unfinished tool calls, given as text: {self._parser.broken}")
        return parts

    def _reads(self, channel: Channel) -> bool:
        """Return whether calls are looked for in a channel: harmony and servers have one of their own for them."""
        return bool(self._tools) and (channel == "tool") == (self._form in ("harmony", "server"))
