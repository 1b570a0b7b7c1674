"""Ids to text that is safe to show: whole characters, channels separated, nothing of a stop string.

The result depends on the ids alone, never on how they were grouped into pushes: a reply is the same text
with any block length. Stop strings are looked for in the text of each channel as the user sees it, one
channel at a time, markup excluded; a stop string that itself contains a tag is looked for in the raw text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from dflash_local.chat.channels import ChannelParser, Span
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.chat.tool_formats import MARKUP_TOKENS
from dflash_local.events import Channel, Origin, Piece


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
        """Set the failure links breadth first; a node also matches what the node it fails to matches."""
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
        """Return the characters at the end of the text that may still become a stop string."""
        return self._depth[self._state]

    def feed(self, character: str) -> int:
        """Return the length of the longest stop string this character completes, 0 for none."""
        self._state = self._step(self._state, character)
        return self._match[self._state]

    def reset(self) -> None:
        self._state = 0


@dataclass(frozen=True, slots=True)
class Pushed:
    """Outcome of one push.

    Attributes:
        pieces: text that became safe to show.
        stop_at: ids of this push up to and including the one that made a stop string certain, or None.
            It counts as long as the ids given; at least 1.
    """

    pieces: tuple[Piece, ...]
    stop_at: int | None = None


class TextStream:
    """The text of one reply, as its ids come in.

    Args:
        tokenizer: decodes; special tokens, but for those that tool calls are read by, and stop ids are never shown.
        stops: the reply ends before the first of these.
        channels: a fresh parser, see ``channel_parser``.
        goes_on: the reply goes on with a text: of its first word no space is dropped.

    Attributes:
        stop: the stop string that ended the text; empty where none did.
        thinking_tokens: how many ids were of the thinking channel, marks apart.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], channels: ChannelParser, goes_on: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.decoder(goes_on=goes_on)
        self._channels = channels
        markup = set(channels.tags) | {token.text for token in tokenizer.added.values() if token.special}
        raw = {stop for stop in stops if any(tag in stop for tag in markup)}
        self._raw_stops = StopStrings(raw) if raw else None
        self._seen_stops = StopStrings(set(stops) - raw) if set(stops) - raw else None
        self._held: list[tuple[Piece, bool]] = []  # characters on their way out, and whether they are shown
        self._texts: dict[Channel, list[str]] = {"thinking": [], "final": [], "tool": []}
        self._stopped = False
        self.stop = ""
        self.thinking_tokens = 0
        self._thinks = False
        self._last_origin: Origin = "bonus"

    def push(self, ids: Sequence[int], origins: Sequence[Origin]) -> Pushed:
        """Take ids and where each came from. After a stop string was found nothing more comes out."""
        pieces: list[Piece] = []
        for index, (token_id, origin) in enumerate(zip(ids, origins) if not self._stopped else ()):
            self._last_origin = origin
            for span in self._spans(token_id):
                pieces += self._take(span, origin)
                self._thinks = span.shown and span.channel == "thinking"  # as before where no character is completed
            self.thinking_tokens += self._thinks
            if self._stopped:
                return Pushed(self._emit(pieces), index + 1)
        return Pushed(self._emit(pieces))

    def finish(self) -> tuple[Piece, ...]:
        """End the text: half a character becomes U+FFFD, held-back text is let go. Its origin is as it came."""
        pieces: list[Piece] = []
        for span in [*self._channels.text(self._decoder.finish()), *self._channels.finish()]:
            pieces += self._take(span, self._last_origin)
        pieces += self._release(len(self._held))
        self._stopped = True
        return self._emit(pieces)

    def text(self, channel: Channel = "final") -> str:
        """Return all text of a channel that was returned so far."""
        return "".join(self._texts[channel])

    def _spans(self, token_id: int) -> list[Span]:
        """Return what one id adds: markup, or the characters it completes."""
        added = self._tokenizer.added.get(token_id)
        if added is not None and added.text in self._channels.tags:
            before = self._channels.text(self._decoder.finish())
            return before + (self._channels.token(added.text) or [])
        if added is not None and added.special and added.text in MARKUP_TOKENS:
            return self._channels.text(self._decoder.finish() + added.text)
        spans = self._channels.text(self._decoder.push(token_id))
        if added is not None and added.special and self._raw_stops:
            spans.append(Span(added.text, "final", False))
        return spans

    def _take(self, span: Span, origin: Origin) -> list[Piece]:
        """Add a span; returns what may be shown now. Sets ``_stopped`` at a stop string, then takes no more."""
        if self._stopped:
            return []
        if self._raw_stops is None and self._seen_stops is None:
            return [Piece(span.text, span.channel, origin)] if span.shown else []
        return self._scan(span, origin)

    def _scan(self, span: Span, origin: Origin) -> list[Piece]:
        if self._seen_stops and (span.text in self._channels.tags):
            self._seen_stops.reset()
        for character in span.text:
            self._held.append((Piece(character, span.channel, origin), span.shown))
            found = self._raw_stops.feed(character) if self._raw_stops else 0
            seen = self._seen_stops.feed(character) if self._seen_stops and span.shown else 0
            if found or seen:
                raw_start, seen_start = len(self._held) - found, self._seen_start(seen)
                keep = min(raw_start, seen_start)
                hidden_too = raw_start <= seen_start
                self.stop = "".join(piece.text for piece, shown in self._held[keep:] if shown or hidden_too)
                self._stopped = True
                safe = self._release(keep)
                self._held.clear()
                return safe
        waiting = self._raw_stops.held if self._raw_stops else 0
        visible = self._seen_stops.held if self._seen_stops else 0
        return self._release(min(len(self._held) - waiting, self._seen_start(visible)))

    def _seen_start(self, visible: int) -> int:
        """Return the index in the held characters where the last ``visible`` shown ones begin."""
        index = len(self._held)
        while visible and index:
            index -= 1
            visible -= self._held[index][1]
        return index

    def _release(self, count: int) -> list[Piece]:
        out = [piece for piece, shown in self._held[:count] if shown]
        del self._held[:count]
        return out

    def _emit(self, parts: list[Piece]) -> tuple[Piece, ...]:
        """Merge neighbours of one channel and origin, and remember the text."""
        pieces = []
        for (channel, origin), group in groupby(parts, key=lambda part: (part.channel, part.origin)):
            text = "".join(part.text for part in group)
            self._texts[channel].append(text)
            pieces.append(Piece(text, channel, origin))
        return tuple(pieces)
