"""A race shown again as it went, both replies side by side. Draws nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from dflash_local.events import Finished, Mode, Step
from dflash_local.service.race import MODES, Race
from dflash_local.ui.reading_text import rate
from dflash_local.ui.safety import SafePieces

NAMES: dict[Mode, str] = {"ar": "without drafting (AR)", "dflash": "with the drafter (DFlash)"}
RUNNING = {
    mode: f"running {name}; each has the machine to itself, both are replayed together" for mode, name in NAMES.items()
}
COMPARING = "comparing both"  # where they differ, the target is asked once more


@dataclass(slots=True)
class Track:
    """How far one of the two is.

    Attributes:
        text: safe to show, thinking included. seconds: since its request started.
        speed: tokens per second of all of it; None before its end.
    """

    text: str = ""
    tokens: int = 0
    seconds: float = 0.0
    speed: float | None = None
    _safe: SafePieces = field(default_factory=SafePieces)

    @property
    def done(self) -> bool:
        """True when all of it is here."""
        return self.speed is not None

    @property
    def line(self) -> str:
        """Says how far it is, and at its end how fast it was."""
        sign = "■" if self.done else "▶" if self.tokens else "○"
        speed = f" · {rate(self.speed)} tok/s" if self.done else ""
        return f"{sign} {self.seconds:.2f} s · {self.tokens} tokens{speed}"

    def take(self, step: Step) -> None:
        """Add one step."""
        self.text += "".join(piece.text for piece in self._safe.feed(step.pieces))
        self.tokens += len(step.token_ids)
        self.seconds = step.t_s

    def end(self, finished: Finished) -> None:
        """Add what was held back; a server that names no tokens tells only now how many there are."""
        self.text += "".join(piece.text for piece in self._safe.finish())
        self.tokens = max(self.tokens, finished.usage.completion_tokens)
        self.seconds, self.speed = finished.stats.prefill_s + finished.stats.decode_s, finished.stats.tokens_per_s


class Replay:
    """Shows both lanes of a race again, at the speed they had."""

    def __init__(self, race: Race) -> None:
        self.tracks: dict[Mode, Track] = {mode: Track() for mode in MODES}
        self._lanes = {lane.mode: lane for lane in (race.ar, race.dflash)}
        self._left = {mode: list(lane.steps) for mode, lane in self._lanes.items()}
        self._begun = time.monotonic()

    @property
    def done(self) -> bool:
        """True when all of both is shown."""
        return all(track.done for track in self.tracks.values())

    def advance(self, seconds: float | None = None) -> None:
        """Take what had come by now, or by ``seconds``."""
        by = time.monotonic() - self._begun if seconds is None else seconds
        for mode, track in self.tracks.items():
            left, lane = self._left[mode], self._lanes[mode]
            while left and left[0].t_s <= by:
                track.take(left.pop(0))
            if not left and by >= lane.seconds:
                if not track.done:
                    track.end(lane.finished)
            else:
                track.seconds = min(by, lane.seconds)
