"""The text of one reply as it comes: made safe, its thinking timed, and where each token of it came from."""

from __future__ import annotations

from collections.abc import Iterable

from dflash_local.events import Channel, Origin, Piece, Step
from dflash_local.terminal import TerminalFilter

LEGEND = "underlined ‹in marks›: chosen by the target itself; the rest: drafted and accepted"


class SafePieces:
    """Makes the pieces of one reply safe; each channel is a text of its own."""

    def __init__(self) -> None:
        self._filters: dict[Channel, TerminalFilter] = {}
        self._last: dict[Channel, Origin] = {}
        self._channel: Channel = "final"
        self._began: float | None = None
        self._tokens, self._seconds = 0, 0.0  # of the thinking

    def feed(self, *steps: Step) -> list[Piece]:
        """Return the safe pieces of steps, neighbours of one kind as one."""
        joined: list[Piece] = []
        for step in steps:
            self._time(step)
            for piece in step.pieces:
                self._last[piece.channel] = piece.origin
                text = self._filters.setdefault(piece.channel, TerminalFilter()).feed(piece.text)
                _join(joined, Piece(text, piece.channel, piece.origin))
        return joined

    def finish(self) -> list[Piece]:
        """Return what was held back."""
        joined: list[Piece] = []
        for channel, held in self._filters.items():
            _join(joined, Piece(held.finish(), channel, self._last[channel]))
        return joined

    @property
    def thinking_title(self) -> str:
        """Say how long it thought; not known of a conversation that was taken up."""
        return f"Thinking ({self._tokens} tokens, {self._seconds:.1f} s)" if self._tokens else "Thinking"

    def _time(self, step: Step) -> None:
        self._began = step.t_s if self._began is None else self._began
        self._channel = step.pieces[-1].channel if step.pieces else self._channel
        if self._channel == "thinking":
            self._tokens, self._seconds = self._tokens + len(step.token_ids), step.t_s - self._began


def _join(pieces: list[Piece], new: Piece) -> None:
    last = pieces[-1] if pieces else None
    if last is not None and (last.channel, last.origin) == (new.channel, new.origin):
        pieces[-1] = Piece(last.text + new.text, new.channel, new.origin)
    elif new.text:
        pieces.append(new)


def text_of(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def marked(piece: Piece) -> str:
    """Return the text; a token of the target's own stands in marks, a line end stays one."""
    if piece.origin == "accepted":
        return piece.text
    core = piece.text.strip()
    if not core:
        return f"‹↵›{piece.text}" if "\n" in piece.text else f"‹␣›{piece.text[1:]}"
    before, _, after = piece.text.partition(core)
    return f"{before}‹{core}›{after}"
