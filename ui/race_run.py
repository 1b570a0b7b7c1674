"""A race as the screens show it: run on a thread, each reply alone on the machine, then shown again as it went."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dflash_local.app.notices import Notify
from dflash_local.errors import Interrupted
from dflash_local.events import Event, Finished, LoadProgress, Mode, Notice, Queued, Step
from dflash_local.service.race import MODES, Race, Racer
from dflash_local.terminal import safe_line
from dflash_local.ui.figures import rate
from dflash_local.ui.job import Job
from dflash_local.ui.pieces import SafePieces, text_of

NAMES: dict[Mode, str] = {"ar": "without drafting (AR)", "dflash": "with the drafter (DFlash)"}
RUNNING = "running {}; each has the machine to itself, both are replayed together"
Prepare = Callable[[Notify], Racer]  # may load the pair; called on the race's thread


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
    def line(self) -> str:
        """Say how far it is, and at its end how fast it was."""
        done = self.speed is not None
        sign = "■" if done else "▶" if self.tokens else "○"
        speed = f" · {rate(self.speed)} tok/s" if done else ""
        return f"{sign} {self.seconds:.2f} s · {self.tokens} tokens{speed}"

    def take(self, event: Event) -> None:
        """Count one event in; a server that names no tokens tells only at the end how many there are."""
        if isinstance(event, Step):
            self.text += text_of(self._safe.feed(event))
            self.tokens += len(event.token_ids)
            self.seconds = event.t_s
        elif isinstance(event, Finished) and self.speed is None:
            self.text += text_of(self._safe.finish())
            self.tokens = max(self.tokens, event.usage.completion_tokens)
            self.seconds, self.speed = event.stats.prefill_s + event.stats.decode_s, event.stats.tokens_per_s


class RaceRun(Job[Race]):
    """One race; it may be looked at from any thread, ``replay`` and ``advance`` are one thread's.

    Attributes:
        tracks: of both replies, as they come or as they are shown again. state: what goes on.
        prepared: the pair is loaded. stopped: it was asked to end. version: grows with everything that came.
    """

    def __init__(self, prepare: Prepare, notify: Callable[[Notice], None] = lambda _notice: None) -> None:
        self.tracks: dict[Mode, Track] = {mode: Track() for mode in MODES}
        self.state, self.version = "getting ready", 0
        self.prepared = self.stopped = False
        self._prepare, self._notify = prepare, notify
        self._lock = threading.Lock()
        self._racer: Racer | None = None
        self._begun: float | None = None  # when it was begun to be shown again
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
            self.state = RUNNING.format(NAMES[mode])
            self.tracks[mode].take(event)
            if isinstance(event, Queued) and event.position:
                self.state = f"waiting, {event.position} before"
            elif all(track.speed is not None for track in self.tracks.values()):
                self.state = "comparing both"  # where they differ, the target is asked once more
            self.version += 1

    @property
    def race(self) -> Race | None:
        """Return what came of it; None while it runs, and where nothing did."""
        return self.result if not self.running and self.error is None else None

    @property
    def replaying(self) -> bool:
        return self._begun is not None

    @property
    def shown(self) -> bool:
        """True when all of it was shown again."""
        return self._begun is not None and all(track.speed is not None for track in self.tracks.values())

    def replay(self) -> None:
        """Begin to show both lanes again, at the speed they had."""
        race = self.result
        self.tracks = {mode: Track() for mode in MODES}
        self._left = {lane.mode: list(lane.steps) for lane in (race.ar, race.dflash)}
        self._begun = time.monotonic()

    def advance(self, seconds: float | None = None) -> None:
        """Show what had come by now, or by ``seconds``; ``replay`` goes before."""
        by = time.monotonic() - (self._begun or 0.0) if seconds is None else seconds
        for lane in (self.result.ar, self.result.dflash):
            track, left = self.tracks[lane.mode], self._left[lane.mode]
            while left and left[0].t_s <= by:
                track.take(left.pop(0))
            if not left and by >= lane.seconds:
                track.take(lane.finished)
            else:
                track.seconds = min(by, lane.seconds)
