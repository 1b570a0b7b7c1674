"""A race as the screens show it: run on a thread, each reply alone on the machine, then shown again as it went."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dflash_local.app.notices import Notify
from dflash_local.errors import Interrupted
from dflash_local.events import Event, Finished, LoadProgress, Mode, Notice, Piece, Queued, Step
from dflash_local.service.race import MODES, NAMES, Lane, Race, Racer
from dflash_local.terminal import safe_line
from dflash_local.ui.figures import rate
from dflash_local.ui.job import Job
from dflash_local.ui.pieces import SafePieces, text_of

MEASURING = "measuring {} of 2: {}, alone on the machine"
PACES = {1.0: "true speed", 0.5: "half speed", 0.25: "quarter speed"}
LEGEND = "+5: tokens of one step"
MARKS_LEGEND = f"{LEGEND}; underlined: the target's own"
IN_VIEW = 3  # rows of the slower reply that stay in view
Prepare = Callable[[Notify], Racer]  # may load the pair; called on the race's thread


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
        if self.speed is not None or len(self.blocks) < 2:
            return self.speed
        first, last = self.blocks[0], self.blocks[-1]
        spent = last.t_s - first.t_s
        return (self.tokens - first.tokens) / spent if spent > 0 and self.tokens else None

    @property
    def counts(self) -> str:
        """Say how many tokens it has and how fast they came."""
        return f"{self.tokens} tokens · {rate(self.rate)} tok/s"

    def line(self, width: int) -> str:
        """Say how far it is; where all of it is too wide, without the tokens."""
        sign = "■" if self.speed is not None else "▶" if self.blocks else "○"
        clock = f"{sign} {self.seconds:.{1 if self.seconds >= 10 else 2}f} s"
        whole = f"{clock} · {self.counts}"
        return whole if len(whole) <= width else f"{clock} · {rate(self.rate)} tok/s"

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


def level(ends: Sequence[int], height: int) -> int:
    """Find the row at the top of both panes, so that equal lines stand level.

    The reply that is ahead is followed while ``IN_VIEW`` rows of the other one are in view, then the other one is.

    Args:
        ends: rows that each text takes. height: of a pane.
    """
    return max(0, min(max(ends) - height, min(ends) - IN_VIEW))


class RaceRun(Job[Race]):
    """One race; it may be looked at from any thread, ``replay`` and ``advance`` are one thread's.

    Attributes:
        tracks: of both replies, as they come or as they are shown again. state: what goes on.
        measuring: the lane that runs now. prepared: the pair is loaded. stopped: it was asked to end.
        version: grows with everything that came. at: seconds of the race that were shown again.
        pace: of the replay, 1 at true speed.
    """

    def __init__(self, prepare: Prepare, notify: Callable[[Notice], None] = lambda _notice: None) -> None:
        self.tracks: dict[Mode, Track] = {mode: Track() for mode in MODES}
        self.state, self.version = "getting ready", 0
        self.measuring: Mode | None = None
        self.prepared = self.stopped = False
        self.pace = 1.0
        self._prepare, self._notify = prepare, notify
        self._lock = threading.Lock()
        self._racer: Racer | None = None
        self.at = 0.0
        self._looked: float | None = None  # when ``at`` was set
        self._left: dict[Mode, list[Step]] = {}
        super().__init__(self._race, self._end)

    def _race(self) -> Race:
        self._racer = racer = self._prepare(self._on_load)
        self.state, self.prepared = "warming both up", True
        if self.stopped:
            raise Interrupted("the race was stopped")
        return racer.run(self._on_event)

    def _end(self) -> None:
        self.stopped = True
        if self._racer is not None:
            self._racer.cancel()

    def _on_load(self, event: Notice | LoadProgress) -> None:
        if isinstance(event, LoadProgress):
            self.state = f"{safe_line(event.stage)} {event.fraction:.0%}"
        else:
            self._notify(event)

    def _on_event(self, mode: Mode, event: Event) -> None:
        with self._lock:
            done = sum(track.speed is not None for track in self.tracks.values())
            self.measuring, self.state = mode, MEASURING.format(min(done + 1, 2), NAMES[mode])
            self.tracks[mode].take(event)
            if isinstance(event, Queued) and event.position:
                self.state = f"waiting, {event.position} before"
            elif all(track.speed is not None for track in self.tracks.values()):
                self.measuring, self.state = None, "comparing both"  # where they differ, the target is asked once more
            self.version += 1

    @property
    def race(self) -> Race | None:
        """Return what came of it; None while it runs, and where nothing did."""
        return self.result if not self.running and self.error is None else None

    @property
    def replaying(self) -> bool:
        return self._looked is not None

    @property
    def shown(self) -> bool:
        """True when all of it was shown again."""
        return self.replaying and all(track.speed is not None for track in self.tracks.values())

    def replay(self) -> None:
        """Begin to show both lanes again, from the top."""
        race = self.result
        self.tracks = {mode: Track() for mode in MODES}
        self._left = {lane.mode: list(lane.steps) for lane in (race.ar, race.dflash)}
        self.at, self._looked = 0.0, time.monotonic()

    def advance(self, to_end: bool = False) -> None:
        """Show what had come by now, at ``pace``, or all of it; ``replay`` goes before."""
        now = time.monotonic()
        self.at = float("inf") if to_end else self.at + (now - (self._looked or now)) * self.pace
        self._looked = now
        for lane in (self.result.ar, self.result.dflash):
            track, left = self.tracks[lane.mode], self._left[lane.mode]
            while left and left[0].t_s <= self.at:
                track.take(left.pop(0))
            if not left and self.at >= lane.seconds:
                track.take(lane.finished)
            else:
                track.seconds = min(self.at, lane.seconds)
