"""How far a lane of a race is at a time: its tokens, its speed, and which rows of both stand level; for all views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash_local.events import Event, Finished, Piece, Step
from dflash_local.service.pieces import SafePieces, text_of
from dflash_local.service.race import Lane
from dflash_local.tables import counted

IN_VIEW = 3  # rows of the slower reply that stay in view at least, and
SHARE_IN_VIEW = 3  # this part of the pane


@dataclass(frozen=True, slots=True)
class LaneBlock:
    """What one step committed.

    Attributes:
        t_s: seconds since the request. tokens: how many; 0 where a server names none. pieces: safe to show.
    """

    t_s: float
    tokens: int
    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        return text_of(self.pieces)


@dataclass(slots=True)
class Track:
    """How far one of the two is.

    Attributes:
        text: of its blocks, safe to show, thinking included. seconds: since its request started.
        speed: tokens per second of all of it; None before its end.
    """

    text: str = ""
    tokens: int = 0
    seconds: float = 0.0
    speed: float | None = None
    blocks: list[LaneBlock] = field(default_factory=list)
    _safe: SafePieces = field(default_factory=SafePieces)

    @classmethod
    def of(cls, lane: Lane) -> Track:
        """A lane at its end."""
        track = cls()
        for event in lane.events:
            track.take(event)
        return track

    @property
    def rate(self) -> float | None:
        """Tokens per second so far, the first step left out; at its end the one that the race has."""
        if self.speed is not None or not self.blocks:
            return self.speed
        return rate_so_far(self.blocks[0], self.blocks[-1], self.tokens)

    @property
    def line(self) -> str:
        """Say how far it is."""
        return f"{self._clock} · {counted(self.tokens, 'token')} · {self._pace}"

    def line_in(self, width: int) -> str:
        """Say how far it is; where all of it is too wide, without the tokens."""
        return self.line if len(self.line) <= width else f"{self._clock} · {self._pace}"

    @property
    def _pace(self) -> str:
        return f"{speed_text(self.rate)} tok/s"

    @property
    def _clock(self) -> str:
        sign = "■" if self.speed is not None else "▶" if self.blocks else "○"
        return f"{sign} {self.seconds:.{1 if self.seconds >= 10 else 2}f} s"

    def take(self, event: Event) -> None:
        """Count one event in; a server that names no tokens tells only at the end how many there are."""
        if isinstance(event, Step):
            self._add(event.t_s, len(event.token_ids), self._safe.feed(event))
        elif isinstance(event, Finished) and self.speed is None:
            if held := self._safe.finish():
                self._add(self.seconds, 0, held)
            self.tokens = max(self.tokens, event.usage.completion_tokens)
            self.seconds, self.speed = event.stats.prefill_s + event.stats.decode_s, event.stats.tokens_per_s

    def _add(self, t_s: float, tokens: int, pieces: Sequence[Piece]) -> None:
        self.blocks.append(LaneBlock(t_s, tokens, tuple(pieces)))
        self.text += text_of(pieces)
        self.tokens += tokens
        self.seconds = t_s


def rate_so_far(first: LaneBlock, last: LaneBlock, tokens: int) -> float | None:
    """Tokens per second up to a block, the first one left out; ``tokens`` are those of all blocks by then."""
    spent = last.t_s - first.t_s
    return (tokens - first.tokens) / spent if spent > 0 and tokens else None


def speed_text(rate: float | None) -> str:
    """Write tokens per second; a dash where they are not known."""
    return "–" if rate is None else f"{rate:.1f}" if rate < 100 else f"{rate:,.0f}"


def level(ends: Sequence[int], height: int) -> int:
    """Find the row at the top of both panes, so that equal lines stand level.

    The reply that is ahead is followed while enough rows of the other one are in view, then the other one is.

    Args:
        ends: rows that each text takes. height: of a pane.
    """
    return max(0, min(max(ends) - height, min(ends) - max(IN_VIEW, height // SHARE_IN_VIEW)))
