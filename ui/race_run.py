"""A race as the screens show it: run on a thread, each reply alone on the machine, then shown again as it went."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dflash_local.app.notices import Notify
from dflash_local.errors import Interrupted
from dflash_local.events import Event, LoadProgress, Mode, Notice, Queued, Step
from dflash_local.service.race import MODES, NAMES, Race, Racer
from dflash_local.service.race_lanes import Track
from dflash_local.terminal import safe_line
from dflash_local.ui.job import Job

MEASURING = "measuring {} of 2: {}, alone on the machine"
PACES = {1.0: "true speed", 0.5: "half speed", 0.25: "quarter speed"}
LEGEND = "+5: tokens of one step"
MARKS_LEGEND = f"{LEGEND}; underlined: the target's own"
Prepare = Callable[[Notify], Racer]  # may load the pair; called on the race's thread


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
